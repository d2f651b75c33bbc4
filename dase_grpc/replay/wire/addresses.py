"""Addresses: HOST:PORT, shards, DNS names, why one is silent, and the limits of a channel to one."""

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Final, Self

from dase_grpc.config.texts import shown
from dase_grpc.errors import AddressError, UnreachableError

_ADDRESS: Final = re.compile(
    r"(?:\[(?P<ipv6>[^\s\[\]]*:[^\s\[\]]*)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>[0-9]{1,5})"
)
_HOST_NAME: Final = re.compile(r"(?:\*\.)?[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")

DNS: Final = "dns:"
SHOWN: Final = 100
"""Characters of what is no address, beyond which a sentence shortens it."""
NO_HOST: Final = "for a host's name has 1 to 63 letters, digits or hyphens between its dots"
"""What is said of a text that is none, see `can_be_host`."""

PROBE_S: Final = 1.0

KEEPALIVE_TIME_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000
MAX_MESSAGE_BYTES: Final = 4 * 2**20

RECONNECT_MS: Final = (100, 2_000)
"""The first and the longest pause between attempts to connect."""

CONNECT_MS: Final = 3_000
"""How long one attempt may take: a lost packet must not keep a replay that is back away for long."""

RESOLVE_AGAIN_MS: Final = 1_000
"""How soon a name may be looked up again, else 30 s: a replay's pod that was moved has another address."""

CLIENT_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # a probe under way takes the keepalive's place
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # nodes of one process would share a connection, and its limits
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
    ("grpc.dns_min_time_between_resolutions_ms", RESOLVE_AGAIN_MS),
)

MAX_CHUNK_BYTES: Final = 2**20
CHUNK_BYTES: Final = MAX_CHUNK_BYTES - 1024

REPLAY_TIMEOUT_S: Final = 600.0
"""How long the replay may be away before a node that needs it ends."""


@dataclass(frozen=True)
class Address:
    """A host and a port, 0 for a free one. Its certificate is to be `server_name`'s, if not the host's."""

    host: str
    port: int
    server_name: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def target(self) -> str:
        """What gRPC calls it: without a scheme it would take a host named dns, unix or ipv4 for one."""
        return f"dns:///{self}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host.lower() == "localhost":  # names have no case
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def can_be_host(text: str) -> bool:
    """Whether a text can be a host's name or address, as all that the resolver is asked for has to be."""
    try:
        text.encode("idna")  # as getaddrinfo does, which takes a failure for no answer of the resolver's
    except UnicodeError:
        return False
    return "\0" not in text


def is_host_name(text: str) -> bool:
    """Whether a text is a host's name as a certificate has it; its first part may stand for any, as *."""
    return _HOST_NAME.fullmatch(text) is not None and can_be_host(text)


def parse_address(text: str) -> Address:
    """Reads HOST:PORT; an IPv6 host stands in brackets."""
    match = _ADDRESS.fullmatch(text) if isinstance(text, str) else None  # Python's callers give anything
    if match is None or int(match["port"]) > 65_535:
        raise AddressError(f"{_named(text)} is not an address of the form HOST:PORT, e.g. 127.0.0.1:50051")
    host = match["ipv6"] or match["host"]
    if not can_be_host(host):
        raise AddressError(f"{_named(text)} is no address, {NO_HOST}; give HOST:PORT, e.g. 127.0.0.1:50051")
    return Address(host, int(match["port"]))


def _named(text: object) -> str:
    return repr(text) if isinstance(text, str) and len(text) <= SHOWN else shown(text)


def require_private(address: Address, *, insecure: bool, flag: str = "--tls") -> None:
    """Refuses to listen in plaintext where other machines can connect, unless that was asked for."""
    if not address.loopback and not insecure:
        raise AddressError(
            f"{address} can be reached from other machines and traffic is neither encrypted nor "
            f"authenticated; give certificates with {flag} DIR, listen on 127.0.0.1, or pass --insecure on a "
            f"network you trust"
        )


@dataclass(frozen=True)
class ReplayPlace:
    """What --replay states: one address, one for each shard, or a name that resolves to theirs."""

    addresses: tuple[Address, ...]
    by_name: bool = False

    def __str__(self) -> str:
        listed = ",".join(str(address) for address in self.addresses)
        return f"{DNS}{listed}" if self.by_name else listed

    @classmethod
    def at(cls, address: Address) -> Self:
        """A replay in one piece."""
        return cls((address,))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads HOST:PORT, several of these with commas between them, or dns:NAME:PORT.

        What is but a number behind dns: is a port, of a host of that name.
        """
        if not isinstance(text, str):
            return cls.at(parse_address(text))
        if text.startswith(DNS) and not text.removeprefix(DNS).partition(",")[0].isdecimal():
            return cls((parse_address(text.removeprefix(DNS)),), by_name=True)
        addresses = tuple(parse_address(part) for part in text.split(","))
        for address in addresses:
            if addresses.count(address) > 1:
                raise AddressError(f"--replay names {address} twice; name each shard once")
        return cls(addresses)

    @property
    def whole(self) -> bool:
        """Whether it can be a replay in one piece only."""
        return len(self.addresses) == 1 and not self.by_name

    async def found(self) -> tuple[Address, ...]:
        """The addresses; those that a name has now, each to be verified under that name."""
        return await resolved(self.addresses[0]) if self.by_name else self.addresses


async def resolved(name: Address) -> tuple[Address, ...]:
    """All addresses that a name has now, in the order of their numbers."""
    import asyncio  # the command line reads addresses, and starts sooner without

    loop = asyncio.get_running_loop()
    try:
        answers = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnreachableError(
            f"the name {name.host} does not resolve ({error.strerror or error}); see --replay"
        ) from None
    hosts = sorted({str(target[0]) for *_, target in answers})
    return tuple(Address(host, name.port, server_name=name.host) for host in hosts)


async def silence_of(address: Address, *, within_s: float = PROBE_S) -> str:
    """What keeps a service from answering, in a few words; "" where a connection can be made.

    Takes `within_s` at most. Neither a name that does not resolve yet nor a closed port is an error here: a
    service may be about to start.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(within_s):
            try:
                await loop.getaddrinfo(address.host, address.port)
            except OSError as error:
                return f"the name {address.host} does not resolve ({error.strerror or error})"
            _, writer = await asyncio.open_connection(address.host, address.port)
    except ConnectionRefusedError:
        return "nothing listens there"
    except TimeoutError:
        return f"no connection within {within_s:g} s"
    except OSError as error:
        return f"no connection ({error.strerror or error})"
    finally:
        if writer is not None:
            writer.close()
    return ""
