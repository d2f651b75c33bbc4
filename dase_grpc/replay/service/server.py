"""The server of a replay: its services, this project's limits, and the port it is bound to."""

import errno
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection, reflection_pb2

from dase_grpc.errors import AddressError
from dase_grpc.metrics.calls import Calls
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.security.door import Door
from dase_grpc.replay.service.insert import Inserts
from dase_grpc.replay.service.interceptors import Accounting, Guard
from dase_grpc.replay.service.sample import Samples
from dase_grpc.replay.service.streams import Changes, Streams
from dase_grpc.replay.wire.addresses import (
    KEEPALIVE_TIME_MS,
    KEEPALIVE_TIMEOUT_MS,
    MAX_MESSAGE_BYTES,
    Address,
)
from dase_grpc.replay.wire.messages import buffer_to_proto, schema_to_proto
from dase_grpc.replay.wire.packed import read_request
from dase_grpc.replay.wire.status import Context
from dase_grpc.replay.wire.v1 import replay_pb2, replay_pb2_grpc

MAX_HEADERS_BYTES: Final = 16 * 2**10
"""Of one call; gRPC refuses more with RESOURCE_EXHAUSTED."""

MAX_CONNECTION_STREAMS: Final = 128
"""Calls that one connection may have open; gRPC's clients keep further ones until others have ended."""

MAX_CONNECTIONS: Final = 4_096
HANDSHAKE_MS: Final = 10_000
"""How long a connection may take to begin with HTTP/2."""

IDLE_MS: Final = 60_000
"""How long a connection may be without a call; a client makes a new one when it has one."""

Server = grpc.aio.Server

HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"
"""What newer clients call; its messages are those of v1alpha under another name."""

_WHY_NOT: Final = {errno.EADDRINUSE: "in use", errno.EADDRNOTAVAIL: "not an address of this machine"}
SERVER_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # a probe under way takes the keepalive's place
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_HEADERS_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_HEADERS_BYTES),
    ("grpc.max_concurrent_streams", MAX_CONNECTION_STREAMS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", IDLE_MS),
    ("grpc.so_reuseport", 0),
)


def make_server(calls: Calls | None = None, door: Door | None = None) -> grpc.aio.Server:
    """A server with this service's limits; without servicers, an address, or a start.

    What its calls are is counted in `calls`, and `door` says who may make them, where given.
    """
    counting = () if calls is None else (Accounting(calls),)
    return grpc.aio.server(options=SERVER_OPTIONS, interceptors=(*counting, Guard(door)))


def bind(
    server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None = None
) -> Address:
    """Binds a server that has not started; returns the address with its real port."""
    require_bindable(address)
    try:
        port = (
            server.add_insecure_port(str(address))
            if credentials is None
            else server.add_secure_port(str(address), credentials)
        )
    except RuntimeError as error:  # taken since
        raise AddressError(
            f"cannot listen on {address} (in use, or not an address of this machine); choose another --listen"
        ) from error
    if port == 0:
        raise AddressError(f"cannot listen on {address}; choose another --listen")
    return Address(address.host, port)


def require_bindable(address: Address) -> None:
    """Binds plain sockets and closes them; AddressError where they are refused.

    gRPC writes lines of its own about an address that it cannot have. A name may have several addresses, as
    localhost has 127.0.0.1 and ::1. gRPC listens on those that are free, so that clients of that name would
    find now this service and now the other.
    """
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        refused: list[OSError | None] = [error]
    else:
        refused = [_refusal_to_bind(family, kind, target) for family, kind, _, _, target in found]
    taken = [error for error in refused if error is not None and error.errno == errno.EADDRINUSE]
    if None in refused and not taken:
        return
    why = next(iter([*taken, *refused]), None)
    reason = "unknown host" if why is None else _WHY_NOT.get(why.errno or 0, why.strerror or str(why))
    raise AddressError(f"cannot listen on {address} ({reason}); choose another --listen") from why


def _refusal_to_bind(family: int, kind: int, target: Any) -> OSError | None:
    try:
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen()
    except OSError as error:
        return error
    return None


class ReplayServicer(replay_pb2_grpc.ReplayServiceServicer):
    """ReplayService over a SharedRun. Lives on one event loop; `clock` is monotonic, in seconds."""

    def __init__(
        self, run: SharedRun, *, calls: Calls | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.streams = Streams(run, "Insert", "Sample")
        self._run = run
        calls, changed = Calls() if calls is None else calls, Changes()
        self._inserts = Inserts(run, self.streams, changed=changed, calls=calls, clock=clock)
        self._samples = Samples(run, self.streams, changed=changed, calls=calls)

    async def Describe(
        self, request: replay_pb2.DescribeRequest, context: Context
    ) -> replay_pb2.DescribeResponse:
        answer = replay_pb2.DescribeResponse(run_id=self._run.run_id, buffer=buffer_to_proto(self._run))
        if self._run.opened:
            schema = self._run.store.schema
            answer.schema.CopyFrom(schema_to_proto(schema))
            answer.schema_fingerprint = schema.fingerprint
        return answer

    # grpc.aio runs a coroutine that reads and writes its context as well as a generator; the
    # generated stubs know only the generator.
    async def Insert(  # type: ignore[override]
        self, request_iterator: AsyncIterator[replay_pb2.InsertRequest], context: Context
    ) -> None:
        await self.streams.serve(context, self._inserts.serve, rpc="Insert")

    async def Sample(  # type: ignore[override]
        self, request_iterator: AsyncIterator[replay_pb2.SampleRequest], context: Context
    ) -> None:
        await self.streams.serve(context, self._samples.serve, rpc="Sample")


def add_replay(servicer: ReplayServicer, server: grpc.aio.Server) -> None:
    """Has a server serve ReplayService as the generated code would, but rows are read without a copy."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Insert": grpc.stream_stream_rpc_method_handler(
            servicer.Insert,
            request_deserializer=read_request,
            response_serializer=replay_pb2.InsertResponse.SerializeToString,
        ),
        "Sample": grpc.stream_stream_rpc_method_handler(
            servicer.Sample,
            request_deserializer=replay_pb2.SampleRequest.FromString,
            response_serializer=replay_pb2.SampleResponse.SerializeToString,
        ),
        "Describe": grpc.unary_unary_rpc_method_handler(
            servicer.Describe,
            request_deserializer=replay_pb2.DescribeRequest.FromString,
            response_serializer=replay_pb2.DescribeResponse.SerializeToString,
        ),
    }
    service = replay_pb2.DESCRIPTOR.services_by_name["ReplayService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


class NodeHealth(HealthServicer):  # type: ignore[misc]  # the library has no types
    """The health of a node, which is the service "", and of its services once `serving` was called."""

    def __init__(self) -> None:
        super().__init__()
        self._services: tuple[str, ...] = ("",)

    async def serving(self, services: Collection[str]) -> None:
        """Says that the node and each of these services can be used."""
        for service in ("", *services):
            await self.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._services = ("", *services)

    async def List(
        self, request: health_pb2.HealthListRequest, context: Any
    ) -> health_pb2.HealthListResponse:
        """What `Check` says of each, which the library leaves out."""
        checks = {service: health_pb2.HealthCheckRequest(service=service) for service in self._services}
        return health_pb2.HealthListResponse(
            statuses={service: await self.Check(check, context) for service, check in checks.items()}
        )


def add_standard(server: grpc.aio.Server, services: Collection[str]) -> NodeHealth:
    """Has a server serve health and reflection of its services, given by their full names."""
    health = NodeHealth()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (*services, HEALTH, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    described = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": described}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_V1, methods),))
    return health
