"""How a learner comes to its agent id: it waits for the replay, and for the lease of one that died to end."""

import asyncio
import logging
import platform
import time
from dataclasses import dataclass
from typing import Final

from dase_grpc.config import RunConfig, require_capacity
from dase_grpc.errors import AgentTakenError, ConfigError, UnreachableError
from dase_grpc.schema import TransitionSchema
from dase_grpc.wire.cluster import ClusterClient, Membership
from dase_grpc.wire.transport import Address

NODE_NAME: Final = f"learner@{platform.node()}"
SAY_UNREACHABLE_AFTER_S: Final = 2.0

HOLDER_LOOK_S: Final = 2.0
"""Time in which a live learner renews its lease several times."""

HOLDER_POLL_S: Final = 0.5

log = logging.getLogger("dase")


@dataclass(frozen=True)
class Wanted:
    """What a learner asks for: an agent id (None for the next free) of a run ("" for any) at a replay."""

    replay: Address
    agent_id: int | None
    run_id: str
    timeout_s: float


async def join(cluster: ClusterClient, wanted: Wanted, schema: TransitionSchema) -> Membership:
    """Joins the run; says so when it has to wait.

    Where the agent id that is asked for is held by a node that has fallen silent, waits for that lease to
    end, so that whoever takes the place of a dead learner can be started at once.

    Raises:
        UnreachableError: the replay did not come in time.
        AgentTakenError: a live node holds the agent id.
        RefusalError: it refused otherwise.
    """
    refused_at: float | None = None
    while True:
        try:
            return await _join_once(cluster, wanted, schema)
        except AgentTakenError:
            if wanted.agent_id is None:
                raise
            pause_s = HOLDER_LOOK_S if refused_at is None else HOLDER_POLL_S
            refused_at = time.monotonic() if refused_at is None else refused_at
            await asyncio.sleep(pause_s)
            if await _has_beaten(cluster, wanted.agent_id, within_s=time.monotonic() - refused_at):
                raise
            if pause_s == HOLDER_LOOK_S:
                log.info("agent %d's holder is silent: waiting for its lease to end", wanted.agent_id)


async def _has_beaten(cluster: ClusterClient, agent_id: int, *, within_s: float) -> bool:
    """Whether the holder of an agent id has renewed its lease within the last seconds."""
    agents = {agent.agent_id: agent for agent in (await cluster.status()).agents}
    holder = agents.get(agent_id)
    return holder is not None and holder.lease == "live" and holder.seconds_since_heartbeat < within_s


async def _join_once(cluster: ClusterClient, wanted: Wanted, schema: TransitionSchema) -> Membership:
    start = f"start it with `dase node --role replay --listen {wanted.replay}`"
    joining = asyncio.ensure_future(
        cluster.join(
            node_name=NODE_NAME,
            schema=schema,
            agent_id=wanted.agent_id,
            run_id=wanted.run_id,
            timeout_s=wanted.timeout_s,
        )
    )
    try:
        done, _ = await asyncio.wait({joining}, timeout=SAY_UNREACHABLE_AFTER_S)
        if not done:
            within = f"{wanted.timeout_s:g} s"
            log.info("waiting up to %s for the replay service at %s; %s", within, wanted.replay, start)
        return await joining
    except UnreachableError as error:
        raise UnreachableError(
            f"the replay service at {wanted.replay} does not answer (waited up to "
            f"{wanted.timeout_s:g} s); {start}, or give its address with --replay"
        ) from error
    finally:
        joining.cancel()


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
                f"the replay serves no batch before {member.min_size} transitions are there, but {agents} "
                f"agent(s) collect only {first} before their first update; raise agent.start_steps or "
                f"lower the replay's --min-size"
            )
    except ValueError as error:
        raise ConfigError(str(error)) from None
