"""Conversions between the wire's messages and the plain objects they carry."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from dase_grpc.errors import MalformedError
from dase_grpc.progress import MAX_PAIRED_AGENTS, Attendance, Progress
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.buffer.sharding import WHOLE, Shard
from dase_grpc.replay.wire.v1 import cluster_pb2, replay_pb2
from dase_grpc.schema import TransitionSchema

MAX_TEXT: Final = 200
"""Characters of a text for people that are kept; what the network sends is not trusted to be short."""

MAX_ENVIRONMENT: Final = 500

Stated = (
    cluster_pb2.Progress
    | cluster_pb2.Attendance
    | cluster_pb2.AgentStatus
    | cluster_pb2.NodeStatus
    | cluster_pb2.StatusResponse
    | replay_pb2.BufferState
)


def shown(text: str) -> str:
    """A text as one short line that is safe to send, to log and to show."""
    text = text.encode(errors="replace").decode()  # a lone surrogate cannot be sent
    line = "".join(character if character.isprintable() else " " for character in text[: MAX_TEXT + 1])
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


def schema_to_proto(schema: TransitionSchema) -> replay_pb2.Schema:
    """The message that states a schema."""
    return replay_pb2.Schema(
        environment=schema.environment,
        observation_size=schema.observation_size,
        action_size=schema.action_size,
        action_low=schema.action_low,
        action_high=schema.action_high,
    )


def schema_from_proto(message: replay_pb2.Schema) -> TransitionSchema:
    """The schema that a message states; one that is none is a MalformedError."""
    if not 1 <= len(message.environment) <= MAX_ENVIRONMENT:
        raise MalformedError(
            f"a schema names its environment in 1 to {MAX_ENVIRONMENT} characters, "
            f"not {len(message.environment)}"
        )
    if not message.environment.isprintable():
        raise MalformedError(
            f"the name of a schema's environment, {shown(message.environment)!r}, has characters that "
            f"cannot be printed"
        )
    return TransitionSchema(
        environment=message.environment,
        observation_size=message.observation_size,
        action_size=message.action_size,
        action_low=tuple(message.action_low),
        action_high=tuple(message.action_high),
    )


def progress_to_proto(progress: Progress) -> cluster_pb2.Progress:
    """The message that carries a learner's progress.

    Numbers that are not finite are left out, and similarities of agents from MAX_PAIRED_AGENTS on.
    """
    return cluster_pb2.Progress(**_finite(vars(progress)) | {"similarity": _paired(progress.similarity)})


def progress_from_proto(message: cluster_pb2.Progress) -> Progress:
    """The progress that a message carries, without what `progress_to_proto` leaves out."""
    told = {"similarity": _paired(message.similarity), "state": shown(message.state)}
    return Progress(**stated(message) | told)


def attendance_to_proto(attendance: Attendance) -> cluster_pb2.Attendance:
    """The message that carries an attendance; numbers that are not finite are left out."""
    return cluster_pb2.Attendance(**_finite(vars(attendance)))


def attendance_from_proto(message: cluster_pb2.Attendance) -> Attendance:
    """The attendance that a message carries; the same."""
    return Attendance(**stated(message) | {"state": shown(message.state)})


def stated(message: Stated) -> dict[str, Any]:
    """A message's fields by name, but for those that it leaves out and numbers that are not finite."""
    return _finite({field.name: value for field, value in message.ListFields()})


def _paired(similarity: Mapping[int, float]) -> dict[int, float]:
    return _finite({agent: value for agent, value in similarity.items() if agent < MAX_PAIRED_AGENTS})


def _finite(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        name: value for name, value in fields.items() if not isinstance(value, float) or math.isfinite(value)
    }


def buffer_to_proto(run: SharedRun, *, counts_of: Iterable[int] | None = None) -> replay_pb2.BufferState:
    """What the buffer holds, and which it is; the latter alone before the first learner has joined.

    It has the counts of all agents, which takes O(K), or those of the ones named.
    """
    state = replay_pb2.BufferState(
        min_size=run.min_size,
        incarnation=run.incarnation,
        buffer_id=run.data_id,
        shard_index=run.shard.index,
        shard_count=run.shard.count,
    )
    if run.opened:
        ring, traffic = run.store.ring, run.store.traffic
        state.capacity, state.size = ring.capacity, len(ring)
        state.inserted_total, state.sampled_total = traffic.inserted_total, traffic.sampled_total
        state.refused_total = traffic.refused_total
        if counts_of is None:
            state.size_by_agent.update(ring.size_by_agent)
            state.inserted_by_agent.update(traffic.inserted)
        for agent_id in counts_of or ():
            if inserted := traffic.inserted.get(agent_id):
                state.inserted_by_agent[agent_id] = inserted
            if present := ring.count_of(agent_id):
                state.size_by_agent[agent_id] = present
    return state


@dataclass(frozen=True)
class Membership:
    """What a node is within a run: the answer to Join, with what of its agent was ever stored by then."""

    run_id: str
    agent_id: int
    epoch: int
    ttl_s: float
    capacity: int
    min_size: int
    incarnation: str = ""
    buffer_id: str = ""
    buffer_size: int = 0
    node_id: str = ""
    shard: Shard = WHOLE
    inserted: int = 0

    @classmethod
    def of(
        cls, answer: cluster_pb2.JoinResponse | cluster_pb2.AttendResponse, *, ttl_s: float, node_id: str
    ) -> Self:
        """What the replay has said; agent and epoch are 0 where that is no lease."""
        lease, buffer = answer.lease, answer.buffer
        return cls(
            run_id=answer.run_id,
            agent_id=lease.agent_id,
            epoch=lease.epoch,
            ttl_s=ttl_s,
            capacity=buffer.capacity,
            min_size=buffer.min_size,
            incarnation=buffer.incarnation,
            buffer_id=buffer.buffer_id,
            buffer_size=buffer.size,
            node_id=node_id,
            shard=shard_of(buffer),
            inserted=buffer.inserted_by_agent.get(lease.agent_id, 0),
        )

    @property
    def buffer(self) -> replay_pb2.BufferState:
        """What was said of the buffer then."""
        return replay_pb2.BufferState(
            size=self.buffer_size, inserted_by_agent={self.agent_id: self.inserted} if self.inserted else {}
        )


def shard_of(buffer: replay_pb2.BufferState) -> Shard:
    """Which shard a service says it is; one from before there were shards is all of its replay."""
    return Shard(buffer.shard_index, buffer.shard_count or 1)
