"""A learner node on a replay of two shards: it joins both, goes on when one is away, and is one agent."""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from contracts.sentences import assert_one_sentence
from nodes.acting_cases import point_goal
from nodes.learning_cases import FOREVER, QUICK, learner_options, learning, status_of, train, until_trained
from nodes.running import ended, replay_node
from nodes.sharding_cases import shards_serving
from patience import PATIENCE_S
from replay.wire.services import eventually, free_port, promptly

from dase_grpc.errors import AgentTakenError, ConfigError, UnreachableError
from dase_grpc.progress import Progress
from dase_grpc.replay.buffer.sharding import Shard
from dase_grpc.replay.wire.addresses import Address, ReplayPlace

ON = {"train__steps": FOREVER, "eval__every": 100_000, "replay__capacity": 10_000}
SERVED = {"capacity": 10_000, "min_size": 20}


def options_for(shards, run_dir, **changes):
    """A learner's options; `shards` are services or nodes, in the order in which they are named."""
    place = ReplayPlace(tuple(shard.address for shard in shards))
    return learner_options(shards[0].address, run_dir, **{**ON, "replay": place, **changes})


def leases(service):
    return [(lease.agent_id, lease.state(service.clock())) for lease in service.run.leases.all()]


async def refusal(error, options):
    with pytest.raises(error) as caught:
        await train(options)
    return caught.value


@pytest.mark.slow
async def test_a_learner_trains_on_two_shards_whatever_order_they_are_named_in(tmp_path):
    async with shards_serving(2, **SERVED) as services:
        options = options_for(services[::-1], tmp_path / "run", train__steps=200, train__agents=4, agent_id=3)
        await train(options)
    traffic = [service.run.store.traffic for service in services]
    assert [leases(service) for service in services] == [[(3, "left")]] * 2
    assert sum(each.inserted_total for each in traffic) == 200
    assert all(each.inserted_total > 50 for each in traffic)
    assert all(each.sampled_total > 500 for each in traffic)
    assert [service.run.leases.all()[0].progress.step for service in services] == [200, 200]
    assert "capacity = 20000" in (tmp_path / "run" / "run.toml").read_text(encoding="utf-8")


async def test_shards_that_are_missing_or_doubled_are_refused_in_one_sentence(tmp_path):
    async with shards_serving(2, **SERVED) as services:
        alone = await refusal(ConfigError, options_for(services[:1], tmp_path / "run"))
        assert_one_sentence(alone, "this replay is shard 0/2 of run 'the-run'; name the addresses of all")
        twin = Address("localhost", services[0].address.port)
        place = ReplayPlace((services[0].address, twin))
        doubled = await refusal(ConfigError, options_for(services, tmp_path / "run", replay=place))
        assert_one_sentence(doubled, "are both shard 0/2")
        assert leases(services[0]) == [(0, "left")]


async def test_an_agent_id_that_another_node_has_at_the_second_shard_is_given_back_at_the_first(tmp_path):
    timing = replace(QUICK, holder_look_s=0.05)
    async with shards_serving(2, **SERVED) as services:
        other = await services[1].join(0, schema=point_goal())
        await services[1].client.heartbeat(other, Progress())
        error = await refusal(
            AgentTakenError, options_for(services, tmp_path / "run", agent_id=0, timing=timing)
        )
        assert_one_sentence(error, "agent 0 is held by the live node 'node-0'")
        assert [leases(service) for service in services] == [[(0, "left")], [(0, "live")]]


@asynccontextmanager
async def trained_on_nodes(tmp_path, data, **changes):
    """Two replay nodes and a learner that has trained on both: these and the learner's task."""
    async with replay_node(**data[0]) as first, replay_node(**data[1]) as second:
        options = options_for((first, second), tmp_path / "run", **changes)
        async with learning(options) as (task, stop):
            await until_trained(first.address, task=task)
            yield first, second, task, stop


def stored(tmp_path, *, on_disk):
    """The options of two replay nodes."""
    folders = [{"data_dir": tmp_path / str(index)} if on_disk else {} for index in range(2)]
    return [{**SERVED, **folders[index], "shard": Shard(index, 2)} for index in range(2)]


async def size_and_step(address):
    status = await status_of(address)
    return status.buffer.size, status.agents[0].progress.step


async def until_further(address, task, *, steps=100):
    """Waits until the learner, as a shard hears of it, has made some more steps."""
    _, before = await size_and_step(address)
    async with asyncio.timeout(PATIENCE_S):
        while (await size_and_step(address))[1] < before + steps:
            assert not task.done(), task.exception()
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [True, False], ids=["with its data", "without"])
@pytest.mark.parametrize("gone", [0, 1])
async def test_a_learner_trains_on_while_a_shard_is_away_and_takes_it_in_when_it_is_back(
    tmp_path, caplog, on_disk, gone
):
    data = stored(tmp_path, on_disk=on_disk)
    async with trained_on_nodes(tmp_path, data) as (*replays, task, stop):
        away, there = replays[gone], replays[1 - gone]
        held, _ = await size_and_step(away.address)
        await away.end()
        await until_further(there.address, task)
        async with replay_node(**data[gone], listen=away.address) as back:
            await eventually(lambda: "answers again" in caplog.text)
            await until_trained(back.address, epoch=1, updates=50, task=task)
            size, _ = await size_and_step(back.address)
            assert size >= held if on_disk else "came back without its data" in caplog.text
            await ended(task, stop)
            statuses = [await status_of(each.address) for each in (back, there)]
    assert [status.agents[0].lease for status in statuses] == ["left", "left"]
    total = sum(status.buffer.inserted_total for status in statuses)
    if on_disk:
        assert total == statuses[0].agents[0].progress.step


@pytest.mark.slow
async def test_while_the_first_shard_is_away_nobody_joins_and_whoever_is_there_goes_on(tmp_path):
    async with trained_on_nodes(tmp_path, stored(tmp_path, on_disk=False)) as (first, second, task, stop):
        await first.end()
        late = options_for((first, second), tmp_path / "late", connect_timeout_s=0.3)
        error = await refusal(UnreachableError, late)
        assert_one_sentence(error, f"the replay service at {first.address} does not answer")
        await until_further(second.address, task, steps=50)
        stop.set()
        with suppress(UnreachableError):  # it may keep rows for the shard, which does not come back
            await promptly(task)


@pytest.mark.slow
async def test_shards_behind_a_name_are_found_again_at_new_addresses(tmp_path, caplog, monkeypatch):
    data, ports = stored(tmp_path, on_disk=True), {}

    async def resolved(name):
        assert name == Address("replay.test", 1)
        return tuple(Address("127.0.0.1", port, server_name=name.host) for port in ports.values())

    monkeypatch.setattr("dase_grpc.replay.wire.addresses.resolved", resolved)
    place = ReplayPlace.parse("dns:replay.test:1")
    async with replay_node(**data[0]) as first, replay_node(**data[1]) as second:
        ports |= {"first": first.address.port}
        async with learning(options_for((first, second), tmp_path / "run", replay=place)) as (task, stop):
            await eventually(
                lambda: "waiting up to 60 s for the shards behind dns:replay.test:1" in caplog.text
            )
            assert "shard 1/2" in caplog.text
            ports |= {"second": second.address.port}
            await until_trained(second.address, task=task)
            await second.end()
            async with replay_node(**data[1]) as moved:
                ports |= {"second": moved.address.port, "dead": free_port()}
                await eventually(lambda: f"is at {moved.address} now" in caplog.text)
                await eventually(lambda: "answers again" in caplog.text)
                await until_further(moved.address, task, steps=50)
                await ended(task, stop)
                assert (await status_of(moved.address)).agents[0].lease == "left"
