"""The channels of one node by address, and its calls over them: ClusterService, and where streams begin."""

from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc.aio import Channel

from dase_grpc.progress import Attendance, Attendant, Progress
from dase_grpc.replay.client.streams import ClientStream
from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.wire.addresses import CLIENT_OPTIONS, Address, ReplayPlace
from dase_grpc.replay.wire.messages import (
    Membership,
    attendance_to_proto,
    progress_to_proto,
    schema_to_proto,
    shown,
)
from dase_grpc.replay.wire.packed import read_response, write_request
from dase_grpc.replay.wire.status import service
from dase_grpc.replay.wire.v1 import cluster_pb2, cluster_pb2_grpc, replay_pb2
from dase_grpc.schema import TransitionSchema

UNARY_TIMEOUT_S: Final = 5.0

_SERVICE: Final = replay_pb2.DESCRIPTOR.services_by_name["ReplayService"].full_name


def open_channel(address: Address, credentials: Credentials | None = None) -> Channel:
    """A channel to a node; connects when first used. CredentialsError if the credentials cannot be used."""
    if credentials is None:
        return grpc.aio.insecure_channel(address.target, options=list(CLIENT_OPTIONS))
    name = (("grpc.ssl_target_name_override", address.server_name),) if address.server_name else ()
    return credentials.channel(address.target, (*CLIENT_OPTIONS, *name))


async def require_let_in(address: Address, credentials: Credentials) -> None:
    """UnauthenticatedError if a service that does not answer does so because of the credentials."""
    await credentials.require_let_in(address.host, address.port, address.server_name)


class Lines(AsyncExitStack):
    """The channels of one node, by address; each is made when it is first needed, and all end with it."""

    def __init__(self, place: ReplayPlace, credentials: Credentials) -> None:
        super().__init__()
        self.place = place
        self.credentials = credentials
        self._channels: dict[Address, Channel] = {}

    def to(self, address: Address) -> Channel:
        """The channel to an address; connects when first used."""
        if address not in self._channels:
            self._channels[address] = open_channel(address, self.credentials)
            self.push_async_callback(self._channels[address].close)
        return self._channels[address]


class ClusterClient:
    """Calls on ClusterService; every call has a deadline, and raises the refusals of errors.py."""

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
        ended_node_id: str = "",
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> Membership:
        """Leases an agent id; waits for the service. Safe to repeat with the same, random `node_id`.

        `ended_node_id` is of the node before, whose process has certainly ended: its lease is not waited for.
        """
        request = cluster_pb2.JoinRequest(
            node_name=node_name,
            run_id=run_id,
            agent_id=agent_id,
            schema=schema_to_proto(schema),
            lost_buffer_id=lost_buffer_id,
            node_id=node_id,
            ended_node_id=ended_node_id,
        )
        with service(self._address):
            answer = await self._stub.Join(request, timeout=timeout_s, wait_for_ready=True)
        return Membership.of(answer, ttl_s=answer.lease.ttl_seconds, node_id=node_id)

    async def heartbeat(
        self,
        member: Membership,
        progress: Progress,
        *,
        own_counts: bool = False,
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> cluster_pb2.HeartbeatResponse:
        """Renews the lease and reports progress; returns what the buffer holds, and how many follow.

        With `own_counts` it is told how many transitions are this agent's, and not of others.
        """
        request = cluster_pb2.HeartbeatRequest(
            **_lease(member), progress=progress_to_proto(progress), own_counts=own_counts
        )
        with service(self._address):
            return await self._stub.Heartbeat(request, timeout=timeout_s)

    async def leave(self, member: Membership, *, reason: str, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        """Gives the lease back."""
        request = cluster_pb2.LeaveRequest(**_lease(member), reason=shown(reason))
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
        """Announces a node that holds no lease, or says that it leaves; is told counts of its agent alone."""
        request = cluster_pb2.AttendRequest(
            run_id=run_id,
            node_id=node.node_id,
            node_name=node.node_name,
            role=node.role,
            agent_id=node.agent_id,
            schema_fingerprint=fingerprint,
            attendance=attendance_to_proto(attendance),
            leaving=leaving,
            own_counts=True,
        )
        with service(self._address):
            return await self._stub.Attend(request, timeout=timeout_s, wait_for_ready=wait_for_ready)

    async def status(
        self, *, agent_ids: Collection[int] = (), timeout_s: float = UNARY_TIMEOUT_S
    ) -> cluster_pb2.StatusResponse:
        """The run's nodes and buffer; of some agents alone, where named."""
        request = cluster_pb2.StatusRequest(agent_ids=agent_ids)
        with service(self._address):
            return await self._stub.Status(request, timeout=timeout_s, wait_for_ready=True)


def _lease(member: Membership) -> dict[str, Any]:
    return {
        "run_id": member.run_id,
        "agent_id": member.agent_id,
        "epoch": member.epoch,
        "buffer_id": member.buffer_id,
    }


@dataclass(frozen=True)
class StreamTarget:
    """What a stream connects to and what it states first."""

    channel: Channel
    address: str
    member: Membership
    schema: TransitionSchema

    @property
    def cluster(self) -> ClusterClient:
        """ClusterService at the same place."""
        return ClusterClient(self.channel, self.address)

    def header(self) -> replay_pb2.StreamHeader:
        """The first thing that every stream says."""
        return replay_pb2.StreamHeader(
            run_id=self.member.run_id,
            agent_id=self.member.agent_id,
            lease_epoch=self.member.epoch,
            schema_fingerprint=self.schema.fingerprint,
            buffer_id=self.member.buffer_id,
        )

    def insert_stream(self) -> ClientStream:
        """A new Insert stream; waits for the connection when first written to."""
        return self._stream("Insert", write_request, replay_pb2.InsertResponse.FromString)

    def sample_stream(self) -> ClientStream:
        """A new Sample stream; waits for the connection when first written to."""
        return self._stream("Sample", replay_pb2.SampleRequest.SerializeToString, read_response)

    def _stream(
        self, method: str, write: Callable[[Any], bytes], read: Callable[[bytes], Any]
    ) -> ClientStream:
        call = self.channel.stream_stream(
            f"/{_SERVICE}/{method}", request_serializer=write, response_deserializer=read
        )
        return ClientStream(call(wait_for_ready=True), self.address)
