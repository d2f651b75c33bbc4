"""Batches drawn by priorities over the wire: what frames say of them, and TD errors that come back."""

import asyncio
from collections import deque

import numpy as np
import pytest
from nodes.sharding_cases import all_serve, connections_to, link_over, running, shards_serving
from replay.wire.services import SCHEMA, promptly, rows_of, serials_of
from scipy import stats

from dase_grpc.errors import DaseError, MalformedError, StaleLeaseError
from dase_grpc.pace import Pace
from dase_grpc.replay.buffer.priorities import Prioritisation
from dase_grpc.replay.buffer.sampling import Sampling
from dase_grpc.replay.client.priorities import taken
from dase_grpc.replay.client.sample import Pacing, Sampler
from dase_grpc.replay.wire.v1 import replay_pb2

SURE = 1e-4
HOW = Prioritisation(alpha=0.7, epsilon=0.01, uniform=0.2)
PLAIN = Sampling(prioritisation=HOW)


def masses_of(errors: dict[int, float], *, count: int) -> np.ndarray:
    """The masses of rows 1, ..., count, of which some were told errors, the others being new."""
    largest = max(1.0, *errors.values())
    given = np.array([errors.get(serial) for serial in range(1, count + 1)], object)
    return np.array(
        [(HOW.epsilon + (largest if each is None else each)) ** HOW.alpha for each in given], float
    )


async def sampler_of(service, sampling=PLAIN, *, rows=0):
    """A stream of agent 0, which has stored so many rows by then."""
    target = await service.target()
    if rows:
        service.fill(rows)
    return await Sampler(target, batch_size=8, sampling=sampling).open(credits=0)


async def batch_of(sampler):
    await sampler.grant(1)
    return await promptly(sampler.next())


def numbers_of(serials) -> np.ndarray:
    return np.array(serials, np.int64) - 1  # rows are stored in the order of their serials


async def tell(sampler, drawing, errors: dict[int, float], *, incarnation: str | None = None) -> None:
    message = replay_pb2.Priorities(
        incarnation=drawing.incarnation if incarnation is None else incarnation,
        numbers=numbers_of(list(errors)).tobytes(),
        errors=np.array(list(errors.values()), np.float32).tobytes(),
    )
    await sampler.tell(deque([message]))


async def test_a_batch_says_how_its_rows_were_drawn_and_errors_change_what_is_drawn_next(service):
    sampler = await sampler_of(service, rows=40)
    first = await batch_of(sampler)
    assert first.drawing.numbers.tolist() == numbers_of(serials_of(first.rows)).tolist()
    assert first.drawing.probabilities == pytest.approx(np.full(8, 1 / 40), rel=1e-5)
    errors = {3: 20.0, 7: 0.0, 8: -5.0}
    await tell(sampler, first.drawing, errors)
    batches = [await batch_of(sampler) for _ in range(400)]
    masses = masses_of(
        {serial: abs(error) for serial, error in errors.items()}
        | {serial: 1.0 for serial in range(1, 41) if serial not in errors},
        count=40,
    )
    chances = (1 - HOW.uniform) * masses / masses.sum() + HOW.uniform / 40
    drawn = np.bincount([n for batch in batches for n in serials_of(batch.rows)], minlength=41)[1:]
    assert stats.chisquare(drawn, chances * drawn.sum()).pvalue > SURE
    for batch in batches[:20]:
        assert batch.drawing.probabilities == pytest.approx(chances[batch.drawing.numbers], rel=1e-4)
    (side,), told = batches[-1].drawing.sides, batches[-1].drawing
    assert (side.present, side.mass) == (40, pytest.approx(masses.sum(), rel=1e-5))
    assert told.largest == pytest.approx(masses.max())
    assert told.ignored == 0


async def test_what_is_told_in_vain_is_counted(service):
    sampler = await sampler_of(service, rows=5)
    drawing = (await batch_of(sampler)).drawing
    await tell(sampler, drawing, {1: 1.0, 9: 1.0, 2: float("nan")})
    assert (await batch_of(sampler)).drawing.ignored == 2
    await tell(sampler, drawing, {1: 30.0}, incarnation="before")
    later = (await batch_of(sampler)).drawing
    assert (later.ignored, later.largest) == (3, pytest.approx(1.01**HOW.alpha))
    assert service.run.store.priorities[0].ignored == {"evicted": 1, "not_finite": 1, "restart": 1}


def test_errors_of_many_large_batches_go_in_portions_that_a_message_can_hold():
    each = replay_pb2.Priorities(numbers=bytes(8 * 30_000), errors=bytes(4 * 30_000))
    told = deque([each] * 7)
    portions = list(taken(told))
    assert [len(portion) for portion in portions] == [2, 2, 2, 1]
    assert all(replay_pb2.SampleRequest(priorities=portion).ByteSize() < 2**20 for portion in portions)
    assert not told


async def test_several_batches_of_a_frame_are_told_apart(service):
    target = await service.target()
    service.fill(30)
    sampler = await Sampler(target, batch_size=5, sampling=PLAIN, batches_per_frame=4).open(credits=4)
    batches = [await promptly(sampler.next()) for _ in range(4)]
    for batch in batches:
        assert batch.drawing.numbers.tolist() == numbers_of(serials_of(batch.rows)).tolist()


async def test_priorities_outlive_a_stream_and_end_with_one_that_draws_otherwise(service):
    target = await service.target()
    service.fill(5)

    async def stream(sampling=PLAIN):
        return await Sampler(target, batch_size=8, sampling=sampling).open(credits=0)

    sampler = await stream()
    await tell(sampler, (await batch_of(sampler)).drawing, {2: 50.0})
    assert (await batch_of(sampler)).drawing.largest > 10
    sampler.cancel()
    again = await stream()
    assert (await batch_of(again)).drawing.largest > 10
    again.cancel()
    uniform = await stream(Sampling())
    assert (await batch_of(uniform)).drawing is None
    assert service.run.store.priorities == {}


@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        (Sampling(), {}),
        (PLAIN, {"numbers": b"1234567"}),
        (PLAIN, {"errors": b"12345678"}),
    ],
    ids=["uniform", "no whole number", "more errors than numbers"],
)
async def test_priorities_that_a_stream_cannot_take_are_refused(service, sampling, fields):
    sampler = await sampler_of(service, sampling, rows=5)
    told = replay_pb2.Priorities(**{"numbers": b"12345678", "errors": b"1234", **fields})
    await sampler.tell(deque([told]))
    await sampler.grant(1)
    with pytest.raises(MalformedError, match="priorities are for a stream"):
        await promptly(sampler.next())


@pytest.mark.parametrize(
    "how",
    [
        (-0.1, 0.0, 0.0),
        (1.1, 0.0, 0.0),
        (0.5, -1.0, 0.0),
        (0.5, float("inf"), 0.0),
        (0.5, 0.0, 2.0),
        (np.nan, 0, 0),
    ],
)
async def test_a_prioritisation_that_is_none_is_refused(service, how):
    with pytest.raises(MalformedError, match="priorities take"):
        await sampler_of(service, Sampling(prioritisation=Prioritisation(*how)))


def drawn_of(masses: dict[int, float], these: list[int], among: list[int]) -> float:
    """How likely one of these is to be drawn from among those."""
    share = sum(masses[n] for n in these) / sum(masses[n] for n in among)
    return (1 - HOW.uniform) * share + HOW.uniform * len(these) / len(among)


@pytest.mark.slow
@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize("shards", [1, 3])
async def test_errors_of_a_batch_reach_the_services_that_drew_it_and_likelihoods_are_those_of_the_whole(
    shards, share
):
    sampling = Sampling(own_share=share, prioritisation=HOW)
    owners = {serial: serial % 4 // 3 for serial in range(1, 61)}  # every fourth is another agent's
    async with shards_serving(shards) as services:
        connections = await connections_to(services)
        for index, service in enumerate(services):
            for agent in (0, 1):
                mine = [n for n, owner in owners.items() if owner == agent and n % len(services) == index]
                rows = np.concatenate([rows_of(n, n, agent) for n in mine])
                service.run.store.append("w", 1, rows, agent_id=agent)
        link = link_over(connections, batch_size=32, sampling=sampling)
        async with running(link, connections):
            await all_serve(link)
            errors = {serial: float(serial % 7) for serial in owners}
            for _ in range(60):
                rows, _ = await promptly(asyncio.to_thread(link.next))
                assert (link.prioritised.likelihood > 0).all()
                link.prioritised.tell(np.array([errors[n] for n in serials_of(rows)], np.float32))
            everywhere = [each.run.store.priorities[0] for each in services]
            told = np.sort(HOW.masses(np.array(list(errors.values()), np.float32)))
            await promptly(asyncio.to_thread(link.next))

            def settled() -> bool:
                return np.allclose(np.sort(np.concatenate([each.state()[0] for each in everywhere])), told)

            for _ in range(40):
                if settled():
                    break
                rows, _ = await promptly(asyncio.to_thread(link.next))
                link.prioritised.tell(np.array([errors[n] for n in serials_of(rows)], np.float32))
            assert settled()
            for _ in range(20):  # batches that were drawn before the last errors came
                rows, _ = await promptly(asyncio.to_thread(link.next))
                link.prioritised.tell(np.array([errors[n] for n in serials_of(rows)], np.float32))
            rows, _ = await promptly(asyncio.to_thread(link.next))
            masses = {n: float(HOW.masses(np.array([e], np.float32))[0]) for n, e in errors.items()}
            for serial, likelihood in zip(serials_of(rows), link.prioritised.likelihood, strict=True):
                side = [n for n in owners if share is None or owners[n] == owners[serial]]
                here = [n for n in side if n % shards == serial % shards]
                chance = drawn_of(masses, here, side) * drawn_of(masses, [serial], here)
                assert likelihood == pytest.approx(chance * len(side), rel=1e-3)


async def test_a_stream_with_a_pace_takes_errors_too(service):
    target = await service.target()
    service.fill(20)
    pacing = Pacing(Pace(1.0, 4, first_steps=1), used=0, held=0)
    sampler = await Sampler(target, batch_size=8, sampling=PLAIN).open(credits=1, pacing=pacing)
    first = await promptly(sampler.next())
    await tell(sampler, first.drawing, {1: 50.0})
    await sampler.grant(1, used=1)
    assert (await promptly(sampler.next())).drawing.largest == pytest.approx(50.01**HOW.alpha)


async def test_a_stream_that_draws_otherwise_ends_the_priorities_of_those_before_it(service):
    target = await service.target()
    service.fill(5)
    before = await Sampler(target, batch_size=8, sampling=PLAIN).open(credits=1)
    await promptly(before.next())
    other = Sampling(prioritisation=Prioritisation(alpha=1.0, epsilon=0.1, uniform=0.0))
    after = await Sampler(target, batch_size=8, sampling=other).open(credits=1)
    await promptly(after.next())
    await before.grant(1)
    with pytest.raises(MalformedError, match="draws in another way"):
        await promptly(before.next())


async def test_who_has_lost_the_lease_tells_nothing(service):
    target = await service.target()
    service.fill(5)
    sampler = await Sampler(target, batch_size=8, sampling=PLAIN).open(credits=1)
    drawing = (await promptly(sampler.next())).drawing
    await service.client.leave(target.member, reason="test")
    assert service.run.store.priorities == {}
    await tell(sampler, drawing, {1: 50.0})
    with pytest.raises(StaleLeaseError):
        await promptly(sampler.next())


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(own_share=0.5)])
async def test_a_service_that_draws_otherwise_than_asked_for_is_noticed(service, monkeypatch, sampling):
    monkeypatch.setattr("dase_grpc.replay.service.sample._sampling", lambda header: Sampling())
    target = await service.target()
    service.fill(5)
    service.fill(5, agent_id=1)
    sampler = await Sampler(target, batch_size=64, sampling=sampling).open(credits=1)
    with pytest.raises(DaseError, match="older than this node"):
        await promptly(sampler.next())


async def test_sides_are_drawn_from_once_they_are_known_and_one_that_was_empty_may_fill():
    sampling = Sampling(own_share=0.5, prioritisation=HOW)
    async with shards_serving(2) as services:
        connections = await connections_to(services)
        for service in services:
            service.run.store.append("w", 1, rows_of(1, 20, 0), agent_id=0)
        link = link_over(connections, batch_size=32, sampling=sampling)
        async with running(link, connections):
            await all_serve(link)
            rows, _ = await promptly(asyncio.to_thread(link.next))
            assert (SCHEMA.agent_ids(rows) == 0).all()
            assert (link.prioritised.likelihood > 0).all()
            for service in services:
                service.run.store.append("v", 1, rows_of(1, 20, 1), agent_id=1)

            async def has_others() -> bool:
                rows, _ = await promptly(asyncio.to_thread(link.next))
                assert (link.prioritised.likelihood > 0).all()
                return bool((SCHEMA.agent_ids(rows) == 1).any())

            while not await has_others():
                pass
