"""Where a replay or its shards are, which shards belong together, and how a batch is split over them."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Self

import numpy as np
from grpc.aio import Channel

from dase_grpc.errors import AddressError, ConfigError, UnreachableError
from dase_grpc.replay.buffer.sharding import Shard
from dase_grpc.replay.service.cluster import UNARY_TIMEOUT_S, shard_of
from dase_grpc.replay.service.server import Address, parse_address
from dase_grpc.replay.wire.status import service
from dase_grpc.replay.wire.v1 import replay_pb2, replay_pb2_grpc

DNS: Final = "dns:"


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

        Raises:
            AddressError: it is none of these, or names an address twice.
        """
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
        """The addresses; those that a name has now, each to be verified under that name.

        Raises:
            UnreachableError: the name resolves to none.
        """
        return await resolved(self.addresses[0]) if self.by_name else self.addresses


async def resolved(name: Address) -> tuple[Address, ...]:
    """All addresses that a name has now, in the order of their numbers.

    Raises:
        UnreachableError: it has none.
    """
    loop = asyncio.get_running_loop()
    try:
        answers = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnreachableError(
            f"the name {name.host} does not resolve ({error.strerror or error}); see --replay"
        ) from None
    hosts = sorted({str(target[0]) for *_, target in answers})
    return tuple(Address(host, name.port, server_name=name.host) for host in hosts)


@dataclass(frozen=True)
class FoundShard:
    """What a service says of itself; capacity and fingerprint are empty until a learner has joined."""

    address: Address
    shard: Shard
    run_id: str
    incarnation: str
    min_size: int
    capacity: int
    fingerprint: str


async def describe(
    channel: Channel, address: Address, *, timeout_s: float = UNARY_TIMEOUT_S, wait: bool = True
) -> FoundShard:
    """Asks a service which shard it is; with `wait` waits for one to come up.

    Raises:
        RefusalError: it does not answer, or does not let this node in.
    """
    stub = replay_pb2_grpc.ReplayServiceStub(channel)
    with service(str(address)):
        answer = await stub.Describe(replay_pb2.DescribeRequest(), timeout=timeout_s, wait_for_ready=wait)
    buffer = answer.buffer
    return FoundShard(
        address,
        shard_of(buffer),
        answer.run_id,
        buffer.incarnation,
        buffer.min_size,
        buffer.capacity,
        answer.schema_fingerprint,
    )


def in_order(found: Sequence[FoundShard]) -> list[FoundShard]:
    """The shards of one replay by the index that each states; some of them may be missing.

    Raises:
        ConfigError: two of them are not of one replay, or the same shard.
    """
    for one in found:
        for other in found:
            if (difference := _difference(one, other)) is not None:
                raise ConfigError(
                    f"the services at {one.address} and {other.address} are not shards of one replay: "
                    f"{difference}; see --replay, and start all shards of a run alike"
                )
    ordered = sorted(found, key=lambda each: each.shard.index)
    for one, other in pairwise(ordered):
        if one.shard.index == other.shard.index:
            raise ConfigError(
                f"the services at {one.address} and {other.address} are both shard {one.shard}; "
                f"see --replay, and their --shard"
            )
    return ordered


def missing(found: Sequence[FoundShard]) -> str | None:
    """Which shards are not among those found, in a few words; None if none is missing."""
    count = found[0].shard.count
    absent = sorted(set(range(count)) - {each.shard.index for each in found})
    if not absent:
        return None
    named = ", ".join(f"{index}/{count}" for index in absent[:8])
    return f"shard{'s' if len(absent) > 1 else ''} {named}{', ...' if len(absent) > 8 else ''}"


def require_complete(found: Sequence[FoundShard]) -> None:
    """Checks that the shards named are all that there are.

    Raises:
        ConfigError: some are missing.
    """
    if (absent := missing(found)) is not None:
        raise ConfigError(
            f"--replay names {len(found)} of the {found[0].shard.count} shards of run "
            f"{found[0].run_id!r} and leaves {absent} out; name the addresses of all"
        )


def _difference(one: FoundShard, other: FoundShard) -> str | None:
    """What keeps two services from being shards of one replay."""
    for name, here, there in (
        ("run_id", one.run_id, other.run_id),
        ("the number of shards", one.shard.count, other.shard.count),
        ("min_size", one.min_size, other.min_size),
        ("capacity", one.capacity or other.capacity, other.capacity or one.capacity),
        (
            "schema_fingerprint",
            one.fingerprint or other.fingerprint,
            other.fingerprint or one.fingerprint,
        ),
    ):
        if here != there:
            return f"{name} is {here!r} and {there!r}"
    return None


def split(rows: int, sizes: Sequence[int], rng: np.random.Generator) -> list[int]:
    """How many of `rows` independent uniform draws from a union fall on each part, of these sizes.

    Multinomial. Drawn as whole numbers, so that a part of size 0 gets none, whatever is rounded where.

    Raises:
        ValueError: the union is empty.
    """
    ends = np.cumsum(sizes)
    drawn = np.searchsorted(ends, rng.integers(ends[-1], size=rows), side="right")
    counts: list[int] = np.bincount(drawn, minlength=len(sizes)).tolist()
    return counts
