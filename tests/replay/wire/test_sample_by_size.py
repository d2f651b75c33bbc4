"""Batches asked for by their size, as for a sharded replay: drawn at once, empty where nothing is."""

import pytest
from replay.wire.services import SCHEMA, promptly, serials_of, serving

from dase_grpc.errors import MalformedError, StaleLeaseError
from dase_grpc.replay.buffer.sampling import Sampling
from dase_grpc.replay.client.sample import Sampler


async def sampler_of(service, *, batch_size=8, **options):
    return await Sampler(await service.target(), batch_size=batch_size, **options).open(credits=0)


async def test_batches_come_in_the_sizes_asked_for_whatever_min_size_says():
    async with serving(min_size=100) as service:
        sampler = await sampler_of(service)
        service.fill(10)
        await sampler.ask([3, 8, 1])
        await sampler.ask([5])
        batches = [await promptly(sampler.next()) for _ in range(4)]
    assert [batch.rows.shape for batch in batches] == [(size, SCHEMA.width) for size in (3, 8, 1, 5)]
    assert {(batch.buffer_size, batch.drawn_from) for batch in batches} == {(10, 10)}
    assert all(set(serials_of(batch.rows)) <= set(range(1, 11)) for batch in batches)


async def test_where_there_is_nothing_to_draw_from_the_batch_is_empty(service):
    sampler = await sampler_of(service)
    await sampler.ask([4])
    batch = await promptly(sampler.next())
    assert (len(batch.rows), batch.buffer_size, batch.drawn_from) == (0, 0, 0)


async def test_of_own_rows_it_says_how_many_there_are(service):
    sampler = await sampler_of(service, sampling=Sampling(own_rows_only=True))
    service.fill(6, agent_id=1)
    await sampler.ask([4])
    empty = await promptly(sampler.next())
    service.fill(3, agent_id=0)
    await sampler.ask([4])
    own = await promptly(sampler.next())
    assert (len(empty.rows), empty.buffer_size, empty.drawn_from) == (0, 6, 0)
    assert (len(own.rows), own.buffer_size, own.drawn_from) == (4, 9, 3)
    assert (SCHEMA.agent_ids(own.rows) == 0).all()


@pytest.mark.parametrize("sizes", [[0], [9], [1] * 1_025])
async def test_a_size_that_the_stream_does_not_have_is_refused(service, sizes):
    sampler = await sampler_of(service)
    service.fill(5)
    await sampler.ask(sizes)
    with pytest.raises(MalformedError, match=r"by size"):
        await promptly(sampler.next())


async def test_a_stale_lease_draws_nothing(service):
    target = await service.target()
    sampler = await Sampler(target, batch_size=8).open(credits=0)
    service.fill(5)
    await service.client.leave(target.member, reason="test")
    await sampler.ask([2])
    with pytest.raises(StaleLeaseError):
        await promptly(sampler.next())


async def test_with_an_own_share_it_comes_with_as_many_own_rows_as_asked_for(service):
    sampler = await sampler_of(service, sampling=Sampling(own_share=0.25))
    service.fill(30, agent_id=1)
    service.fill(10, agent_id=0)
    await sampler.ask([8, 5, 4], own_rows=[3, 0, 4])
    await sampler.ask([8])
    batches = [await promptly(sampler.next()) for _ in range(4)]
    assert [int((SCHEMA.agent_ids(batch.rows) == 0).sum()) for batch in batches] == [3, 0, 4, 2]
    assert {(batch.buffer_size, batch.drawn_from) for batch in batches} == {(40, 10)}


@pytest.mark.parametrize(
    ("options", "sizes", "own"),
    [
        ({"own_share": 0.5}, [4], [5]),
        ({"own_share": 0.5}, [4, 4], [2]),
        ({"own_share": None}, [4], [2]),
    ],
    ids=["more own rows than rows", "not for each batch", "without a share"],
)
async def test_own_rows_that_the_stream_cannot_have_are_refused(service, options, sizes, own):
    sampler = await sampler_of(service, sampling=Sampling(**options))
    service.fill(5)
    await sampler.ask(sizes, own_rows=own)
    with pytest.raises(MalformedError, match=r"own_rows says"):
        await promptly(sampler.next())
