"""How long a node waits for shards that are away: only while none serves, only once it is to stop."""

import asyncio
from types import SimpleNamespace

import pytest
from contracts.sentences import assert_one_sentence
from nodes.sharding_cases import connections_to, shards_serving
from replay.wire.services import promptly

from dase_grpc.errors import OverloadedError, UnreachableError
from dase_grpc.replay.client.connection import Stream

SILENT = UnreachableError("no answer")
OVERLOADED = OverloadedError("2048 calls of Publish are open")
TIMEOUT_S = 600.0


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The time of connections, which a test moves; their pauses take none."""
    clock, sleep = SimpleNamespace(now=1000.0), asyncio.sleep
    name = "dase_grpc.replay.client.{}.time"
    for module in ("connection", "shards"):
        monkeypatch.setattr(name.format(module), SimpleNamespace(monotonic=lambda: clock.now))
    at_once = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: sleep(0)})
    monkeypatch.setattr("dase_grpc.replay.client.connection.asyncio", at_once)
    return clock


@pytest.fixture
async def shards():
    """A node's connections to two shards, which are broken only where a test says so."""
    async with shards_serving(2) as services:
        yield await connections_to(services, timeout_s=TIMEOUT_S)


async def fails(connection, stream=Stream.HEARTBEAT, error=SILENT):
    """One attempt at a stream fails, which is broken then; raises what ends the node, if that does."""
    errors = [error]

    async def once(target):
        if errors:
            raise errors.pop()

    await promptly(connection.keep(stream, once))


async def test_once_no_shard_serves_one_that_was_away_before_is_waited_for_from_then_on(shards, clock):
    first, second = shards.connections
    await fails(second)
    clock.now += 10 * TIMEOUT_S
    await fails(second)  # the other one serves
    await fails(first)
    await fails(second)
    clock.now += TIMEOUT_S - 1
    await fails(first)
    await fails(second)
    first.up(Stream.HEARTBEAT)
    clock.now += TIMEOUT_S
    await fails(second)  # what was missed before does not count any more
    await fails(first)
    clock.now += TIMEOUT_S
    with pytest.raises(UnreachableError, match="gave up after 600 s") as caught:
        await fails(second)
    assert_one_sentence(caught.value, "no answer")


async def test_a_shard_that_refuses_policies_alone_still_serves(shards, clock):
    first, second = shards.connections
    await fails(first, Stream.PUBLISH, OVERLOADED)
    await fails(second)
    clock.now += TIMEOUT_S - 1
    await fails(first, Stream.PUBLISH, OVERLOADED)
    clock.now += 2 * TIMEOUT_S
    await fails(second)
    assert shards.complete is False  # the last policy is yet to arrive


async def test_a_shard_that_rows_are_kept_for_is_waited_for_from_the_end_of_the_budget_on(shards, clock):
    second, kept = shards.connections[1], [0, 5]
    shards.keep_for([lambda: kept[0], lambda: kept[1]])
    await fails(second)
    clock.now += 10 * TIMEOUT_S
    shards.note_ending()
    await fails(second)
    clock.now += TIMEOUT_S - 1
    await fails(second)
    clock.now += 1
    with pytest.raises(UnreachableError, match="gave up after 600 s"):
        await fails(second)
    kept[1] = 0
    await fails(second)


async def test_a_node_that_is_told_to_stop_tries_on_for_some_seconds_however_long_it_has_waited(
    shards, clock
):
    first, second = shards.connections
    for each in (first, second):
        await fails(each)
    clock.now += TIMEOUT_S - 1
    shards.note_stopping()
    clock.now += first.timing.stopping_s - 0.5
    shards.note_stopping()  # said again while it ends
    for each in (first, second):
        await fails(each)
    clock.now += 0.5
    with pytest.raises(UnreachableError, match="gave up after 3 s"):
        await fails(first)
