"""Nodes as real processes that are stopped, killed and frozen: the others end well, and nothing hangs."""

import asyncio
import signal
from contextlib import asynccontextmanager

import pytest
from nodes.learning_cases import checkpoint_step, status_of, until_trained
from nodes.processes import learner_arguments, process, replay_process
from replay.wire.services import serving

from dase_grpc.replay.wire.addresses import parse_address

pytestmark = pytest.mark.slow

TTL_S = 10.0


async def trained(address, **arguments):
    """Waits until an agent has trained a little."""
    await until_trained(parse_address(address), **arguments)


@asynccontextmanager
async def trained_nodes(tmp_path, *more):
    """A replay, its address, and a learner that has trained a little."""
    with (
        replay_process() as (replay, address),
        process(*learner_arguments(address, tmp_path / "run"), *more) as learner,
    ):
        await trained(address)
        yield replay, address, learner


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
async def test_a_signal_ends_a_learner_and_then_the_replay_with_exit_code_0(number, tmp_path):
    async with trained_nodes(tmp_path) as (replay, address, learner):
        learner.send(number)
        assert learner.exit_code() == 0, learner.log
        step = checkpoint_step(tmp_path / "run")
        assert f"stopped after {step:,} steps" in learner.log
        agent = (await status_of(parse_address(address))).agents[0]
        assert (agent.lease, agent.reason) == ("left", f"stopped after {step:,} steps")
        replay.send(number)
        assert replay.exit_code() == 0
        assert "no agent was left" in replay.log
        assert "Traceback" not in replay.log + learner.log


async def test_a_replay_that_is_stopped_ends_learners_without_patience_with_exit_code_1_and_a_checkpoint(
    tmp_path,
):
    async with trained_nodes(tmp_path, "--replay-timeout=0") as (replay, _, learner):
        replay.send(signal.SIGTERM)
        assert replay.exit_code() == 0
        assert "agent 0 was still training and has been told" in replay.log
        assert learner.exit_code() == 1
        assert "error: the replay service" in learner.log
        assert "is kept in" in learner.log
        assert "Traceback" not in replay.log + learner.log
        assert checkpoint_step(tmp_path / "run") > 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_replay_that_is_gone_ends_learners_without_patience_with_exit_code_1_and_a_checkpoint(
    tmp_path, how
):
    async with trained_nodes(tmp_path, "--replay-timeout=0") as (replay, address, learner):
        replay.send(how)
        assert learner.exit_code() == 1
        assert f"error: the replay service at {address} does not answer" in learner.log
        assert "Traceback" not in learner.log
        assert checkpoint_step(tmp_path / "run") > 0


@pytest.mark.long
async def test_a_learner_whose_replay_is_frozen_can_still_be_stopped(tmp_path):
    async with trained_nodes(tmp_path) as (replay, _, learner):
        replay.send(signal.SIGSTOP)
        learner.send(signal.SIGTERM)
        assert learner.exit_code() == 1
        assert checkpoint_step(tmp_path / "run") > 0


async def test_a_learner_that_was_killed_is_replaced_as_soon_as_its_lease_ends(tmp_path):
    """By the service's clock, which stands still until it is moved."""
    async with serving(capacity=10_000, min_size=20, ttl_s=TTL_S) as service:
        address = str(service.address)
        with process(*learner_arguments(address, tmp_path / "first"), "--agent=0") as first:
            await until_trained(service.address)
            first.send(signal.SIGKILL)
            assert await asyncio.to_thread(first.exit_code) == -signal.SIGKILL
        service.clock.now += TTL_S / 2
        with process(*learner_arguments(address, tmp_path / "second"), "--agent=0") as second:
            waits = "agent 0's holder is silent: waiting for its lease to end"
            await asyncio.to_thread(second.until_says, waits)
            assert [lease.epoch for lease in service.run.leases.all()] == [1]
            service.clock.now += TTL_S
            await until_trained(service.address, epoch=2)
            second.send(signal.SIGTERM)
            assert await asyncio.to_thread(second.exit_code) == 0, second.log


@pytest.mark.long
async def test_a_learner_that_was_frozen_for_a_while_goes_on(tmp_path):
    with replay_process() as (_, address), process(*learner_arguments(address, tmp_path / "run")) as learner:
        await trained(address)
        learner.send(signal.SIGSTOP)
        await asyncio.sleep(3)
        learner.send(signal.SIGCONT)
        steps = (await status_of(parse_address(address))).agents[0].progress.updates
        await trained(address, updates=steps + 100)
        learner.send(signal.SIGTERM)
        assert learner.exit_code() == 0


async def test_what_the_environment_raises_stands_in_the_log_with_its_traceback(tmp_path):
    arguments = {"env__id": "worlds:RaisesAtStep", "env__kwargs": "{at=9}", "eval__max_episode_steps": 5}
    sentence = "agent 0 at step 8: the environment raised RuntimeError: the simulator broke at step 9 in step"
    with (
        replay_process() as (_, address),
        process(*learner_arguments(address, tmp_path / "run", env__max_restarts=0, **arguments)) as learner,
    ):
        assert learner.exit_code() == 1
        assert "worlds.py" in learner.log
        assert f"error: {sentence}" in learner.log.splitlines()[-1]
        assert "Exception Group" not in learner.log
        reason = (await status_of(parse_address(address))).agents[0].reason
        assert reason.startswith(f"failed: {sentence}")


def test_what_a_user_can_put_right_is_one_line_and_exit_code_2(tmp_path):
    with replay_process() as (_, address):
        cases = {
            f"cannot listen on {address}": ("--role=replay", f"--listen={address}"),
            "--insecure": ("--role=replay", "--listen=0.0.0.0:0"),
            "--gpu 9": (*learner_arguments(address, tmp_path / "run"), "--gpu=9"),
            "neither has 'Nothing'": learner_arguments(address, tmp_path / "run", env__id="worlds:Nothing"),
            "--agent 7 is not of this run": (*learner_arguments(address, tmp_path / "run"), "--agent=7"),
        }
        for sentence, arguments in cases.items():
            with process(*arguments) as node:
                assert node.exit_code() == 2, node.log
            assert sentence in node.log
            assert "Traceback" not in node.log
