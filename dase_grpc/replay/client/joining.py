"""A learner's admission under a lease, and how it gives its leases back."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from dase_grpc.config.resolve import RunConfig, require_capacity
from dase_grpc.errors import (
    AgentTakenError,
    ConfigError,
    DaseError,
    DrainingError,
    RefusalError,
    StaleLeaseError,
    UnreachableError,
)
from dase_grpc.progress import Progress, several
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget
from dase_grpc.replay.client.patience import NODE_NAME, Wanted, patiently
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.v1 import cluster_pb2
from dase_grpc.schema import TransitionSchema

HOLDER_LOOK_S: Final = 2.0
"""Time in which a live learner renews its lease several times."""

HOLDER_POLL_S: Final = 0.5

log = logging.getLogger("dase")

FAREWELL_S: Final = 2.0
"""How long a replay may take for each call."""


async def join(cluster: ClusterClient, wanted: Wanted, schema: TransitionSchema) -> Membership:
    """Joins the run; says so when it has to wait.

    Where the agent id that is asked for is held by a node that has fallen silent, waits for that lease to
    end, so that whoever takes the place of a dead learner can be started at once.

    Raises:
        UnreachableError, OverloadedError, DrainingError: the replay did not come, or serve, in time.
        AgentTakenError: a live node holds the agent id.
        UnauthenticatedError: the two sides' credentials do not fit.
        RefusalError: it refused otherwise.
    """

    def ask(timeout_s: float) -> Coroutine[Any, Any, Membership]:
        return cluster.join(
            node_name=NODE_NAME,
            schema=schema,
            agent_id=wanted.agent_id,
            run_id=wanted.run_id,
            node_id=wanted.node_id,
            timeout_s=timeout_s,
        )

    refused_at: float | None = None
    while True:
        try:
            return await patiently(ask, wanted)
        except AgentTakenError:
            if wanted.agent_id is None:
                raise
            pause_s = HOLDER_LOOK_S if refused_at is None else HOLDER_POLL_S
            refused_at = time.monotonic() if refused_at is None else refused_at
            await asyncio.sleep(pause_s)
            status = await patiently(lambda timeout_s: cluster.status(timeout_s=timeout_s), wanted)
            if _has_beaten(status, wanted.agent_id, within_s=time.monotonic() - refused_at):
                raise
            if pause_s == HOLDER_LOOK_S:
                log.info("agent %d's holder is silent: waiting for its lease to end", wanted.agent_id)


def _has_beaten(status: cluster_pb2.StatusResponse, agent_id: int, *, within_s: float) -> bool:
    """Whether the holder of an agent id has renewed its lease within the last seconds."""
    holder = {agent.agent_id: agent for agent in status.agents}.get(agent_id)
    return holder is not None and holder.lease == "live" and holder.seconds_since_heartbeat < within_s


def require_fit(config: RunConfig, member: Membership) -> None:
    """Checks this learner's settings against the replay's.

    Raises:
        ConfigError: they contradict each other.
    """
    agents = config.train.agents
    if member.agent_id >= agents:
        remedy = "a pair has no third learner"
        if config.shares_experience:
            remedy = f"start every learner with --agents {member.agent_id + 1}"
        raise ConfigError(
            f"the replay gave this learner agent id {member.agent_id}, but its configuration knows agents "
            f"0..{agents - 1}; {remedy}"
        )
    try:
        require_capacity(config, member.capacity)
        first = config.collected_before_updates
        if member.min_size > first:
            raise ValueError(
                f"the replay serves no batch before {member.min_size} transitions are there, and "
                f"{several(agents, 'agent')} before the first update collect only {first}; raise "
                f"agent.start_steps or "
                f"lower the replay's --min-size"
            )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def require_one_piece(config: RunConfig, *, shards: int) -> None:
    """Checks that a learner whose actors explore has a replay in one piece, which keeps its pace.

    Raises:
        ConfigError: it has several shards.
    """
    if shards > 1 and not config.train.explore:
        raise ConfigError(
            f"train.explore = false needs a replay in one piece, which keeps updates and steps in "
            f"proportion, and this one has {shards} shards; leave it out, or start a replay without --shard"
        )


@dataclass
class Farewell:
    """What a learner says when it gives its leases back.

    Attributes:
        targets: the replay, or its shards in their order.
        nothing_to_give_back: the lease is gone, or the replay is.
    """

    targets: Sequence[StreamTarget]
    reason: str = "failed"
    progress: Progress | None = None
    nothing_to_give_back: bool = False


@asynccontextmanager
async def leases(targets: Sequence[StreamTarget]) -> AsyncIterator[Farewell]:
    """Gives the leases back at the end of the block, however it ends, if somebody is there to take them.

    The reason given is the error that ends it, if one does.

    Of several shards one may be gone and the others there, so each is tried.
    """
    farewell = Farewell(targets)
    try:
        yield farewell
    except DaseError as error:
        farewell.reason = f"failed: {error}"
        gone = (UnreachableError, DrainingError, StaleLeaseError)
        farewell.nothing_to_give_back = isinstance(error, gone)
        raise
    except Exception as error:
        farewell.reason = f"failed: {type(error).__name__}: {error}"
        raise
    finally:
        if not farewell.nothing_to_give_back or len(farewell.targets) > 1:
            await leave(farewell)


async def leave(farewell: Farewell) -> None:
    """Leaves each shard, the first one last, so that whoever gets its lease finds the others free."""
    for target in reversed(farewell.targets):
        cluster = ClusterClient(target.channel, target.address)
        try:
            if farewell.progress is not None:
                await cluster.heartbeat(target.member, farewell.progress, timeout_s=FAREWELL_S)
            await cluster.leave(target.member, reason=farewell.reason, timeout_s=FAREWELL_S)
        except RefusalError as error:
            log.info("could not give the lease back: %s", error)
