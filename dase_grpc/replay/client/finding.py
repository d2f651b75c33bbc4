"""How a node comes to the shards of its replay, joins each, and finds one again that has moved."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from grpc.aio import Channel

from dase_grpc.errors import ConfigError, RefusalError, UnreachableError
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.nodes.leaving import Farewell, leave
from dase_grpc.replay.buffer.sharding import WHOLE
from dase_grpc.replay.client.connection import AWAY, Connection
from dase_grpc.replay.client.inserter import StreamTarget
from dase_grpc.replay.client.joining import NODE_NAME, Wanted, join, patiently
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.service.cluster import ClusterClient, Membership
from dase_grpc.replay.service.server import Address, open_channel, require_let_in
from dase_grpc.schema import TransitionSchema
from dase_grpc.wire.sharded import (
    FoundShard,
    ReplayPlace,
    describe,
    in_order,
    missing,
    require_complete,
)

LOOK_AGAIN_S: Final = 1.0
"""How often a name is resolved again while shards behind it are missing."""

DESCRIBE_S: Final = 2.0
"""How long one of the addresses of a name may take to say which shard it is."""

log = logging.getLogger("dase")


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


@dataclass(frozen=True)
class Joined:
    """A node that has joined each shard: as who, and where, in the order of the shards."""

    targets: tuple[StreamTarget, ...]
    addresses: tuple[Address, ...]

    @property
    def member(self) -> Membership:
        """What the node is: as the first shard has it, with what all shards hold together."""
        members = [target.member for target in self.targets]
        return replace(
            members[0],
            capacity=sum(member.capacity for member in members),
            buffer_size=sum(member.buffer_size for member in members),
        )


Entry = Callable[[ClusterClient, Wanted, TransitionSchema], Coroutine[Any, Any, Membership]]
"""How a node of some role is let in by one shard."""


async def join_all(lines: Lines, wanted: Wanted, schema: TransitionSchema) -> Joined:
    """Joins every shard under one agent id, which the first one decides; waits for shards that are away.

    Where one refuses, what the others have given is given back.

    Raises:
        ConfigError: the services do not make up one replay.
        RefusalError: see `join`.
    """
    targets: list[StreamTarget] = []
    try:
        return await enter_all(lines, wanted, schema, enter=join, entered=targets)
    except BaseException:
        await leave(Farewell(targets, reason="could not join every shard"))
        raise


async def enter_all(
    lines: Lines, wanted: Wanted, schema: TransitionSchema, *, enter: Entry, entered: list[StreamTarget]
) -> Joined:
    """Is let in by every shard, one after the other, each of which `entered` has from then on.

    Raises:
        ConfigError: the services do not make up one replay.
        RefusalError: see `enter`.
    """
    addresses = await _find(lines, wanted)
    for address in addresses:
        channel = lines.to(address)
        first = entered[0].member if entered else None
        asked = replace(
            wanted,
            replay=address,
            agent_id=first.agent_id if first else wanted.agent_id,
            run_id=first.run_id if first else wanted.run_id,
        )
        member = await enter(ClusterClient(channel, str(address)), asked, schema)
        entered.append(StreamTarget(channel, str(address), member, schema))
    _require_one_replay([target.member for target in entered])
    return Joined(tuple(entered), tuple(addresses))


async def first_of(lines: Lines, wanted: Wanted) -> Address:
    """Where the first shard is, which has the policies; waits for shards that are away.

    Raises:
        ConfigError: the services do not make up one replay.
        RefusalError: one refuses this node, or was away for too long.
    """
    return (await _find(lines, wanted))[0]


def _require_one_replay(members: list[Membership]) -> None:
    """Checks what only a join tells.

    Raises:
        ConfigError: a shard was left out, or shards do not hold alike.
    """
    first = members[0]
    if len(members) == 1 and first.shard != WHOLE:
        raise ConfigError(
            f"this replay is shard {first.shard} of run {first.run_id!r}; name the addresses of all "
            f"{first.shard.count} shards with --replay"
        )
    for member in members:
        if member.capacity != first.capacity:
            raise ConfigError(
                f"shard {first.shard} holds up to {first.capacity} transitions and shard {member.shard} "
                f"{member.capacity}; start all shards with one --capacity"
            )


async def _find(lines: Lines, wanted: Wanted) -> list[Address]:
    """The addresses in the order of the shards; a replay in one piece is not asked which it is."""
    place = lines.place
    if place.whole:
        return list(place.addresses)
    found = await (_find_behind_name if place.by_name else _find_listed)(lines, wanted)
    return [each.address for each in found]


async def _find_listed(lines: Lines, wanted: Wanted) -> list[FoundShard]:
    found = []
    for address in lines.place.addresses:
        ask = partial(_describe, lines, address)
        found.append(await patiently(ask, replace(wanted, replay=address)))
    found = in_order(found)
    require_complete(found)
    return found


async def _find_behind_name(lines: Lines, wanted: Wanted) -> list[FoundShard]:
    """Resolves the name again and again until all shards are among the addresses and answer."""
    began, said = time.monotonic(), False
    while True:
        why: str | None = "no address"
        try:
            found = _without_twins(await _answering(lines, await lines.place.found()))
            why = missing(found) if found else why
        except UnreachableError as error:
            why = str(error)
        if why is None:
            return in_order(found)
        waited_s = time.monotonic() - began
        if waited_s >= wanted.timeout_s:
            raise UnreachableError(
                f"of the shards behind {lines.place} some do not answer (waited up to "
                f"{wanted.timeout_s:g} s): {why}"
            )
        if not said:
            log.info("waiting up to %g s for the shards behind %s: %s", wanted.timeout_s, lines.place, why)
            said = True
        await asyncio.sleep(LOOK_AGAIN_S)


def _without_twins(found: list[FoundShard]) -> list[FoundShard]:
    """Each service once, though it may have several addresses, as where a name has IPv4 and IPv6 ones."""
    return list({each.incarnation: each for each in reversed(found)}.values())


async def _answering(lines: Lines, addresses: tuple[Address, ...]) -> list[FoundShard]:
    """What the services at some addresses say of themselves, without those that do not answer.

    Raises:
        DaseError: one refuses this node.
    """
    asked = [describe(lines.to(address), address, timeout_s=DESCRIBE_S, wait=False) for address in addresses]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, AWAY):
            raise answer
    return [answer for answer in answers if isinstance(answer, FoundShard)]


async def _describe(lines: Lines, address: Address, timeout_s: float) -> FoundShard:
    return await describe(lines.to(address), address, timeout_s=timeout_s)


def connected(
    joined: Joined,
    lines: Lines,
    *,
    timeout_s: float,
    accept: Callable[[Membership], None],
    metrics: LearnerMetrics | None,
) -> Shards:
    """The connections of a learner that has joined; see Connection.

    `accept` is told of a membership what all shards hold together.
    """
    count = len(joined.targets)

    def accept_part(member: Membership) -> None:
        accept(replace(member, capacity=member.capacity * count))

    return Shards(
        [
            Connection(
                target,
                node_name=NODE_NAME,
                timeout_s=timeout_s,
                accept=accept_part,
                metrics=metrics,
                look_why_away=partial(require_let_in, address, lines.credentials),
            )
            for target, address in zip(joined.targets, joined.addresses, strict=True)
        ]
    )


async def follow_name(shards: Shards, lines: Lines, *, every_s: float = LOOK_AGAIN_S) -> None:
    """Looks for shards that are away at the addresses that their name has by then, until cancelled.

    Returns at once where the replay is not stated by a name. `shards` may be the first ones alone.
    """
    while lines.place.by_name:
        await asyncio.sleep(every_s)
        away = {index: each for index, each in enumerate(shards.connections) if each.away is not None}
        if away:
            with suppress(RefusalError):
                await _move(away, shards, lines)


async def _move(away: dict[int, Connection], shards: Shards, lines: Lines) -> None:
    in_use = {each.target.address for each in shards.connections}
    addresses = [address for address in await lines.place.found() if str(address) not in in_use]
    member = shards.first.target.member
    for found in await _answering(lines, tuple(addresses)):
        ours = found.run_id == member.run_id and found.shard.count == member.shard.count
        connection = away.get(found.shard.index) if ours else None
        if connection is not None and connection.away is not None:
            connection.move(lines.to(found.address), str(found.address))
