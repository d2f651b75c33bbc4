"""Batches asked for by their size, as for a sharded replay: drawn at once, empty where nothing is."""

import pytest
from replay.wire.services import SCHEMA, promptly, serials_of, serving

from dase_grpc.errors import MalformedError, StaleLeaseError
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
    sampler = await sampler_of(service, own_rows_only=True)
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
