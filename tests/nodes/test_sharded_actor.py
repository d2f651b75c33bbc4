"""An actor on a replay of two shards."""

import pytest
from nodes.acting_cases import FakeLearner, act, acting, actor_options
from nodes.running import ended
from nodes.sharding_cases import shards_serving
from replay.wire.services import eventually

from dase_grpc.errors import ConfigError
from dase_grpc.replay.wire.addresses import ReplayPlace


def inserted(service):
    return service.run.store.traffic.inserted_total if service.run.opened else 0


def options_for(services):
    place = ReplayPlace(tuple(service.address for service in services))
    return actor_options(services[0].address, replay=place)


@pytest.mark.slow
async def test_an_actor_feeds_every_shard_in_turn_and_leaves_each():
    async with shards_serving(2, capacity=100_000) as services:
        learners = [await FakeLearner.join(service) for service in services]
        await learners[0].publish(30)
        async with acting(options_for(services[::-1])) as (task, stop):
            await eventually(lambda: min(inserted(service) for service in services) > 50)
            before = [inserted(service) for service in services]  # both take part from here on
            await eventually(
                lambda: all(
                    inserted(each) > count + 100 for each, count in zip(services, before, strict=True)
                )
            )
            assert [len(service.run.attendance.all(0.0)) for service in services] == [1, 1]
            await ended(task, stop)
        assert [service.run.attendance.all(0.0) for service in services] == [[], []]
        for store in (service.run.store for service in services):
            (writer,) = store._committed
            await eventually(lambda store=store, writer=writer: store.watch.gone([writer], 0.0) == [writer])


@pytest.mark.slow
async def test_an_actor_goes_on_with_one_shard_while_the_other_is_away():
    async with shards_serving(2, capacity=100_000) as services:
        learners = [await FakeLearner.join(service) for service in services]
        await learners[0].publish(30)
        async with acting(options_for(services)) as (task, _):
            await eventually(lambda: min(inserted(service) for service in services) > 50)
            await services[1].server.stop(None)
            before = inserted(services[0])
            await eventually(lambda: inserted(services[0]) > before + 200)
            assert not task.done()


async def test_an_actor_that_is_told_of_one_shard_of_two_is_refused():
    async with shards_serving(2) as services:
        await FakeLearner.join(services[0])
        with pytest.raises(ConfigError, match="this replay is shard 0/2"):
            await act(options_for(services[:1]))
