"""A cluster at one moment as its replays' Status say: one view, however many replays there are."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from typing import Final

from dase_grpc.attendance import Attendance
from dase_grpc.progress import Progress
from dase_grpc.replay.wire.messages import attendance_from_proto, known, progress_from_proto
from dase_grpc.replay.wire.v1 import cluster_pb2, replay_pb2

GONE: Final = "expired"
"""The lease of a node that has fallen silent."""


@dataclass(frozen=True)
class AgentView:
    """A learner and its lease; lease is `live`, `left` or `expired`, reason why it left."""

    agent_id: int
    node_name: str = ""
    epoch: int = 1
    lease: str = "live"
    silent_s: float = 0.0
    reason: str = ""
    policy_version: int | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def state(self) -> str:
        """What it does, or what became of it."""
        if self.lease == "left" and self.progress.state not in ("finished", "stopped"):
            return self.reason or "left"
        return "silent" if self.lease == GONE else self.progress.state


@dataclass(frozen=True)
class NodeView:
    """A node without a lease: an actor of one agent, or an evaluator."""

    role: str
    node_name: str = ""
    agent_id: int | None = None
    silent_s: float = 0.0
    attendance: Attendance = field(default_factory=Attendance)


@dataclass(frozen=True)
class BufferView:
    """The buffer, in transitions; capacity is 0 until the first learner has joined.

    incarnations tell one start of a replay from another, after which its totals may begin anew.
    """

    size: int = 0
    capacity: int = 0
    min_size: int = 0
    inserted: int = 0
    sampled: int = 0
    refused: int = 0
    size_by_agent: Mapping[int, int] = field(default_factory=dict)
    incarnations: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClusterView:
    """A run: its agents by id, its other nodes, its buffer; uptime_s is that of the replay."""

    run_id: str = ""
    environment: str = ""
    draining: bool = False
    uptime_s: float | None = None
    buffer: BufferView = field(default_factory=BufferView)
    agents: tuple[AgentView, ...] = ()
    nodes: tuple[NodeView, ...] = ()


def view_of(status: cluster_pb2.StatusResponse) -> ClusterView:
    """What one replay says; numbers that are not finite are not known."""
    return ClusterView(
        run_id=status.run_id,
        environment=status.environment,
        draining=status.draining,
        uptime_s=known(status.uptime_seconds) if status.HasField("uptime_seconds") else None,
        buffer=_buffer(status.buffer),
        agents=tuple(sorted(map(_agent, status.agents), key=lambda agent: agent.agent_id)),
        nodes=tuple(map(_node, status.nodes)),
    )


def merged(views: Sequence[ClusterView]) -> ClusterView:
    """Several replays of one run as one: buffers are added up, of each agent the freshest word counts.

    Nodes without a lease have no id here, so those of the replay that knows most of them are taken.

    Raises:
        ValueError: there is no view.
    """
    if not views:
        raise ValueError("there is no replay to tell of the cluster")
    agents: dict[int, AgentView] = {}
    for agent in chain.from_iterable(view.agents for view in views):
        known = agents.get(agent.agent_id)
        if known is None or (agent.epoch, -agent.silent_s) > (known.epoch, -known.silent_s):
            agents[agent.agent_id] = agent
    uptimes = [view.uptime_s for view in views if view.uptime_s is not None]
    return replace(
        views[0],
        run_id=next((view.run_id for view in views if view.run_id), ""),
        environment=next((view.environment for view in views if view.environment), ""),
        draining=any(view.draining for view in views),
        uptime_s=min(uptimes, default=None),
        buffer=reduce(_added, (view.buffer for view in views)),
        agents=tuple(agents[agent_id] for agent_id in sorted(agents)),
        nodes=max((view.nodes for view in views), key=len),
    )


def _added(one: BufferView, other: BufferView) -> BufferView:
    return BufferView(
        size=one.size + other.size,
        capacity=one.capacity + other.capacity,
        min_size=max(one.min_size, other.min_size),
        inserted=one.inserted + other.inserted,
        sampled=one.sampled + other.sampled,
        refused=one.refused + other.refused,
        size_by_agent=Counter(one.size_by_agent) + Counter(other.size_by_agent),
        incarnations=one.incarnations + other.incarnations,
    )


def _buffer(state: replay_pb2.BufferState) -> BufferView:
    return BufferView(
        size=state.size,
        capacity=state.capacity,
        min_size=state.min_size,
        inserted=state.inserted_total,
        sampled=state.sampled_total,
        refused=state.refused_total,
        size_by_agent=dict(sorted(state.size_by_agent.items())),
        incarnations=(state.incarnation,),
    )


def _agent(status: cluster_pb2.AgentStatus) -> AgentView:
    return AgentView(
        agent_id=status.agent_id,
        node_name=status.node_name,
        epoch=status.epoch,
        lease=status.lease,
        silent_s=known(status.seconds_since_heartbeat) or 0.0,
        reason=status.reason,
        policy_version=status.policy_version if status.HasField("policy_version") else None,
        progress=_finite(progress_from_proto(status.progress)),
    )


def _node(status: cluster_pb2.NodeStatus) -> NodeView:
    return NodeView(
        role=status.role,
        node_name=status.node_name,
        agent_id=status.agent_id if status.HasField("agent_id") else None,
        silent_s=known(status.seconds_since_attendance) or 0.0,
        attendance=attendance_from_proto(status.attendance),
    )


def _finite(progress: Progress) -> Progress:
    """The same progress, where numbers that are not finite are not known."""
    return replace(
        progress,
        updates_per_second=known(progress.updates_per_second) or 0.0,
        episode_return=known(progress.episode_return),
        first_evaluation_return=known(progress.first_evaluation_return),
        evaluation_return=known(progress.evaluation_return),
        similarity={source: value for source, value in progress.similarity.items() if math.isfinite(value)},
        similarity_weight=known(progress.similarity_weight),
    )
