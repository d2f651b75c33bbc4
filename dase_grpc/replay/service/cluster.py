"""ClusterService: Join, Heartbeat, Leave, Attend and Status over a SharedRun."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from dase_grpc.errors import DrainingError, MalformedError
from dase_grpc.process.tasks import in_thread
from dase_grpc.progress import MAX_AGENT_ID, Attendant
from dase_grpc.replay.buffer.leases import ATTENDING_ROLES, Lease, Presence
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.security.door import agent_to_join, require_agent, require_role
from dase_grpc.replay.wire.messages import (
    attendance_from_proto,
    attendance_to_proto,
    buffer_to_proto,
    progress_from_proto,
    progress_to_proto,
    schema_from_proto,
    shown,
)
from dase_grpc.replay.wire.status import Context
from dase_grpc.replay.wire.v1 import cluster_pb2, cluster_pb2_grpc
from dase_grpc.schema import TransitionSchema

MAX_NODE_ID: Final = 128
"""Characters."""

BEATS_PER_S: Final = 500
"""Heartbeats of all nodes together that are asked for; with fewer nodes each beats twice a second."""

AGENTS_AT_ONCE: Final = 32
"""Of which Status tells before it lets others go on."""


@dataclass(eq=False)
class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """ClusterService over a SharedRun, whose lease table holds every rule.

    `on_event` is called with one sentence whenever a node joins or leaves. The node started at `started_at`.
    """

    run: SharedRun
    _: KW_ONLY
    clock: Callable[[], float]
    on_event: Callable[[str], None]
    started_at: float = 0.0
    draining: bool = False
    _joining: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def Join(self, request: cluster_pb2.JoinRequest, context: Context) -> cluster_pb2.JoinResponse:
        self._require_open()
        if len(request.node_id) > MAX_NODE_ID:
            raise MalformedError(f"a node id has up to {MAX_NODE_ID} characters, not {len(request.node_id)}")
        wanted = agent_to_join(request.agent_id if request.HasField("agent_id") else None)
        schema = schema_from_proto(request.schema)
        async with self._joining:
            if (reserve := self.run.reservation(schema, run_id=request.run_id)) is not None:
                await in_thread(reserve)
                self._require_open()
            return self._joined(request, wanted, schema)

    def _require_open(self) -> None:
        if self.draining:
            raise DrainingError("the replay service is shutting down and takes no new nodes")

    def _joined(
        self, request: cluster_pb2.JoinRequest, wanted: int | None, schema: TransitionSchema
    ) -> cluster_pb2.JoinResponse:
        now = self.clock()
        held = None if wanted is None else self.run.leases.held(wanted)
        lease = self.run.join(
            shown(request.node_name),
            wanted=wanted,
            run_id=request.run_id,
            schema=schema,
            now=now,
            node_id=request.node_id,
            ended=request.ended_node_id,
        )
        told = f"{lease.node_name} joined as agent {lease.agent_id} (epoch {lease.epoch})"
        if held is not None and held.epoch < lease.epoch and held.state(now) == "live":
            told += f", whose node of epoch {held.epoch} has ended"
        if lost := shown(request.lost_buffer_id):
            told += f"; it comes from buffer {lost}, whose transitions are not here any more"
        self.on_event(told)
        buffer = buffer_to_proto(self.run, counts_of=(lease.agent_id,))
        return cluster_pb2.JoinResponse(run_id=self.run.run_id, lease=_lease(lease), buffer=buffer)

    async def Heartbeat(
        self, request: cluster_pb2.HeartbeatRequest, context: Context
    ) -> cluster_pb2.HeartbeatResponse:
        self._require_here(request)
        progress = progress_from_proto(request.progress)
        self.run.leases.renew(request.agent_id, request.epoch, self.clock(), progress=progress)
        followers = self.run.policies.followers(request.agent_id)
        buffer = buffer_to_proto(self.run, counts_of=(request.agent_id,) if request.own_counts else None)
        return cluster_pb2.HeartbeatResponse(buffer=buffer, followers=followers, beat_seconds=self._beat_s)

    async def Leave(self, request: cluster_pb2.LeaveRequest, context: Context) -> cluster_pb2.LeaveResponse:
        self._require_here(request)
        self.run.leases.leave(request.agent_id, request.epoch, because=shown(request.reason))
        if self.run.opened:
            self.run.store.priorities.pop(request.agent_id, None)
        self.on_event(f"agent {request.agent_id} left: {shown(request.reason)}")
        return cluster_pb2.LeaveResponse()

    async def Attend(
        self, request: cluster_pb2.AttendRequest, context: Context
    ) -> cluster_pb2.AttendResponse:
        run, node = self.run, _attendant(request)
        if request.run_id:
            run.require_run(request.run_id)
        if request.schema_fingerprint and run.opened:
            run.require_reader(run_id=run.run_id, fingerprint=request.schema_fingerprint)
        self._note(node, request)
        lease = None if node.agent_id is None else run.leases.held(node.agent_id)
        own = () if node.agent_id is None else (node.agent_id,)
        return cluster_pb2.AttendResponse(
            run_id=run.run_id,
            lease=None if lease is None else _lease(lease),
            buffer=buffer_to_proto(run, counts_of=own if request.own_counts else None),
            ttl_seconds=run.attendance.ttl_s,
            learner_updates=0 if lease is None else lease.progress.updates,
            agent_finished=node.agent_id is not None and run.leases.finished(node.agent_id),
            beat_seconds=self._beat_s,
        )

    async def Status(
        self, request: cluster_pb2.StatusRequest, context: Context
    ) -> cluster_pb2.StatusResponse:
        now, wanted = self.clock(), frozenset(request.agent_ids)
        return cluster_pb2.StatusResponse(
            run_id=self.run.run_id,
            buffer=buffer_to_proto(self.run, counts_of=wanted or None),
            agents=[status async for status in self._agents(now, wanted)],
            draining=self.draining,
            environment=self.run.store.schema.environment if self.run.opened else "",
            nodes=[_node_status(seen, now) for seen in self.run.attendance.all(now) if not wanted],
            uptime_seconds=now - self.started_at,
        )

    async def _agents(self, now: float, wanted: Collection[int]) -> AsyncIterator[cluster_pb2.AgentStatus]:
        """The agents that are wanted, or all; lets streams go on in between, for many take a while."""
        run, versions = self.run, self.run.policies.versions
        leases = [lease for lease in run.leases.all() if not wanted or lease.agent_id in wanted]
        for told, lease in enumerate(leases, start=1):
            version, in_place = versions.get(lease.agent_id), run.in_place[lease.agent_id] > 0
            yield _agent_status(lease, now, policy_version=version, in_place=in_place)
            if told % AGENTS_AT_ONCE == 0:
                await asyncio.sleep(0)

    @property
    def _beat_s(self) -> float:
        """How far apart a node's heartbeats are to be, so that all of them are not too many."""
        return (len(self.run.leases) + len(self.run.attendance)) / BEATS_PER_S

    def _require_here(self, request: cluster_pb2.HeartbeatRequest | cluster_pb2.LeaveRequest) -> None:
        """Checks that the caller may act as the agent, and means what is held here."""
        require_agent(request.agent_id)
        self.run.require_run(request.run_id)
        self.run.require_data(request.buffer_id)

    def _note(self, node: Attendant, request: cluster_pb2.AttendRequest) -> None:
        """Notes that a node attends, or does no more."""
        run, agent_id = self.run, node.agent_id
        of_agent = "" if agent_id is None else f" of agent {agent_id}"
        if request.leaving:
            run.attendance.leave(node.node_id)
            if agent_id is not None and run.opened and run.store.committed(node.writer_id, agent_id=agent_id):
                run.store.watch.leave((agent_id, node.writer_id))
            self.on_event(f"{node.node_name}, {node.role}{of_agent}, left")
        elif run.attendance.note(node, attendance_from_proto(request.attendance), self.clock()):
            self.on_event(f"{node.node_name} attends as {node.role}{of_agent}")


def _attendant(request: cluster_pb2.AttendRequest) -> Attendant:
    """Who attends."""
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


def _node_status(seen: Presence, now: float) -> cluster_pb2.NodeStatus:
    return cluster_pb2.NodeStatus(
        node_name=seen.node.node_name,
        role=seen.node.role,
        agent_id=seen.node.agent_id,
        seconds_since_attendance=now - seen.at,
        attendance=attendance_to_proto(seen.attendance),
    )


def _agent_status(
    lease: Lease, now: float, *, policy_version: int | None, in_place: bool
) -> cluster_pb2.AgentStatus:
    return cluster_pb2.AgentStatus(
        agent_id=lease.agent_id,
        epoch=lease.epoch,
        node_name=lease.node_name,
        lease=lease.state(now),
        seconds_since_heartbeat=now - lease.renewed_at,
        progress=progress_to_proto(lease.progress),
        reason=lease.left_because or "",
        policy_version=policy_version,
        in_place=in_place,
    )
