"""How an evaluator comes to its replay, where it holds no lease: it attends at the first shard."""

import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dase_grpc.attendance import Attendance, Attendant
from dase_grpc.errors import ConfigError, RefusalError
from dase_grpc.explorer_metrics import StreamMetrics
from dase_grpc.nodes.leaving import FAREWELL_S
from dase_grpc.replay.client.connection import Connection
from dase_grpc.replay.client.finding import Lines, first_of
from dase_grpc.replay.client.inserter import StreamTarget
from dase_grpc.replay.client.joining import Wanted, patiently
from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.service.cluster import ClusterClient, Membership
from dase_grpc.replay.service.server import Address, require_let_in
from dase_grpc.replay.wire.v1 import cluster_pb2
from dase_grpc.schema import TransitionSchema

log = logging.getLogger("dase")


@dataclass(frozen=True)
class Guest:
    """A node without a lease as the replay's first shard sees it."""

    node: Attendant
    address: Address
    target: StreamTarget

    def connection(self, *, timeout_s: float, credentials: Credentials, metrics: StreamMetrics) -> Connection:
        """The connection to the shard."""
        return Connection(
            self.target,
            timeout_s=timeout_s,
            metrics=metrics,
            look_why_away=partial(require_let_in, self.address, credentials),
        )

    def attend(
        self, target: StreamTarget, attendance: Attendance
    ) -> Coroutine[Any, Any, cluster_pb2.AttendResponse]:
        """Says what the node does."""
        return ClusterClient(target.channel, target.address).attend(
            self.node, attendance, run_id=target.member.run_id, fingerprint=target.schema.fingerprint
        )

    @asynccontextmanager
    async def farewell(self, connection: Connection) -> AsyncIterator[None]:
        """Says at the end of the block, however it ends, that the node leaves."""
        try:
            yield
        finally:
            target = connection.target
            cluster = ClusterClient(target.channel, target.address)
            try:
                await cluster.attend(
                    self.node, Attendance(), run_id=target.member.run_id, leaving=True, timeout_s=FAREWELL_S
                )
            except RefusalError as error:
                log.info("could not say farewell: %s", error)


async def arrived(lines: Lines, wanted: Wanted, schema: TransitionSchema, *, node: Attendant) -> Guest:
    """Attends for the first time at the first shard, which has the policies; waits for the replay.

    Raises:
        ConfigError: the replay is a shard that has no policies, or the shards do not belong together.
        RefusalError: see `joining.patiently`.
    """
    address = await first_of(lines, wanted)
    channel = lines.to(address)
    cluster = ClusterClient(channel, str(address))

    def attend(timeout_s: float) -> Coroutine[Any, Any, cluster_pb2.AttendResponse]:
        return cluster.attend(
            node,
            Attendance(),
            run_id=wanted.run_id,
            fingerprint=schema.fingerprint,
            timeout_s=timeout_s,
            wait_for_ready=True,
        )

    answer = await patiently(attend, replace(wanted, replay=address))
    member = Membership.of(answer, ttl_s=answer.ttl_seconds, node_id=node.node_id)  # of no agent
    if member.shard.index:
        raise ConfigError(
            f"the replay at {address} is shard {member.shard} of run {member.run_id!r}, and the policies are "
            f"at the first; name the addresses of all shards with --replay"
        )
    return Guest(node, address, StreamTarget(channel, str(address), member, schema))
