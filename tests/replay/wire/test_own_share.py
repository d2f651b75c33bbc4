"""Batches with a share of the agent's own rows, of one service and of shards: each side uniform by itself."""

import numpy as np
import pytest
from nodes.sharding_cases import all_serve, connections_to, link_over, running, shards_serving, take
from replay.wire.services import SCHEMA, promptly, rows_of, serials_of
from scipy import stats

from dase_grpc.errors import MalformedError
from dase_grpc.replay.buffer.sampling import Sampling
from dase_grpc.replay.client.sample import Sampler

SURE = 1e-4
"""Probability of a false alarm; seeds are fixed, so a test that passes goes on to."""

OWNERS = [(0, 9), (1, 150), (2, 31)]
"""How many rows each of three agents has: very unequal."""


def fill(services) -> None:
    """Deals the rows of all agents out to the shards, unevenly, numbered through."""
    first, rng = 1, np.random.default_rng(2)
    for agent_id, count in OWNERS:
        uneven = np.arange(1, len(services) + 1)
        shard = rng.choice(len(services), size=count, p=uneven / uneven.sum())
        for index, service in enumerate(services):
            rows = [rows_of(n, n, agent_id) for n in first + np.flatnonzero(shard == index)]
            if rows:
                service.run.store.append("past the wire", 1, np.concatenate(rows), agent_id=agent_id)
        first += count


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("share", [0.5, 0.1])
async def test_own_rows_and_others_are_drawn_uniformly_each_by_itself(shards, share):
    async with shards_serving(shards) as services:
        connections = await connections_to(services)
        fill(services)
        link = link_over(connections, batch_size=32, sampling=Sampling(own_share=share))
        async with running(link, connections):
            await all_serve(link)
            batches = await take(link, 300)
    own = np.array([(SCHEMA.agent_ids(batch) == 0).sum() for batch in batches])
    assert set(own.tolist()) == {int(32 * share), -int(-32 * share // 1)}
    assert own.mean() == pytest.approx(32 * share, abs=4 * 0.5 / np.sqrt(len(batches)))
    drawn = np.bincount([n for batch in batches for n in serials_of(batch)], minlength=191)[1:]
    assert stats.chisquare(drawn[:9]).pvalue > SURE
    assert stats.chisquare(drawn[9:]).pvalue > SURE


@pytest.mark.parametrize("shards", [1, 2])
async def test_where_one_side_is_empty_the_other_fills_in(shards):
    async with shards_serving(shards) as services:
        connections = await connections_to(services)
        for number, service in enumerate(services):
            service.run.store.append("w", 1, rows_of(1, 5 + number, 1), agent_id=1)
        link = link_over(connections, batch_size=8, sampling=Sampling(own_share=0.5))
        async with running(link, connections):
            await all_serve(link)
            batches = await take(link, 5)
    assert {batch.shape for batch in batches} == {(8, SCHEMA.width)}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"own_share": 1.5}, "from 0 to 1, not 1.5"),
        ({"own_share": float("nan")}, "from 0 to 1, not nan"),
        ({"own_share": 0.5, "own_rows_only": True}, "has no own_share"),
    ],
)
async def test_a_share_that_is_none_is_refused(service, options, sentence):
    sampler = Sampler(await service.target(), batch_size=4, sampling=Sampling(**options))
    with pytest.raises(MalformedError, match=sentence):
        await sampler.open(credits=1)


async def test_several_batches_of_a_frame_have_their_share_each(service):
    target = await service.target()
    service.fill(40, agent_id=1)
    service.fill(4, agent_id=0)
    sampling = Sampling(own_share=0.3)
    sampler = await Sampler(target, batch_size=10, sampling=sampling, batches_per_frame=8).open(credits=8)
    batches = [await promptly(sampler.next()) for _ in range(8)]
    assert [int((SCHEMA.agent_ids(batch.rows) == 0).sum()) for batch in batches] == [3] * 8
