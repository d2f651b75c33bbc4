"""A gRPC server with this project's limits, and the port it is bound to."""

import errno
import socket
from typing import Any, Final

import grpc

from dase_grpc.errors import AddressError
from dase_grpc.metrics.buffer import Calls
from dase_grpc.replay.security.door import Door
from dase_grpc.replay.service.interceptors import Accounting, Guard
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.limits import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, MAX_MESSAGE_BYTES

MAX_HEADERS_BYTES: Final = 16 * 2**10
"""Of one call; gRPC refuses more with RESOURCE_EXHAUSTED."""

MAX_CONNECTION_STREAMS: Final = 128
"""Calls that one connection may have open; gRPC's clients keep further ones until others have ended."""

MAX_CONNECTIONS: Final = 4_096
HANDSHAKE_MS: Final = 10_000
"""How long a connection may take to begin with HTTP/2."""

IDLE_MS: Final = 60_000
"""How long a connection may be without a call; a client makes a new one when it has one."""

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


def require_private(address: Address, *, insecure: bool, flag: str = "--tls") -> None:
    """Refuses to listen in plaintext where other machines can connect, unless that was asked for.

    flag: what would bring encryption.

    Raises:
        AddressError: the address is not on loopback and `insecure` is not set.
    """
    if not address.loopback and not insecure:
        raise AddressError(
            f"{address} can be reached from other machines and traffic is neither encrypted nor "
            f"authenticated; give certificates with {flag} DIR, listen on 127.0.0.1, or pass --insecure on a "
            f"network you trust"
        )


def make_server(calls: Calls | None = None, door: Door | None = None) -> grpc.aio.Server:
    """A server with this service's limits; without servicers, an address, or a start.

    What its calls are is counted in `calls`, and `door` says who may make them, where given.
    """
    counting = () if calls is None else (Accounting(calls),)
    return grpc.aio.server(options=SERVER_OPTIONS, interceptors=(*counting, Guard(door=door)))


def bind(
    server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None = None
) -> Address:
    """Binds a server that has not started; returns the address with its real port.

    Raises:
        AddressError: the port is in use or the host is not this machine's.
    """
    _try_binding(address)
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


def _try_binding(address: Address) -> None:
    """Binds plain sockets and closes them, for gRPC writes lines of its own about an address it cannot have.

    A name may have several addresses, as localhost has 127.0.0.1 and ::1. gRPC listens on those that are
    free, so that clients of that name would find now this service and now the other.

    Raises:
        AddressError: one of them is in use, or none of the host's addresses is this machine's.
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
