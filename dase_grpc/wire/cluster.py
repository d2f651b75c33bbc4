"""ClusterService: its servicer, and the client that holds a lease."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from grpc.aio import Channel

from dase_grpc.errors import DrainingError, MalformedError
from dase_grpc.progress import Progress
from dase_grpc.schema import TransitionSchema
from dase_grpc.store.leases import Lease
from dase_grpc.store.run import SharedRun
from dase_grpc.wire.messages import (
    buffer_to_proto,
    progress_from_proto,
    progress_to_proto,
    schema_from_proto,
    schema_to_proto,
    shown,
)
from dase_grpc.wire.security import agent_to_join, require_agent
from dase_grpc.wire.status import Context, refusals, service
from dase_grpc.wire.v1 import cluster_pb2, cluster_pb2_grpc, replay_pb2

UNARY_TIMEOUT_S: Final = 5.0
MAX_NODE_ID: Final = 128
"""Characters."""


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """ClusterService over a SharedRun, whose lease table holds every rule.

    `on_event` is called with one sentence whenever a node joins or leaves.
    """

    def __init__(
        self, run: SharedRun, *, clock: Callable[[], float], on_event: Callable[[str], None]
    ) -> None:
        self._run = run
        self._clock = clock
        self._on_event = on_event
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
        return cluster_pb2.HeartbeatResponse(buffer=buffer_to_proto(self._run))

    async def Leave(self, request: cluster_pb2.LeaveRequest, context: Context) -> cluster_pb2.LeaveResponse:
        async with refusals(context):
            require_agent(request.agent_id)
            self._run.require_run(request.run_id)
            self._run.require_data(request.buffer_id)
            self._run.leases.leave(request.agent_id, request.epoch, because=shown(request.reason))
            self._on_event(f"agent {request.agent_id} left: {shown(request.reason)}")
        return cluster_pb2.LeaveResponse()

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
            lease=cluster_pb2.Lease(agent_id=lease.agent_id, epoch=lease.epoch, ttl_seconds=lease.ttl_s),
            buffer=buffer_to_proto(self._run),
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
    """What a node is within a run: the answer to Join; `buffer_size` is as of then."""

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
        return Membership(
            run_id=answer.run_id,
            agent_id=answer.lease.agent_id,
            epoch=answer.lease.epoch,
            ttl_s=answer.lease.ttl_seconds,
            capacity=answer.buffer.capacity,
            min_size=answer.buffer.min_size,
            incarnation=answer.buffer.incarnation,
            buffer_id=answer.buffer.buffer_id,
            buffer_size=answer.buffer.size,
            node_id=node_id,
        )

    async def heartbeat(
        self, member: Membership, progress: Progress, *, timeout_s: float = UNARY_TIMEOUT_S
    ) -> replay_pb2.BufferState:
        """Renews the lease and reports progress; returns what the buffer holds."""
        request = cluster_pb2.HeartbeatRequest(
            run_id=member.run_id,
            agent_id=member.agent_id,
            epoch=member.epoch,
            progress=progress_to_proto(progress),
            buffer_id=member.buffer_id,
        )
        with service(self._address):
            return (await self._stub.Heartbeat(request, timeout=timeout_s)).buffer

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

    async def status(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> cluster_pb2.StatusResponse:
        """The run's agents and buffer."""
        with service(self._address):
            return await self._stub.Status(
                cluster_pb2.StatusRequest(), timeout=timeout_s, wait_for_ready=True
            )
