"""ClusterService: its servicer, and the client that holds a lease."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from grpc.aio import Channel

from dase_grpc.attendance import Attendance, Attendant
from dase_grpc.errors import DrainingError, MalformedError
from dase_grpc.progress import Progress
from dase_grpc.replay.buffer.attendants import Seen
from dase_grpc.replay.buffer.leases import Lease
from dase_grpc.replay.buffer.ring import MAX_AGENT_ID
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.buffer.sharding import WHOLE, Shard
from dase_grpc.replay.security.door import agent_to_join, require_agent, require_role
from dase_grpc.replay.wire.messages import (
    attendance_from_proto,
    attendance_to_proto,
    buffer_to_proto,
    progress_from_proto,
    progress_to_proto,
    schema_from_proto,
    schema_to_proto,
    shown,
)
from dase_grpc.replay.wire.status import Context, refusals, service
from dase_grpc.replay.wire.v1 import cluster_pb2, cluster_pb2_grpc, replay_pb2
from dase_grpc.schema import TransitionSchema

UNARY_TIMEOUT_S: Final = 5.0
MAX_NODE_ID: Final = 128
"""Characters."""

ATTENDING_ROLES: Final = ("actor", "evaluator")


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """ClusterService over a SharedRun, whose lease table holds every rule.

    `on_event` is called with one sentence whenever a node joins or leaves. `started_at` is when the node
    started, by `clock`.
    """

    def __init__(
        self,
        run: SharedRun,
        *,
        clock: Callable[[], float],
        on_event: Callable[[str], None],
        started_at: float = 0.0,
    ) -> None:
        self._run = run
        self._clock = clock
        self._on_event = on_event
        self._started_at = started_at
        self.draining = False

    async def Join(self, request: cluster_pb2.JoinRequest, context: Context) -> cluster_pb2.JoinResponse:
        async with refusals(context):
            answer = self._join(request)
        return answer

    async def Heartbeat(
        self, request: cluster_pb2.HeartbeatRequest, context: Context
    ) -> cluster_pb2.HeartbeatResponse:
        async with refusals(context):
            require_agent(request.agent_id)
            self._run.require_run(request.run_id)
            self._run.require_data(request.buffer_id)
            self._run.leases.renew(
                request.agent_id,
                request.epoch,
                self._clock(),
                progress=progress_from_proto(request.progress),
            )
        followers = self._run.policies.followers(request.agent_id)
        return cluster_pb2.HeartbeatResponse(buffer=buffer_to_proto(self._run), followers=followers)

    async def Leave(self, request: cluster_pb2.LeaveRequest, context: Context) -> cluster_pb2.LeaveResponse:
        async with refusals(context):
            require_agent(request.agent_id)
            self._run.require_run(request.run_id)
            self._run.require_data(request.buffer_id)
            self._run.leases.leave(request.agent_id, request.epoch, because=shown(request.reason))
            self._on_event(f"agent {request.agent_id} left: {shown(request.reason)}")
        return cluster_pb2.LeaveResponse()

    async def Attend(
        self, request: cluster_pb2.AttendRequest, context: Context
    ) -> cluster_pb2.AttendResponse:
        async with refusals(context):
            answer = self._attend(request)
        return answer

    async def Status(
        self, request: cluster_pb2.StatusRequest, context: Context
    ) -> cluster_pb2.StatusResponse:
        now, versions = self._clock(), self._run.policies.versions
        return cluster_pb2.StatusResponse(
            run_id=self._run.run_id,
            buffer=buffer_to_proto(self._run),
            agents=[
                _agent_status(lease, now, policy_version=versions.get(lease.agent_id))
                for lease in self._run.leases.all()
            ],
            draining=self.draining,
            environment=self._run.store.schema.environment if self._run.opened else "",
            nodes=[_node_status(seen, now) for seen in self._run.attendance.all(now)],
            uptime_seconds=now - self._started_at,
        )

    def _join(self, request: cluster_pb2.JoinRequest) -> cluster_pb2.JoinResponse:
        if self.draining:
            raise DrainingError("the replay service is shutting down and takes no new nodes")
        if len(request.node_id) > MAX_NODE_ID:
            raise MalformedError(f"a node id has up to {MAX_NODE_ID} characters, not {len(request.node_id)}")
        lease = self._run.join(
            shown(request.node_name),
            wanted=agent_to_join(request.agent_id if request.HasField("agent_id") else None),
            run_id=request.run_id,
            schema=schema_from_proto(request.schema),
            now=self._clock(),
            node_id=request.node_id,
        )
        lost = (
            f"; it comes from buffer {shown(request.lost_buffer_id)}, whose transitions are not here any more"
            if request.lost_buffer_id
            else ""
        )
        self._on_event(f"{lease.node_name} joined as agent {lease.agent_id} (epoch {lease.epoch}){lost}")
        return cluster_pb2.JoinResponse(
            run_id=self._run.run_id,
            lease=_lease(lease),
            buffer=buffer_to_proto(self._run),
        )

    def _writes(self, writer: str, agent_id: int) -> bool:
        return self._run.opened and bool(self._run.store.committed(writer, agent_id=agent_id))

    def _attend(self, request: cluster_pb2.AttendRequest) -> cluster_pb2.AttendResponse:
        run, node = self._run, _attendant(request)
        if request.run_id:
            run.require_run(request.run_id)
        if request.schema_fingerprint and run.opened:
            run.require_reader(run_id=run.run_id, fingerprint=request.schema_fingerprint)
        of_agent = "" if node.agent_id is None else f" of agent {node.agent_id}"
        if request.leaving:
            run.attendance.leave(node.node_id)
            if (agent := node.agent_id) is not None and self._writes(node.writer_id, agent):
                run.store.watch.leave((agent, node.writer_id))
            self._on_event(f"{node.node_name}, {node.role}{of_agent}, left")
        elif run.attendance.note(node, attendance_from_proto(request.attendance), self._clock()):
            self._on_event(f"{node.node_name} attends as {node.role}{of_agent}")
        lease = None if node.agent_id is None else run.leases.held(node.agent_id)
        return cluster_pb2.AttendResponse(
            run_id=run.run_id,
            lease=None if lease is None else _lease(lease),
            buffer=buffer_to_proto(run),
            ttl_seconds=run.attendance.ttl_s,
            learner_updates=0 if lease is None else lease.progress.updates,
            agent_finished=node.agent_id is not None and run.leases.finished(node.agent_id),
        )


def _attendant(request: cluster_pb2.AttendRequest) -> Attendant:
    """Who attends.

    Raises:
        MalformedError: it does not say so as it should.
        NotPermittedError: its credentials say otherwise.
    """
    if request.role not in ATTENDING_ROLES:
        raise MalformedError(
            f"a node attends as one of {', '.join(ATTENDING_ROLES)}, not as {shown(request.role)!r}"
        )
    require_role(request.role)
    if not 1 <= len(request.node_id) <= MAX_NODE_ID:
        raise MalformedError(f"a node id has 1 to {MAX_NODE_ID} characters, not {len(request.node_id)}")
    agent_id = request.agent_id if request.HasField("agent_id") else None
    if request.role == "actor":
        agent_id = agent_to_join(agent_id)
        if agent_id is None:
            raise MalformedError("an actor says whose actor it is; give it an agent id with --agent")
    if agent_id is not None and agent_id > MAX_AGENT_ID:
        raise MalformedError(f"agent id {agent_id} is outside 0..{MAX_AGENT_ID}")
    return Attendant(request.node_id, shown(request.node_name), request.role, agent_id)


def _lease(lease: Lease) -> cluster_pb2.Lease:
    return cluster_pb2.Lease(agent_id=lease.agent_id, epoch=lease.epoch, ttl_seconds=lease.ttl_s)


def _node_status(seen: Seen, now: float) -> cluster_pb2.NodeStatus:
    return cluster_pb2.NodeStatus(
        node_name=seen.node.node_name,
        role=seen.node.role,
        agent_id=seen.node.agent_id,
        seconds_since_attendance=now - seen.at,
        attendance=attendance_to_proto(seen.attendance),
    )


def _agent_status(lease: Lease, now: float, *, policy_version: int | None) -> cluster_pb2.AgentStatus:
    return cluster_pb2.AgentStatus(
        agent_id=lease.agent_id,
        epoch=lease.epoch,
        node_name=lease.node_name,
        lease=lease.state(now),
        seconds_since_heartbeat=now - lease.renewed_at,
        progress=progress_to_proto(lease.progress),
        reason=lease.left_because or "",
        policy_version=policy_version,
    )


@dataclass(frozen=True)
class Membership:
    """What a node is within a run: the answer to Join.

    `buffer_size` and `inserted`, the transitions of its agent that were ever stored, are as of then.
    """

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
        cls,
        answer: cluster_pb2.JoinResponse | cluster_pb2.AttendResponse,
        *,
        ttl_s: float,
        node_id: str,
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


class ClusterClient:
    """Calls on ClusterService; every call has a deadline.

    All methods raise the refusals of errors.py, UnreachableError among them.
    """

    def __init__(self, channel: Channel, address: str) -> None:
        self._stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        self._address = address

    async def join(
        self,
        *,
        node_name: str,
        schema: TransitionSchema,
        agent_id: int | None,
        run_id: str = "",
        lost_buffer_id: str = "",
        node_id: str = "",
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> Membership:
        """Leases an agent id, waiting up to `timeout_s` for the service to come up.

        Whoever does not hear the answer may ask again with the same `node_id`, which is random.
        """
        request = cluster_pb2.JoinRequest(
            node_name=node_name,
            run_id=run_id,
            agent_id=agent_id,
            schema=schema_to_proto(schema),
            lost_buffer_id=lost_buffer_id,
            node_id=node_id,
        )
        with service(self._address):
            answer = await self._stub.Join(request, timeout=timeout_s, wait_for_ready=True)
        return Membership.of(answer, ttl_s=answer.lease.ttl_seconds, node_id=node_id)

    async def heartbeat(
        self, member: Membership, progress: Progress, *, timeout_s: float = UNARY_TIMEOUT_S
    ) -> cluster_pb2.HeartbeatResponse:
        """Renews the lease and reports progress; returns what the buffer holds, and how many follow."""
        request = cluster_pb2.HeartbeatRequest(
            run_id=member.run_id,
            agent_id=member.agent_id,
            epoch=member.epoch,
            progress=progress_to_proto(progress),
            buffer_id=member.buffer_id,
        )
        with service(self._address):
            return await self._stub.Heartbeat(request, timeout=timeout_s)

    async def leave(self, member: Membership, *, reason: str, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        """Gives the lease back."""
        request = cluster_pb2.LeaveRequest(
            run_id=member.run_id,
            agent_id=member.agent_id,
            epoch=member.epoch,
            reason=shown(reason),
            buffer_id=member.buffer_id,
        )
        with service(self._address):
            await self._stub.Leave(request, timeout=timeout_s)

    async def attend(
        self,
        node: Attendant,
        attendance: Attendance,
        *,
        run_id: str = "",
        fingerprint: str = "",
        leaving: bool = False,
        timeout_s: float = UNARY_TIMEOUT_S,
        wait_for_ready: bool = False,
    ) -> cluster_pb2.AttendResponse:
        """Announces a node that holds no lease, or says that it leaves."""
        request = cluster_pb2.AttendRequest(
            run_id=run_id,
            node_id=node.node_id,
            node_name=node.node_name,
            role=node.role,
            agent_id=node.agent_id,
            schema_fingerprint=fingerprint,
            attendance=attendance_to_proto(attendance),
            leaving=leaving,
        )
        with service(self._address):
            return await self._stub.Attend(request, timeout=timeout_s, wait_for_ready=wait_for_ready)

    async def status(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> cluster_pb2.StatusResponse:
        """The run's agents and buffer."""
        with service(self._address):
            return await self._stub.Status(
                cluster_pb2.StatusRequest(), timeout=timeout_s, wait_for_ready=True
            )
