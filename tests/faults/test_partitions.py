"""A learner behind a network that cuts, delays and swallows: it trains on, and each step is stored once."""

import asyncio
import random
from contextlib import asynccontextmanager
from functools import partial

import pytest
from faults.stories import check_story, trained_on
from nodes.learning_cases import FOREVER, checkpoint_step, learner_options, learning, status_of
from nodes.running import replay_node
from replay.wire.services import eventually, promptly

from dase_grpc.launch.drill.cluster import proxied

ON = {"train__steps": FOREVER, "eval__every": 1_000_000, "replay__capacity": 10_000}

pytestmark = [pytest.mark.slow, pytest.mark.faults]


@asynccontextmanager
async def learner_behind_a_proxy(storm, tmp_path):
    """A learner, the proxy to its durable replay, and a wait for it to train on; checked at the end."""
    data = tmp_path / "data"
    async with (
        replay_node(data_dir=data, min_size=20) as replay,
        proxied(replay.address) as (proxy, address),
        learning(learner_options(address, tmp_path / "run", **ON)) as (task, stop),
    ):
        until_trained_on = partial(trained_on, replay.address, task=task)  # past the proxy
        await until_trained_on()
        yield proxy, until_trained_on
        stop.set()
        await promptly(task)
        assert (await status_of(replay.address)).agents[0].epoch == 1
    check_story(storm, data, steps=[checkpoint_step(tmp_path / "run")])


@pytest.mark.parametrize("seconds", [0.0, 1.0, pytest.param(15.0, marks=pytest.mark.long)])
async def test_a_connection_that_is_cut_is_made_again(storm, tmp_path, seconds):
    async with learner_behind_a_proxy(storm, tmp_path) as (proxy, until_trained_on):
        proxy.cut()
        await asyncio.sleep(seconds)
        proxy.heal()
        await until_trained_on()


async def test_a_connection_that_is_cut_again_and_again_and_delayed(storm, tmp_path):
    rng = random.Random(7)
    async with learner_behind_a_proxy(storm, tmp_path) as (proxy, until_trained_on):
        for _ in range(15):
            proxy.delay_s = rng.choice([0.0, 0.0, 0.02, 0.1])
            proxy.cut()
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            proxy.heal()
            await asyncio.sleep(rng.uniform(0.0, 0.8))
        proxy.delay_s = 0.0
        await until_trained_on()


async def test_a_slow_network_is_only_slow(storm, tmp_path):
    async with learner_behind_a_proxy(storm, tmp_path) as (proxy, until_trained_on):
        proxy.delay_s = 0.3
        await asyncio.sleep(3)
        await until_trained_on()
        assert proxy.connections == 1
        proxy.delay_s = 0.0


@pytest.mark.long
async def test_a_connection_that_is_half_open_is_found_dead_and_made_again(storm, tmp_path, caplog):
    caplog.set_level("INFO", "dase")
    async with learner_behind_a_proxy(storm, tmp_path) as (proxy, until_trained_on):
        proxy.hang()
        await eventually(lambda: "trying again" in caplog.text)
        await asyncio.sleep(20)
        proxy.heal()
        await until_trained_on()
    assert "which has not answered for" in caplog.text
