"""A link to several shards: rows go out in turn and once, batches are uniform over all, one may be away."""

import asyncio
import time
from itertools import chain

import numpy as np
import pytest
from nodes.sharding_cases import (
    all_serve,
    connections_to,
    link_over,
    rows_until_each_has_one,
    running,
    shards_serving,
    store,
    take,
)
from replay.wire.services import SCHEMA, eventually, promptly, rows_of, serials_of
from scipy import stats

from dase_grpc.errors import StaleLeaseError
from dase_grpc.progress import Progress
from dase_grpc.replay.buffer.sampling import Sampling
from dase_grpc.replay.client.connection import Away, Outage
from dase_grpc.replay.service.sample import Batches

SURE = 1e-4
"""Probability of a false alarm; seeds are fixed, so a test that passes goes on to."""


def fill(services, sizes, *, agent_id=0):
    """Numbers the rows of all shards through, so that each is known by its number."""
    first = 1
    for service, size in zip(services, sizes, strict=True):
        rows = rows_of(first, first + size - 1, agent_id, SCHEMA)
        service.run.store.append("past the wire", 1, rows, agent_id=agent_id)
        first += size


@pytest.mark.slow
async def test_rows_are_spread_over_the_shards_and_each_is_stored_once():
    async with shards_serving(3) as services:
        shards = await connections_to(services)
        link = link_over(shards)
        async with running(link, shards) as jobs:
            before = await rows_until_each_has_one(link, services)
            first_held = [len(each.stored()) for each in services]  # streams do not open at one moment
            for row in rows_of(before + 1, before + 60):
                await store(link, [row])
                await eventually(lambda: link.unacknowledged == 0)
            link.no_more_rows()
            await promptly(jobs["insert"])
        held = [each.stored() for each in services]
    assert sorted(chain(*held)) == list(range(1, before + 61))
    assert [len(each) - first for each, first in zip(held, first_held, strict=True)] == [20, 20, 20]


@pytest.mark.parametrize("sizes", [(300, 100), (40, 10, 150, 80)])
async def test_batches_of_a_learner_are_uniform_over_the_rows_of_all_shards(sizes):
    async with shards_serving(len(sizes)) as services:
        shards = await connections_to(services)
        fill(services, sizes)
        link = link_over(shards, batch_size=64)
        async with running(link, shards):
            await all_serve(link)
            batches = await take(link, 120)
    serials = [serial for batch in batches for serial in serials_of(batch)]
    counts = np.bincount(serials, minlength=sum(sizes) + 1)[1:]
    assert {batch.shape for batch in batches} == {(64, SCHEMA.width)}
    assert len(counts) == sum(sizes)
    assert stats.chisquare(counts).pvalue > SURE
    shares = [part.sum() for part in np.split(counts, np.cumsum(sizes)[:-1])]
    assert stats.chisquare(shares, np.array(sizes) / sum(sizes) * len(serials)).pvalue > SURE


async def test_own_rows_are_drawn_uniformly_over_the_shards_and_nobody_elses():
    async with shards_serving(2) as services:
        shards = await connections_to(services)
        fill(services, (30, 10))
        for service in services:  # more of another agent's where there are fewer of its own
            others = rows_of(1, 200, 1)
            service.run.store.append("other", 1, others[: 200 if service is services[1] else 5], agent_id=1)
        link = link_over(shards, batch_size=32, sampling=Sampling(own_rows_only=True))
        async with running(link, shards):
            await all_serve(link)
            batches = await take(link, 100)
    rows = np.concatenate(batches)
    assert (SCHEMA.agent_ids(rows) == 0).all()
    assert stats.chisquare(np.bincount(serials_of(rows), minlength=41)[1:]).pvalue > SURE


async def test_the_first_batch_waits_for_min_size_over_all_shards():
    async with shards_serving(2, min_size=10) as services:
        shards = await connections_to(services)
        fill(services, (4, 5))
        link = link_over(shards)
        async with running(link, shards):
            asking = asyncio.ensure_future(asyncio.to_thread(link.next))
            await eventually(lambda: link._fetcher.waiting is not None)
            await eventually(lambda: "(9 of 10) in 2 shards" in (link._fetcher.waiting or ""))
            await store(link, rows_of(10, 10))
            await promptly(asking)
            assert link._fetcher.waiting is None


def drawn_from(services):
    return sum(each.run.store.traffic.sampled_total for each in services)


async def test_never_more_than_prefetch_batches_are_drawn_ahead_of_their_use():
    async with shards_serving(2) as services:
        shards = await connections_to(services)
        fill(services, (50, 50))
        link = link_over(shards, prefetch=3)
        async with running(link, shards):
            for used in range(1, 6):
                await take(link, 1)
                await eventually(lambda n=used: drawn_from(services) == 8 * (n + 3))
                await services[0].round_trips()
                assert drawn_from(services) == 8 * (used + 3)


async def test_a_shard_that_has_nothing_any_more_is_passed_over():
    async with shards_serving(2) as services:
        shards = await connections_to(services)
        fill(services, (30, 0))
        link = link_over(shards)
        async with running(link, shards):
            part = link._fetcher._parts[1]
            await eventually(lambda: part.serves)
            part._heard, part._known = part.connection.buffer, (1_000,)  # what it was last heard to hold
            batches = await take(link, 20)
    assert all(set(serials_of(batch)) <= set(range(1, 31)) for batch in batches)


def break_streams(service):
    """Ends the streams of a service that goes on, as a network may."""
    service.replay.streams.drain()
    service.replay.streams._draining = False


async def test_rows_that_a_broken_stream_had_are_sent_again_to_the_same_shard_and_stored_once(monkeypatch):
    monkeypatch.setattr(
        "dase_grpc.replay.client.link.GATHERED_ROWS", 1
    )  # many chunks, so that both have some
    async with shards_serving(2) as services:
        shards = await connections_to(services)
        link = link_over(shards)
        async with running(link, shards) as jobs:
            before = await rows_until_each_has_one(link, services)
            for number, first in enumerate(range(before + 1, before + 401, 40)):
                await store(link, rows_of(first, first + 39))
                break_streams(services[number % 2])  # whatever has been acknowledged by now
            link.no_more_rows()
            await promptly(jobs["insert"])
        held = [each.stored() for each in services]
    assert sorted(chain(*held)) == list(range(1, before + 401))
    assert link.unacknowledged == 0


async def test_a_shard_that_is_away_costs_neither_rows_nor_batches_of_the_others():
    async with shards_serving(3) as services:
        shards = await connections_to(services)
        fill(services, (30, 30, 30))
        link = link_over(shards)
        async with running(link, shards):
            await all_serve(link)
            await take(link, 5)
            await services[1].server.stop(None)
            await eventually(lambda: shards.connections[1].outage is not None)
            await eventually(lambda: not link._fetcher._parts[1].serves)
            await take(link, 2)  # may still have rows of before
            batches = await take(link, 30)
            await store(link, rows_of(100, 160))
            await eventually(lambda: link.unacknowledged == 0)
            assert shards.outage is None
    drawn = {serial for batch in batches for serial in serials_of(batch)}
    assert not drawn & set(range(31, 61))
    assert drawn & set(range(1, 31))
    assert drawn & set(range(61, 91))


async def test_rows_that_a_silent_shard_owes_are_drawn_from_the_others(monkeypatch):
    async with shards_serving(2) as services:
        shards = await connections_to(services)
        fill(services, (30, 30))
        link = link_over(shards)
        silent = asyncio.Event()
        send = Batches.send

        async def send_late(self, size, **options):
            if self._run is services[1].run:
                await silent.wait()
            await send(self, size, **options)

        monkeypatch.setattr(Batches, "send", send_late)
        async with running(link, shards):
            await all_serve(link)
            asking = asyncio.ensure_future(asyncio.to_thread(link.next))
            owed = link._fetcher._parts[1]._owed
            await eventually(lambda: len(owed) == 2)
            shards.connections[1].up = lambda stream: None  # it answers nothing any more
            shards.connections[1].outage = Outage(time.monotonic() - 60, Away.UNREACHABLE)
            rows, size = await promptly(asking)
            silent.set()
    assert set(serials_of(rows)) <= set(range(1, 31))
    assert size == 60


async def test_a_learner_that_is_fenced_at_one_shard_ends():
    async with shards_serving(2) as services:
        shards = await connections_to(services)
        link = link_over(shards)
        member = shards.connections[1].target.member
        await services[1].client.leave(member, reason="another node has it")
        with pytest.raises(StaleLeaseError, match="fenced off"):
            await promptly(shards.heartbeats(Progress))
        with pytest.raises(StaleLeaseError, match="fenced off"):
            await promptly(link.insert_rows())
