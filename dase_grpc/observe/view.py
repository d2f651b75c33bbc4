"""The view of a cluster at one moment, out of its replays' Status: how fast it is, and what is wrong."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from dase_grpc.errors import ConfigError, DaseError, UnreachableError
from dase_grpc.progress import Attendance, Progress, ago
from dase_grpc.replay.buffer.sharding import Shard, missing
from dase_grpc.replay.client.cluster import ClusterClient, Lines, require_let_in
from dase_grpc.replay.security.dialler import NO_CREDENTIALS, Credentials
from dase_grpc.replay.wire.addresses import Address, ReplayPlace, silence_of
from dase_grpc.replay.wire.messages import (
    Stated,
    attendance_from_proto,
    progress_from_proto,
    shard_of,
    stated,
)
from dase_grpc.replay.wire.v1 import cluster_pb2

GONE: Final = "expired"
"""The lease of a node that has fallen silent."""

WAITING: Final = "waiting: "
FAILED: Final = "failed: "
SILENT_S: Final = 5.0
"""Nodes tell of themselves twice a second."""


@dataclass(frozen=True)
class AgentView:
    """A learner and its lease; lease is `live`, `left` or `expired`, reason why it left.

    in_place says whether it reads its batches from the buffer in place, and not from a stream.
    """

    agent_id: int = 0
    node_name: str = ""
    epoch: int = 0
    lease: str = ""
    seconds_since_heartbeat: float = 0.0
    reason: str = ""
    policy_version: int | None = None
    in_place: bool = False
    progress: Progress = field(default_factory=Progress)

    @property
    def state(self) -> str:
        """What it does, or what became of it."""
        if self.lease == "left" and self.progress.state not in ("finished", "stopped"):
            return self.reason or "left"
        return "silent" if self.lease == GONE else self.progress.state

    @property
    def has_failed(self) -> bool:
        """Whether it left on an error."""
        return self.reason.startswith(FAILED)

    @property
    def trouble(self) -> str | None:
        """What is wrong with it."""
        who = f"agent {self.agent_id}"
        if self.lease == GONE:
            return (
                f"{who} is gone: {self.node_name} was last heard of {ago(self.seconds_since_heartbeat)} ago"
            )
        if self.lease == "left":
            return f"{who} {self.reason}" if self.has_failed else None
        return _waits(who, self.progress.state) or _is_silent(who, self.seconds_since_heartbeat)


@dataclass(frozen=True)
class NodeView:
    """A node without a lease: an actor of one agent, or an evaluator."""

    role: str = ""
    node_name: str = ""
    agent_id: int | None = None
    seconds_since_attendance: float = 0.0
    attendance: Attendance = field(default_factory=Attendance)

    @property
    def trouble(self) -> str | None:
        """What is wrong with it."""
        who = self.node_name if self.agent_id is None else f"{self.node_name} of agent {self.agent_id}"
        return _is_silent(who, self.seconds_since_attendance) or _waits(who, self.attendance.state)


def _waits(who: str, state: str) -> str | None:
    if not state.startswith(WAITING):
        return None
    return f"{who} waits for {state.removeprefix(WAITING).removeprefix('for ')}"


def _is_silent(who: str, silent_s: float) -> str | None:
    return f"{who} has been silent for {ago(silent_s)}" if silent_s > SILENT_S else None


@dataclass(frozen=True)
class BufferView:
    """The buffer, in transitions; capacity is 0 until the first learner has joined.

    incarnations tell one start of a replay from another, after which its totals may begin anew.
    """

    size: int = 0
    capacity: int = 0
    min_size: int = 0
    inserted_total: int = 0
    sampled_total: int = 0
    refused_total: int = 0
    size_by_agent: Mapping[int, int] = field(default_factory=dict)
    incarnations: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClusterView:
    """A run: its agents by id, its other nodes, its buffer; uptime_seconds is that of the replay.

    shards are those of the replay that have told of it.
    """

    run_id: str = ""
    environment: str = ""
    draining: bool = False
    uptime_seconds: float | None = None
    buffer: BufferView = field(default_factory=BufferView)
    agents: tuple[AgentView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    shards: tuple[Shard, ...] = ()


View = TypeVar("View", AgentView, NodeView, BufferView, ClusterView)


def view_of(status: cluster_pb2.StatusResponse) -> ClusterView:
    """What one replay says, by the names that the wire has for it."""
    agents = [_of(AgentView, each, progress=progress_from_proto(each.progress)) for each in status.agents]
    nodes = [_of(NodeView, each, attendance=attendance_from_proto(each.attendance)) for each in status.nodes]
    buffer, sizes = status.buffer, dict(sorted(status.buffer.size_by_agent.items()))
    return _of(
        ClusterView,
        status,
        buffer=_of(BufferView, buffer, size_by_agent=sizes, incarnations=(buffer.incarnation,)),
        agents=tuple(sorted(agents, key=lambda agent: agent.agent_id)),
        nodes=tuple(nodes),
        shards=(shard_of(buffer),),
    )


def _of(view: type[View], message: Stated, **parts: Any) -> View:
    known = {name: value for name, value in stated(message).items() if name in view.__dataclass_fields__}
    return view(**known | parts)


def merged(views: Sequence[ClusterView]) -> ClusterView:
    """At least one replay of a run as one: buffers are added up, of each agent the freshest word counts.

    Nodes without a lease have no id here, so those of the replay that knows most of them are taken.
    """
    if len(views) == 1:
        return views[0]
    agents: dict[int, AgentView] = {}
    known = chain.from_iterable(view.agents for view in views)
    for agent in sorted(known, key=lambda agent: (agent.epoch, -agent.seconds_since_heartbeat), reverse=True):
        agents[agent.agent_id] = _with_what_one_shard_knows(agents.get(agent.agent_id, agent), agent)
    return ClusterView(
        run_id=next((view.run_id for view in views if view.run_id), ""),
        environment=next((view.environment for view in views if view.environment), ""),
        draining=any(view.draining for view in views),
        uptime_seconds=min(
            (view.uptime_seconds for view in views if view.uptime_seconds is not None), default=None
        ),
        buffer=_added([view.buffer for view in views]),
        agents=tuple(agents[agent_id] for agent_id in sorted(agents)),
        nodes=max((view.nodes for view in views), key=len),
        shards=tuple(chain.from_iterable(view.shards for view in views)),
    )


def _with_what_one_shard_knows(freshest: AgentView, other: AgentView) -> AgentView:
    """Policies lie at one shard only, and each shard says of itself whether it is read in place."""
    if other.epoch != freshest.epoch:
        return freshest
    version = other.policy_version if freshest.policy_version is None else freshest.policy_version
    return replace(freshest, policy_version=version, in_place=freshest.in_place or other.in_place)


def _added(buffers: Sequence[BufferView]) -> BufferView:
    return BufferView(
        size=sum(each.size for each in buffers),
        capacity=sum(each.capacity for each in buffers),
        min_size=max(each.min_size for each in buffers),
        inserted_total=sum(each.inserted_total for each in buffers),
        sampled_total=sum(each.sampled_total for each in buffers),
        refused_total=sum(each.refused_total for each in buffers),
        size_by_agent=sum((Counter(each.size_by_agent) for each in buffers), Counter[int]()),
        incarnations=tuple(chain.from_iterable(each.incarnations for each in buffers)),
    )


@dataclass(frozen=True)
class Target:
    """The replay or its shards, with what credentials, and how long each is given to answer."""

    replay: ReplayPlace
    credentials: Credentials = NO_CREDENTIALS
    timeout_s: float = 5.0

    @classmethod
    def parse(cls, *, replay: str, tls: Path | None, token_file: Path | None, timeout_s: float) -> Self:
        """Reads the texts of a command line; raises an AddressError or CredentialsError."""
        credentials = Credentials(tls, token_file)
        credentials.require_usable()
        return cls(ReplayPlace.parse(replay), credentials, timeout_s)


@dataclass(frozen=True)
class Look:
    """What the replays said at `at`, in seconds of a monotonic clock; cluster is None where none answered.

    silent says of each replay that does not count, by address, why: it did not answer, or is of another run.
    """

    at: float
    cluster: ClusterView | None
    silent: Mapping[str, DaseError] = field(default_factory=dict)

    def troubles(self) -> list[str]:
        """What an operator should know of, the most serious first."""
        found = [str(error) for error in self.silent.values()]
        if self.cluster is not None:
            if (absent := missing(self.cluster.shards)) is not None:
                found.append(f"these numbers are without {absent}: no answer, or not named with --replay")
            if self.cluster.draining:
                found.append("the replay is shutting down: it takes no new nodes")
            found += [agent.trouble for agent in self.cluster.agents if agent.trouble]
            found += [node.trouble for node in self.cluster.nodes if node.trouble]
        return found


def look_at(
    answers: Mapping[Address, "ClusterView | DaseError"], at: float, *, by_name: bool = False
) -> Look:
    """What the answers of all addresses come to; a replay that has several addresses counts once.

    One that is no shard beside those before it does not count. Where a name has led `by_name` to all shards,
    what else it leads to is nobody's trouble.
    """
    counted: dict[str, tuple[Address, ClusterView]] = {}
    silent: dict[str, DaseError] = {}
    for address, answer in answers.items():
        if isinstance(answer, DaseError):
            silent[str(address)] = answer
        elif (other := _at_odds(answer, counted)) is not None:
            silent[str(address)] = ConfigError(
                f"the services at {other} and {address} are not shards of one replay, so only the first "
                f"counts; see --replay"
            )
        else:
            counted.setdefault(answer.buffer.incarnations[0], (address, answer))
    views = sorted((view for _, view in counted.values()), key=lambda view: view.shards[0].index)
    cluster = merged(views) if views else None
    if by_name and cluster is not None and missing(cluster.shards) is None:
        silent = {}
    return Look(at, cluster, silent)


def _at_odds(view: ClusterView, counted: Mapping[str, tuple[Address, ClusterView]]) -> Address | None:
    """Where the service is beside which this one cannot be a shard of one replay."""
    (shard,), (incarnation,) = view.shards, view.buffer.incarnations
    for other_incarnation, (address, other) in counted.items():
        same_replay = (view.run_id, shard.count) == (other.run_id, other.shards[0].count)
        if incarnation != other_incarnation and not (same_replay and shard != other.shards[0]):
            return address
    return None


@dataclass
class Observer:
    """Looks at a cluster, as often as asked; at what a name leads to by then, where shards are missing."""

    lines: Lines
    target: Target
    addresses: tuple[Address, ...] = ()
    _complete: bool = False

    async def look(self) -> Look:
        """What all replays say; takes up to the timeout where one does not answer."""
        place = self.target.replay
        try:
            if not (self._complete and self.addresses):
                self.addresses = await place.found()
        except UnreachableError as error:
            if not self.addresses:
                return Look(time.monotonic(), None, {str(place): error})
        answers = await asyncio.gather(*map(self._ask, self.addresses))
        told = dict(zip(self.addresses, answers, strict=True))
        look = look_at(told, time.monotonic(), by_name=place.by_name)
        self._complete = look.cluster is not None and not look.silent and missing(look.cluster.shards) is None
        return look

    async def first_look(self) -> Look:
        """A look at which at least one replay answered; else a RefusalError that says why none did."""
        look = await self.look()
        if look.cluster is not None:
            return look
        why = next(iter(look.silent.values()))
        if isinstance(why, UnreachableError):
            await self.explain_silence()
        raise why

    async def explain_silence(self) -> None:
        """Raises what keeps a replay from answering: the credentials, or what the operating system knows."""
        for address in self.addresses:
            await require_let_in(address, self.target.credentials)
        for address in self.addresses:
            if silence := await silence_of(address):
                raise UnreachableError(
                    f"the replay service at {address} does not answer: {silence}; see whether it runs, and "
                    f"give its address with --replay"
                )

    async def _ask(self, address: Address) -> ClusterView | DaseError:
        client = ClusterClient(self.lines.to(address), str(address))
        try:
            return view_of(await client.status(timeout_s=self.target.timeout_s))
        except DaseError as error:
            return error


@asynccontextmanager
async def observing(target: Target) -> AsyncIterator[Observer]:
    """An observer of a cluster, which connects when it looks."""
    async with Lines(target.replay, target.credentials) as lines:
        yield Observer(lines, target)


@dataclass(frozen=True)
class Rates:
    """Transitions and environment steps per second, None where not known; the steps of known learners.

    In the sum of all, a live agent that has not told a new step yet counts with the mean of the others: with
    many nodes the replay asks for heartbeats that are further apart than two looks may be.
    """

    inserted: float | None = None
    sampled: float | None = None
    env_steps: float | None = None
    steps_by_agent: Mapping[int, float] = field(default_factory=dict)


def rates(before: Look, now: Look) -> Rates:
    """What happened from one look to a later one."""
    if before.cluster is None or now.cluster is None:
        return Rates()
    was, is_now, took_s = before.cluster.buffer, now.cluster.buffer, now.at - before.at
    known = {agent.agent_id: agent for agent in before.cluster.agents}
    steps = {
        agent.agent_id: speed
        for agent in now.cluster.agents
        if (speed := _steps(known.get(agent.agent_id), before.at, agent, now.at)) is not None
    }
    same = was.incarnations == is_now.incarnations and bool(was.capacity)
    return Rates(
        inserted=_per_second(was.inserted_total, is_now.inserted_total, took_s) if same else None,
        sampled=_per_second(was.sampled_total, is_now.sampled_total, took_s) if same else None,
        env_steps=sum(steps.values()) * _live_in_both(known, now) / len(steps) if steps else None,
        steps_by_agent=steps,
    )


def _live_in_both(known: Mapping[int, AgentView], now: Look) -> int:
    agents = () if now.cluster is None else now.cluster.agents
    return sum(agent.lease == "live" and agent.agent_id in known for agent in agents)


def _steps(before: AgentView | None, seen_at: float, now: AgentView, at: float) -> float | None:
    """An agent's steps per second, by when it told its step and not by when somebody looked."""
    if before is None or before.epoch != now.epoch or now.lease != "live":
        return None
    took_s = (at - now.seconds_since_heartbeat) - (seen_at - before.seconds_since_heartbeat)
    return _per_second(before.progress.step, now.progress.step, took_s)


def _per_second(before: int, now: int, took_s: float) -> float | None:
    return (now - before) / took_s if took_s > 0.1 and now >= before else None
