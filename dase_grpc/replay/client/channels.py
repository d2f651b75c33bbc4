"""The gRPC channels of one node, by address."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import grpc
from grpc.aio import Channel

from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.wire.addresses import (
    KEEPALIVE_TIME_MS,
    KEEPALIVE_TIMEOUT_MS,
    MAX_MESSAGE_BYTES,
    Address,
    ReplayPlace,
)

RECONNECT_MS: Final = (100, 2_000)
"""The first and the longest pause between attempts to connect."""

CONNECT_MS: Final = 3_000
"""How long one attempt may take: a lost packet must not keep a replay that is back away for long."""

CLIENT_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # a probe under way takes the keepalive's place
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
)


def open_channel(address: Address, credentials: Credentials | None = None) -> grpc.aio.Channel:
    """A channel to a node; connects when first used.

    Raises:
        CredentialsError: the credentials cannot be used.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(address.target, options=list(CLIENT_OPTIONS))
    name = (("grpc.ssl_target_name_override", address.server_name),) if address.server_name else ()
    return credentials.channel(address.target, (*CLIENT_OPTIONS, *name))


async def require_let_in(address: Address, credentials: Credentials) -> None:
    """Asks a service that does not answer whether it is the credentials.

    Raises:
        UnauthenticatedError: it is; in one sentence.
    """
    await credentials.require_let_in(address.host, address.port, address.server_name)


class Lines:
    """The channels of one node, by address; each is made when it is first needed, and all end with it."""

    def __init__(self, place: ReplayPlace, credentials: Credentials) -> None:
        self.place = place
        self.credentials = credentials
        self._channels: dict[Address, Channel] = {}

    def to(self, address: Address) -> Channel:
        """The channel to an address; connects when first used."""
        if address not in self._channels:
            self._channels[address] = open_channel(address, self.credentials)
        return self._channels[address]

    async def close(self) -> None:
        """Closes all; what still runs over them ends."""
        async with AsyncExitStack() as closing:
            for channel in self._channels.values():
                closing.push_async_callback(channel.close)


@asynccontextmanager
async def lines_to(place: ReplayPlace, credentials: Credentials) -> AsyncIterator[Lines]:
    """Channels to the services at a place, closed at the end of the block."""
    lines = Lines(place, credentials)
    try:
        yield lines
    finally:
        await lines.close()
