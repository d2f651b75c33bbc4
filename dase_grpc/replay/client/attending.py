"""Attendance without a lease of one's own: actors under that of their learner, evaluators under none."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from dase_grpc.errors import ConfigError, RefusalError, StaleLeaseError, WaitedTooLongError
from dase_grpc.metrics.nodes import ActorMetrics, StreamMetrics
from dase_grpc.progress import Attendance, Attendant
from dase_grpc.replay.client.channels import Lines, require_let_in
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.finding import first_of
from dase_grpc.replay.client.joining import FAREWELL_S
from dase_grpc.replay.client.patience import Wanted, patiently
from dase_grpc.replay.client.waits import Wait, Waited, WaitReason
from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.v1 import cluster_pb2
from dase_grpc.schema import TransitionSchema

LOOK_S: Final = 0.5

log = logging.getLogger("dase")


class AgentFinished(Exception):
    """The agent has done all its steps and has no learner, so there is nothing to explore for."""


async def attend(
    cluster: ClusterClient, wanted: Wanted, schema: TransitionSchema, *, node: Attendant
) -> Membership:
    """Waits until a learner holds the lease of the node's agent; what its streams state then.

    Raises:
        AgentFinished: it has done all its steps.
        WaitedTooLongError: none has come within the time that the replay may be away.
        UnreachableError, OverloadedError, DrainingError: the replay did not come, or serve, in time.
        RefusalError: it refused otherwise.
    """
    began, said = time.monotonic(), False
    attendance = Attendance(state=f"waiting: {learner_of(node)}")

    def ask(timeout_s: float) -> Awaitable[cluster_pb2.AttendResponse]:
        return cluster.attend(
            node,
            attendance,
            run_id=wanted.run_id,
            fingerprint=schema.fingerprint,
            timeout_s=timeout_s,
            wait_for_ready=True,
        )

    while True:
        answer = await patiently(ask, wanted)
        if answer.HasField("lease"):
            return Membership.of(answer, ttl_s=answer.ttl_seconds, node_id=node.node_id)
        if answer.agent_finished:
            raise AgentFinished(has_finished(node.agent_id))
        if time.monotonic() - began >= wanted.away_s:
            raise _without_learner(node, wanted.away_s)
        if not said:
            log.info("waiting up to %g s for %s", wanted.away_s, learner_of(node))
            said = True
        await asyncio.sleep(LOOK_S)


def has_finished(agent_id: int | None) -> str:
    """Why an actor has nothing to do any more."""
    return f"agent {agent_id} has finished"


def learner_of(node: Attendant) -> str:
    """What an actor waits for whose agent has no learner, and how to end that."""
    agent = node.agent_id
    return f"a learner of agent {agent}: start one with `dase node --role learner --agent {agent}`"


class ActorConnection(Connection):
    """A Connection of a node that works under its learner's lease, whoever that learner is.

    When the learner was replaced, or the replay came back without its data, the streams begin again under
    the lease that is there now; where there is none they wait for one, up to `timeout_s`. What an actor
    attends by is its heartbeat, so that is where the new lease is learned from.

    Attributes:
        finished: set once the agent has done all its steps and its learner has left.
        learner_updates: training iterations of its learner when the replay was last heard of.
    """

    def __init__(
        self,
        target: StreamTarget,
        *,
        node: Attendant,
        timeout_s: float,
        metrics: ActorMetrics,
        look_why_away: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(target, timeout_s=timeout_s, metrics=metrics, look_why_away=look_why_away)
        self._node = node
        self._renewed = asyncio.Event()
        self._unled = Waited()
        self.finished = asyncio.Event()
        self.learner_updates = 0

    @property
    def wait(self) -> Wait | None:
        """The wait for a learner, if it is a long one."""
        if not self._unled.long:
            return None
        return Wait(self._unled, WaitReason.LEARNER, f"waiting for {learner_of(self._node)}")

    @property
    def inserted(self) -> int:
        """Transitions that the agent as a whole had stored here when the replay was last heard of."""
        return self.inserted_of(self.target.member.agent_id)

    async def attending(self, attendance: Callable[[], Attendance]) -> None:
        """Says again and again what the node is doing, and learns who its learner is; until cancelled.

        Raises:
            RefusalError: see Connection.keep.
        """
        await self.keep(Stream.HEARTBEAT, partial(self._attend, attendance))

    async def leave(self, *, timeout_s: float) -> None:
        """Says that the node ends.

        Raises:
            RefusalError: the replay is not there to hear it.
        """
        await self._cluster.attend(self._node, Attendance(), leaving=True, timeout_s=timeout_s)

    async def _attend(self, attendance: Callable[[], Attendance], _: StreamTarget) -> None:
        while True:
            member, schema = self.target.member, self.target.schema
            answer = await self._cluster.attend(
                self._node, attendance(), run_id=member.run_id, fingerprint=schema.fingerprint
            )
            self.up(Stream.HEARTBEAT)
            self._take(answer)
            await asyncio.sleep(min(LOOK_S, member.ttl_s / 4))

    def _take(self, answer: cluster_pb2.AttendResponse) -> None:
        if not answer.HasField("lease"):
            self.buffer = answer.buffer
            if answer.agent_finished:
                self.finished.set()
            self._unled.begin()
            return
        self._unled.end()
        self.learner_updates = answer.learner_updates
        before = self.target.member
        member = Membership.of(answer, ttl_s=answer.ttl_seconds, node_id=self._node.node_id)
        if (before.epoch, before.buffer_id) == (member.epoch, member.buffer_id):
            self._notice(answer.buffer)
            return
        self.target, self.buffer = replace(self.target, member=member), answer.buffer
        if before.buffer_id != member.buffer_id:
            self.lost(
                f"the replay service at {self.target.address} came back without its data (incarnation "
                f"{member.incarnation}, was {self.incarnation}); going on with the buffer that is there now"
            )
            self._restarted(member.incarnation)
        log.info("agent %d has another learner (epoch %d)", member.agent_id, member.epoch)
        self._renewed.set()
        self._renewed = asyncio.Event()

    async def _replaced(self, target: StreamTarget, error: StaleLeaseError) -> None:
        await self._until_led_anew(target)

    async def _rejoin(self, stream: Stream, target: StreamTarget, backoff: object) -> None:
        await self._until_led_anew(target)

    async def _until_led_anew(self, target: StreamTarget) -> None:
        """Waits for another lease or buffer than those of `target`.

        Raises:
            WaitedTooLongError: none has come in time.
        """
        if self.target is not target:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._renewed.wait()
        except TimeoutError:
            raise _without_learner(self._node, self._timeout_s) from None


def _without_learner(node: Attendant, waited_s: float) -> WaitedTooLongError:
    agent = node.agent_id
    return WaitedTooLongError(
        f"agent {agent} has had no learner for {waited_s:g} s, so this actor ends; start one with "
        f"`dase node --role learner --agent {agent}`, or let it wait longer with --replay-timeout"
    )


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
