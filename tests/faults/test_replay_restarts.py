"""Real processes: a replay that is killed or stopped and started again, and a learner that is replaced."""

import asyncio
import os
import signal

import pytest
from faults.stories import check_story, replay_at, trained_on
from nodes.learning_cases import checkpoint_step, status_of, until_trained
from nodes.processes import learner_arguments, process
from nodes.running import replay_node
from patience import PATIENCE_S

OUTAGES_S = [float(text) for text in os.environ.get("DASE_OUTAGES", "1").split(",")]

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(3 * (PATIENCE_S + max(OUTAGES_S)))]


@pytest.mark.parametrize("outage_s", OUTAGES_S)
async def test_a_durable_replay_that_is_killed_or_stopped_is_trained_with_on(storm, tmp_path, outage_s):
    address, data = storm.free_address(), tmp_path / "data"
    with process(*learner_arguments(str(address), tmp_path / "run")) as learner:
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)[: 3 if outage_s < 100 else 1]:
            with replay_at(address, f"--data-dir={data}") as replay:
                await trained_on(address)
                replay.send(number)
                replay.exit_code()
            learner.until_says("trying again for up to 600 s")
            await asyncio.sleep(outage_s)
        with replay_at(address, f"--data-dir={data}") as replay:
            await trained_on(address)
            agent = (await status_of(address)).agents[0]
            assert (agent.lease, agent.epoch) == ("live", 1)
            learner.send(signal.SIGTERM)
            assert learner.exit_code() == 0, learner.log
            replay.send(signal.SIGTERM)
            assert replay.exit_code() == 0
        assert "Traceback" not in replay.log + learner.log
    check_story(storm, data, steps=[checkpoint_step(tmp_path / "run")])


async def test_a_replay_in_memory_that_is_killed_is_said_to_have_lost_its_data(storm, tmp_path):
    address = storm.free_address()
    with process(*learner_arguments(str(address), tmp_path / "run")) as learner:
        with replay_at(address) as replay:
            await trained_on(address)
            replay.send(signal.SIGKILL)
            replay.exit_code()
        with replay_at(address) as replay:
            learner.until_says("came back without its data")
            await trained_on(address)
            learner.send(signal.SIGTERM)
            assert learner.exit_code() == 0, learner.log
            replay.until_says("whose transitions are not here any more")
        assert "Traceback" not in learner.log


@pytest.mark.long  # test_drill_command.py freezes and replaces a learner too
async def test_a_frozen_learner_is_replaced_within_its_lease_and_fenced_off_when_it_wakes(storm, tmp_path):
    data, ttl_s = tmp_path / "data", 3.0
    async with replay_node(data_dir=data, min_size=20, lease_ttl_s=ttl_s) as replay:
        address = str(replay.address)
        with process(*learner_arguments(address, tmp_path / "first"), "--agent=0") as first:
            await until_trained(replay.address)
            with process(*learner_arguments(address, tmp_path / "second"), "--agent=0") as second:
                assert await asyncio.to_thread(second.exit_code) == 1
                assert "agent 0 is held by the live node" in second.log
            first.send(signal.SIGSTOP)
            another = learner_arguments(address, tmp_path / "third", train__seed=4)  # else it does the same
            with process(*another, "--agent=0") as third:
                await until_trained(replay.address, epoch=2)
                first.send(signal.SIGCONT)
                assert await asyncio.to_thread(first.exit_code) == 3
                assert "error: fenced off: agent 0 belongs to another node now" in first.log
                await until_trained(replay.address, epoch=2, updates=200)
                third.send(signal.SIGTERM)
                assert await asyncio.to_thread(third.exit_code) == 0, third.log
            assert "Traceback" not in first.log + second.log + third.log
    after = checkpoint_step(tmp_path / "third")
    before = storm.read_files(data).total - after
    assert 0 < before <= checkpoint_step(tmp_path / "first")
    check_story(storm, data, steps=[before, after])
