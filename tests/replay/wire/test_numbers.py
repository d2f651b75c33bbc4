"""Sample streams that read in place: numbers, the same rows, and again what was overwritten."""

import asyncio

import grpc
import pytest
from nodes.sharding_cases import connections_to, link_over, running, shards_serving, take
from replay.wire.services import (
    answers,
    eventually,
    insert,
    promptly,
    refusal,
    rows_of,
    sample_header,
    sent,
    serials_of,
    serving,
)

from dase_grpc.errors import MalformedError
from dase_grpc.pace import Pace
from dase_grpc.replay.buffer import ring_file
from dase_grpc.replay.buffer.priorities import Prioritisation
from dase_grpc.replay.buffer.sampling import Sampling
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.ring_reader import RingReader
from dase_grpc.replay.client.sample import Pacing, Sampler
from dase_grpc.replay.wire.v1 import replay_pb2

INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT
PRIORITISED = Prioritisation(alpha=0.7, epsilon=0.01, uniform=0.2)
WAYS = {
    "uniform": Sampling(),
    "own rows": Sampling(own_rows_only=True),
    "own share": Sampling(own_share=0.5),
    "prioritised": Sampling(prioritisation=PRIORITISED),
    "prioritised, own share": Sampling(own_share=0.5, prioritisation=PRIORITISED),
}


async def in_place(target, **changes):
    """A stream of 8 rows a batch that has found the ring; one batch, which came as rows, is taken."""
    sampler = await Sampler(target, **{"batch_size": 8, "in_place": True, **changes}).open(credits=1)
    await promptly(sampler.next())
    assert sampler.ring is not None
    return sampler


async def batch_of(sampler):
    await sampler.grant(1)
    return await promptly(sampler.next())


def filled(service, count=40):
    service.fill(count)
    service.run.store.append("other", 1, rows_of(count + 1, 2 * count, 1), agent_id=1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("together", [1, 4])
async def test_the_same_rows_come_in_place_as_over_the_stream(way, together):
    drawn = []
    for here in (True, False):
        async with serving() as service:
            target = await service.target()
            filled(service)
            how = {"batch_size": 8, "sampling": WAYS[way], "batches_per_frame": together}
            sampler = await Sampler(target, in_place=here, **how).open(credits=1)
            batches = [await promptly(sampler.next())]
            await sampler.grant(9)
            batches += [await promptly(sampler.next()) for _ in range(9)]
            assert (sampler.ring is not None) == here
            assert service.run.in_place[0] == here
            told = [each.drawing and (each.drawing.numbers.tolist(), each.drawing.sides) for each in batches]
            counted = dict(service.run.store.traffic.sampled)
            drawn.append(([serials_of(each.rows) for each in batches], told, counted))
            assert not any(each.rows.flags.writeable for each in batches)
            sampler.cancel()
    assert drawn[0] == drawn[1]


async def test_a_stream_that_does_not_ask_for_it_is_sent_rows_and_no_ring(service):
    target = await service.target()
    service.fill(10)
    call = await sent(service.stub.Sample(), sample_header(target, credits=2))
    await call.done_writing()
    assert all(answer.frame.rows and not answer.frame.numbers for answer in await answers(call))


async def test_rows_come_over_the_stream_where_the_ring_is_not_found(service, monkeypatch, caplog):
    caplog.set_level("INFO", "dase")
    handle = ring_file.RingHandle
    monkeypatch.setattr(handle, "state_fd", property(lambda self: 2**20))
    target = await service.target()
    service.fill(10)
    sampler = await Sampler(target, batch_size=8, in_place=True).open(credits=1)
    for _ in range(2):
        assert len((await batch_of(sampler)).rows) == 8
    assert sampler.ring is None
    assert service.run.in_place[0] == 0
    assert "cannot be read in place" in caplog.text


async def test_rows_come_over_the_stream_where_the_service_has_no_ring_to_offer(monkeypatch):
    monkeypatch.setattr(ring_file, "can_map", lambda: False)
    async with serving() as service:
        target = await service.target()
        service.fill(10)
        sampler = await Sampler(target, batch_size=8, in_place=True).open(credits=1)
        assert len((await batch_of(sampler)).rows) == 8
        assert sampler.ring is None


async def test_a_batch_that_was_overwritten_comes_without_rows_and_again_with_them(service):
    target, store = await service.target(), service.run.store
    service.fill(40)
    sampler = await in_place(target)
    await sampler.grant(1)
    await eventually(lambda: store.traffic.sampled_total == 2 * 8)
    while store.ring.total < store.ring.slots + 40:  # all that was there is overwritten
        store.ring.append(rows_of(41, 1_040))
    lost = await promptly(sampler.next())
    assert (len(lost.rows), lost.overwritten) == (0, True)
    await sampler.grant(0, again=1)
    assert min(serials_of((await promptly(sampler.next())).rows)) > 40


@pytest.mark.parametrize("pacing", [None, Pacing(Pace(1.0, 4, first_steps=2), used=0, held=0)])
async def test_what_is_asked_for_again_waits_while_there_is_nothing_to_draw_from(service, pacing):
    """Another agent's rows have overwritten what was drawn, and taken the place of all of the agent's own."""
    target, store = await service.target(), service.run.store
    await service.target(1)
    service.fill(3)
    sampler = Sampler(target, batch_size=8, sampling=WAYS["own rows"], in_place=True)
    await sampler.open(credits=1, pacing=pacing)
    await promptly(sampler.next())
    await sampler.grant(1, used=1)
    await eventually(lambda: store.traffic.sampled_total == 2 * 8)
    store.append("other", 1, rows_of(1, store.ring.slots + 40, 1), agent_id=1)
    assert (await promptly(sampler.next())).overwritten
    await sampler.grant(0, again=1)
    asking = asyncio.ensure_future(sampler.next())
    await eventually(lambda: sampler.waiting is not None)
    assert "waiting for a transition of agent 0" in (sampler.waiting or "")
    await insert(Inserter(target, writer_id="w"), rows_of(7, 7))
    assert serials_of((await promptly(asking)).rows) == [7] * 8


async def test_what_is_asked_for_again_takes_nothing_from_a_pace(service):
    target = await service.target()
    pace = Pacing(Pace(1.0, 4, first_steps=2), used=0, held=0)
    service.fill(3)
    sampler = await Sampler(target, batch_size=8, in_place=True).open(credits=1, pacing=pace)
    await promptly(sampler.next())
    assert len((await batch_of(sampler)).rows) == 8  # as many updates as 3 steps allow
    await sampler.grant(1, used=2)
    await sampler.grant(0, again=1)
    assert len((await promptly(sampler.next())).rows) == 8
    assert service.run.limiters[0].missing(3) == 1


async def test_no_more_is_asked_for_again_than_came_as_numbers(service):
    target = await service.target()
    service.fill(10)
    sampler = await in_place(target)
    await batch_of(sampler)
    await sampler.grant(0, again=2)
    with pytest.raises(MalformedError, match="2 batches are asked for again, but 1 came as numbers"):
        await promptly(sampler.next())


async def test_numbers_are_not_for_a_stream_that_was_offered_no_ring(service):
    target = await service.target()
    first = sample_header(target)
    call = await sent(service.stub.Sample(), first, replay_pb2.SampleRequest(in_place=True, credits=1))
    assert await refusal(call) == (
        INVALID_ARGUMENT,
        "this Sample stream was offered no ring to read in place",
    )


async def test_a_stream_that_ends_reads_in_place_no_more(service):
    target = await service.target()
    service.fill(10)
    sampler = await in_place(target)
    await batch_of(sampler)
    (agent,) = (await service.client.status()).agents
    assert agent.in_place
    sampler.cancel()
    await eventually(lambda: not service.run.in_place[0])
    (agent,) = (await service.client.status()).agents
    assert not agent.in_place


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_link_reads_in_place_and_draws_again_what_was_overwritten(shards, monkeypatch):
    gather, fates = RingReader.gather, iter([True, False, False, True] * 1_000)
    monkeypatch.setattr(RingReader, "gather", lambda *given: gather(*given) if next(fates) else None)
    async with shards_serving(shards, min_size=1) as services:
        for service in services:
            await service.target(agent_id=1)
            service.fill(50, agent_id=1)
        connections = await connections_to(services)
        link = link_over(connections, in_place=True)
        async with running(link, connections):
            batches = await take(link, 20)
            assert link.reads_in_place
            assert link.overwritten > 0
            assert all(service.run.in_place[0] == 1 for service in services)
        assert all(len(serials_of(rows)) == 8 for rows in batches)


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_link_that_is_told_not_to_reads_no_ring(shards):
    async with shards_serving(shards, min_size=1) as services:
        for service in services:
            await service.target(agent_id=1)
            service.fill(50, agent_id=1)
        connections = await connections_to(services)
        link = link_over(connections)
        async with running(link, connections):
            await take(link, 5)
            assert not link.reads_in_place
            assert all(service.run.in_place[0] == 0 for service in services)
