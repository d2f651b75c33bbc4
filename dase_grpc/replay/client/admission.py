"""Admission: how a node of any role is let in by each shard of its replay, and how a learner leaves."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

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
from dase_grpc.pace import Backoff
from dase_grpc.progress import Attendance, Attendant, Progress, several
from dase_grpc.replay.buffer.sharding import WHOLE
from dase_grpc.replay.client.cluster import ClusterClient, Lines, StreamTarget, require_let_in
from dase_grpc.replay.client.connection import Connection
from dase_grpc.replay.client.discovery import find
from dase_grpc.replay.client.membership import FAREWELL_S, has_finished, learner_of, without_learner
from dase_grpc.replay.client.patience import NODE_NAME, Wanted, patiently
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.v1 import cluster_pb2
from dase_grpc.schema import TransitionSchema

C = TypeVar("C", bound=Connection)

log = logging.getLogger("dase")

Entry = Callable[[ClusterClient, Wanted, TransitionSchema], Coroutine[Any, Any, Membership]]
"""How a node of some role is let in by one shard."""


class AgentFinished(Exception):
    """The agent has done all its steps and has no learner, so there is nothing to explore for."""


@dataclass(frozen=True)
class Joined:
    """A node that has been let in by each shard: as who, and where, in the order of the shards."""

    targets: tuple[StreamTarget, ...]
    addresses: tuple[Address, ...]

    @property
    def member(self) -> Membership:
        """What the node is: as the first shard has it, with what all shards hold together."""
        members = [target.member for target in self.targets]
        return replace(
            members[0],
            capacity=sum(member.capacity for member in members),
            buffer_size=sum(member.buffer_size for member in members),
            inserted=sum(member.inserted for member in members),
        )

    def connected(self, lines: Lines, connect: Callable[..., C], **options: Any) -> list[C]:
        """Connections to all of them, which `connect` makes with the options; see membership.py."""
        return [
            connect(target, look_why_away=partial(require_let_in, address, lines.credentials), **options)
            for target, address in zip(self.targets, self.addresses, strict=True)
        ]


async def join_all(lines: Lines, wanted: Wanted, schema: TransitionSchema) -> Joined:
    """Joins every shard under one agent id, which the first decides; all are left again if one refuses."""
    targets: list[StreamTarget] = []
    try:
        return await enter_all(lines, wanted, schema, enter=join, entered=targets)
    except BaseException:
        await leave(Farewell(targets, reason="could not join every shard"))
        raise


async def enter_all(
    lines: Lines, wanted: Wanted, schema: TransitionSchema, *, enter: Entry, entered: list[StreamTarget]
) -> Joined:
    """Is let in by every shard, one after the other, each of which `entered` has from then on."""
    addresses = await find(lines, wanted)
    asked = wanted
    for address in addresses:
        entered.append(await _entered(lines, replace(asked, replay=address), schema, enter))
        first = entered[0].member
        asked = replace(wanted, agent_id=first.agent_id, run_id=first.run_id)
    _require_one_replay([target.member for target in entered])
    return Joined(tuple(entered), tuple(addresses))


async def enter_first(lines: Lines, wanted: Wanted, schema: TransitionSchema, *, enter: Entry) -> Joined:
    """Is let in by the first shard alone, which has the policies."""
    address = (await find(lines, wanted))[0]
    target = await _entered(lines, replace(wanted, replay=address), schema, enter)
    member = target.member
    if member.shard.index:
        raise ConfigError(
            f"the replay at {address} is shard {member.shard} of run {member.run_id!r}, and the policies are "
            f"at the first; name the addresses of all shards with --replay"
        )
    return Joined((target,), (address,))


async def _entered(lines: Lines, wanted: Wanted, schema: TransitionSchema, enter: Entry) -> StreamTarget:
    channel, address = lines.to(wanted.replay), str(wanted.replay)
    member = await enter(ClusterClient(channel, address), wanted, schema)
    return StreamTarget(channel, address, member, schema)


def _require_one_replay(members: list[Membership]) -> None:
    """Checks what only a join tells. ConfigError if a shard was left out, or shards do not hold alike."""
    first = members[0]
    if len(members) == 1 and first.shard != WHOLE:
        raise ConfigError(
            f"this replay is shard {first.shard} of run {first.run_id!r}; name the addresses of all "
            f"{first.shard.count} shards with --replay"
        )
    for member in members:
        if member.capacity != first.capacity:
            raise ConfigError(
                f"shard {first.shard} holds up to {first.capacity} transitions and shard {member.shard} "
                f"{member.capacity}; start all shards with one --capacity"
            )


async def join(cluster: ClusterClient, wanted: Wanted, schema: TransitionSchema) -> Membership:
    """Joins the run; says so when it has to wait.

    Where the agent id that is asked for is held by a node that has fallen silent, and is not known to have
    ended, waits for that lease to end, so that whoever takes the place of a dead learner can be started at
    once. AgentTakenError if the holder lives.
    """

    def ask(timeout_s: float) -> Coroutine[Any, Any, Membership]:
        return cluster.join(
            node_name=NODE_NAME,
            schema=schema,
            agent_id=wanted.agent_id,
            run_id=wanted.run_id,
            node_id=wanted.node_id,
            ended_node_id=wanted.ended_node_id,
            timeout_s=timeout_s,
        )

    while True:
        try:
            return await patiently(ask, wanted)
        except AgentTakenError as taken:
            if wanted.agent_id is None:
                raise
            await _until_free(cluster, wanted, wanted.agent_id, taken)


async def _until_free(cluster: ClusterClient, wanted: Wanted, agent_id: int, taken: AgentTakenError) -> None:
    """Returns when the lease of the agent's holder has ended, who is silent; raises `taken` if it is not."""
    refused_at, backoff, said = time.monotonic(), Backoff(random.Random()), False
    await asyncio.sleep(wanted.timing.holder_look_s)
    while True:
        status = await patiently(partial(_look, cluster, agent_id), wanted)
        held = next((each for each in status.agents if each.agent_id == agent_id), None)
        if held is None or held.lease != "live":
            return
        silent_s = held.seconds_since_heartbeat
        # leases that a replay has read at its start count from before that
        since_start = not status.HasField("uptime_seconds") or silent_s <= status.uptime_seconds
        if since_start and silent_s < time.monotonic() - refused_at:
            raise taken
        if not said:
            log.info("agent %d's holder is silent: waiting for its lease to end", agent_id)
            said = True
        await asyncio.sleep(backoff.next_s())


def _look(
    cluster: ClusterClient, agent_id: int, timeout_s: float
) -> Coroutine[Any, Any, cluster_pb2.StatusResponse]:
    """Asks for the one agent alone, for many nodes may ask at the same time."""
    return cluster.status(agent_ids=(agent_id,), timeout_s=timeout_s)


async def attend(
    cluster: ClusterClient, wanted: Wanted, schema: TransitionSchema, *, node: Attendant
) -> Membership:
    """Announces a node without a lease; an actor waits until a learner holds that of its agent.

    Returns what its streams state then; an evaluator's is of no agent. AgentFinished if the agent has done
    all its steps, WaitedTooLongError if no learner comes for as long as the replay may be away.
    """
    began, said = time.monotonic(), False
    acts = node.role == "actor"
    attendance = Attendance(state=f"waiting: {learner_of(node)}") if acts else Attendance()

    def ask(timeout_s: float) -> Coroutine[Any, Any, cluster_pb2.AttendResponse]:
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
        if answer.HasField("lease") or not acts:
            return Membership.of(answer, ttl_s=answer.ttl_seconds, node_id=node.node_id)
        if answer.agent_finished:
            raise AgentFinished(has_finished(node.agent_id))
        if time.monotonic() - began >= wanted.away_s:
            raise without_learner(node, wanted.away_s)
        if not said:
            log.info("waiting up to %g s for %s", wanted.away_s, learner_of(node))
            said = True
        await asyncio.sleep(wanted.timing.beat_s)


def require_fit(config: RunConfig, member: Membership) -> None:
    """Checks this learner's settings against the replay's. ConfigError if they contradict each other."""
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
    """Checks that a learner whose actors explore has a replay in one piece, which keeps its pace."""
    if shards > 1 and not config.train.explore:
        raise ConfigError(
            f"train.explore = false needs a replay in one piece, which keeps updates and steps in "
            f"proportion, and this one has {shards} shards; leave it out, or start a replay without --shard"
        )


@dataclass
class Farewell:
    """What a learner says when it gives its leases back, of shards in their order, if it has any to give."""

    targets: Sequence[StreamTarget]
    reason: str = "failed"
    progress: Progress | None = None
    nothing_to_give_back: bool = False


@asynccontextmanager
async def leases(targets: Sequence[StreamTarget]) -> AsyncIterator[Farewell]:
    """Gives the leases back at the end of the block, if somebody is there, and says by what error it ended.

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
        cluster = target.cluster
        try:
            if farewell.progress is not None:
                await cluster.heartbeat(target.member, farewell.progress, timeout_s=FAREWELL_S)
            await cluster.leave(target.member, reason=farewell.reason, timeout_s=FAREWELL_S)
        except RefusalError as error:
            log.info("could not give the lease back: %s", error)
