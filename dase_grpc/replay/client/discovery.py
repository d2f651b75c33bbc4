"""Discovery: which services are the shards of one replay, in what order, and where they have moved."""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Final

from grpc.aio import Channel

from dase_grpc.errors import ConfigError, DaseError, RefusalError, UnreachableError
from dase_grpc.replay.buffer.sharding import Shard, missing
from dase_grpc.replay.client.cluster import UNARY_TIMEOUT_S, Lines, require_let_in
from dase_grpc.replay.client.connection import Connection
from dase_grpc.replay.client.patience import AWAY, LOOK_AT_CREDENTIALS_S, Wanted, patiently
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.messages import shard_of
from dase_grpc.replay.wire.status import service
from dase_grpc.replay.wire.v1 import replay_pb2, replay_pb2_grpc

DESCRIBE_S: Final = 2.0
"""How long one of the addresses of a name may take to say which shard it is."""

log = logging.getLogger("dase")


async def find(lines: Lines, wanted: Wanted) -> list[Address]:
    """The addresses in the order of the shards; a replay in one piece is not asked which it is."""
    place = lines.place
    if place.whole:
        return list(place.addresses)
    found = await (_find_behind_name if place.by_name else _find_listed)(lines, wanted)
    return [each.address for each in found]


async def follow_name(shards: Shards, lines: Lines) -> None:
    """Looks for shards that are away at the addresses that their name, if they have one, has by then.

    An address may be that of a pod which has gone, and have been given to another service since.
    """
    passed_over = set[Address]()
    while lines.place.by_name:
        await asyncio.sleep(shards.first.timing.find_again_s)
        away = {index: each for index, each in enumerate(shards.connections) if each.away is not None}
        if away:
            with suppress(RefusalError):
                await _move(away, shards, lines, passed_over)


async def _move(away: dict[int, Connection], shards: Shards, lines: Lines, passed_over: set[Address]) -> None:
    in_use = {each.target.address for each in shards.connections}
    addresses = [address for address in await lines.place.found() if str(address) not in in_use]
    member = shards.first.target.member
    for address, found in zip(addresses, await _answers(lines, addresses), strict=True):
        if not isinstance(found, FoundShard):
            if not isinstance(found, AWAY) and address not in passed_over:
                log.warning("%s, to which %s leads, is passed over: %s", address, lines.place, found)
                passed_over.add(address)
            continue
        ours = found.run_id == member.run_id and found.shard.count == member.shard.count
        connection = away.get(found.shard.index) if ours else None
        if connection is not None and connection.away is not None:
            connection.move(lines.to(found.address), str(found.address))


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


async def _find_listed(lines: Lines, wanted: Wanted) -> list[FoundShard]:
    found = []
    for address in lines.place.addresses:
        ask = partial(describe, lines.to(address), address)
        found.append(await patiently(ask, replace(wanted, replay=address)))
    found = in_order(found)
    require_complete(found)
    return found


async def _find_behind_name(lines: Lines, wanted: Wanted) -> list[FoundShard]:
    """Resolves the name again and again until all shards are among the addresses and answer.

    UnauthenticatedError if it is the credentials that keep one from answering.
    """
    began, looked_at, said = time.monotonic(), -math.inf, False
    while True:
        silent = set[Address]()
        try:
            addresses = await lines.place.found()
            found = await _answering(lines, addresses)
            silent = {*addresses} - {each.address for each in found}
            found = _without_twins(found)
            why = missing([each.shard for each in found]) if found else "none of the addresses that it has"
        except UnreachableError as error:
            why = str(error)
        if why is None:
            return in_order(found)
        if time.monotonic() - looked_at >= LOOK_AT_CREDENTIALS_S:
            await asyncio.gather(*(require_let_in(each, lines.credentials) for each in silent))
            looked_at = time.monotonic()
        waited_s = time.monotonic() - began
        if waited_s >= wanted.timeout_s:
            raise UnreachableError(
                f"of the shards behind {lines.place} some do not answer (waited up to "
                f"{wanted.timeout_s:g} s): {why}"
            )
        if not said:
            log.info("waiting up to %g s for the shards behind %s: %s", wanted.timeout_s, lines.place, why)
            said = True
        await asyncio.sleep(wanted.timing.find_again_s)


def _without_twins(found: list[FoundShard]) -> list[FoundShard]:
    """Each service once, though it may have several addresses, as where a name has IPv4 and IPv6 ones."""
    return list({each.incarnation: each for each in reversed(found)}.values())


async def _answering(lines: Lines, addresses: Sequence[Address]) -> list[FoundShard]:
    answers = await _answers(lines, addresses)
    for answer in answers:
        if isinstance(answer, DaseError) and not isinstance(answer, AWAY):
            raise answer
    return [answer for answer in answers if isinstance(answer, FoundShard)]


async def _answers(lines: Lines, addresses: Sequence[Address]) -> list[FoundShard | DaseError]:
    """What the service at each address says that it is, or why it does not."""

    async def answer(address: Address) -> FoundShard | DaseError:
        try:
            return await describe(lines.to(address), address, timeout_s=DESCRIBE_S, wait=False)
        except DaseError as error:
            return error

    return await asyncio.gather(*map(answer, addresses))


async def describe(
    channel: Channel, address: Address, timeout_s: float = UNARY_TIMEOUT_S, *, wait: bool = True
) -> FoundShard:
    """Asks a service which shard it is; with `wait` waits for one to come up."""
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
    """The shards of one replay by their index; ConfigError if they are not of one. Some may be missing."""
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


def require_complete(found: Sequence[FoundShard]) -> None:
    """Checks that the shards named are all that there are. ConfigError if some are missing."""
    if (absent := missing([each.shard for each in found])) is not None:
        raise ConfigError(
            f"--replay names {len(found)} of the {found[0].shard.count} shards of run "
            f"{found[0].run_id!r} and leaves {absent} out; name the addresses of all"
        )


def _difference(one: FoundShard, other: FoundShard) -> str | None:
    for name, here, there in (
        ("run_id", one.run_id, other.run_id),
        ("the number of shards", one.shard.count, other.shard.count),
        ("min_size", one.min_size, other.min_size),
        ("capacity", one.capacity, other.capacity),
        ("schema_fingerprint", one.fingerprint, other.fingerprint),
    ):
        if (here or there) != (there or here):
            return f"{name} is {here!r} and {there!r}"
    return None
