"""Real processes: a learner that was killed is replaced at once, one that only seems to have ended never."""

import asyncio
import shutil
import signal

import pytest
from faults.stories import check_story
from nodes.learning_cases import checkpoint_step, status_of, until_trained
from nodes.processes import learner_arguments, process
from nodes.running import replay_node
from patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(3 * PATIENCE_S)]

NEVER_S = 1_000 * PATIENCE_S
"""A lease that nobody can have waited for."""


def learner(address, run_dir, *more):
    return process(*learner_arguments(str(address), run_dir, train__checkpoint_every=50), "--agent=0", *more)


def copied(run_dir, to):
    """A copy of a run's directory, without checkpoints, which may be changing."""
    return shutil.copytree(run_dir, to, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))


async def test_the_learner_after_a_killed_one_trains_without_waiting_for_the_lease(tmp_path):
    data, run_dir = tmp_path / "data", tmp_path / "run"
    async with replay_node(data_dir=data, min_size=20, lease_ttl_s=NEVER_S) as replay:
        for epoch in (1, 2, 3):
            with learner(replay.address, run_dir, "--resume") as node:
                await until_trained(replay.address, epoch=epoch)
                if epoch > 1:
                    node.until_says(
                        "the learner of agent 0 before this one has ended; its lease is not waited"
                    )
                node.send(signal.SIGKILL if epoch < 3 else signal.SIGTERM)
                code = await asyncio.to_thread(node.exit_code)
        assert code == 0, node.log
        assert "Traceback" not in node.log


@pytest.mark.parametrize("elsewhere", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_living_learner_is_not_unseated_from_its_own_folder_or_a_copy_of_it(
    storm, tmp_path, elsewhere
):
    data, run_dir = tmp_path / "data", tmp_path / "run"
    async with replay_node(data_dir=data, min_size=20, lease_ttl_s=NEVER_S) as replay:
        with learner(replay.address, run_dir) as living:
            await until_trained(replay.address)
            other_dir = copied(run_dir, tmp_path / "copy") if elsewhere else run_dir
            with learner(replay.address, other_dir, "--resume") as other:
                assert await asyncio.to_thread(other.exit_code) == 1
                assert "agent 0 is held by the live node" in other.log
            before = await until_trained(replay.address)
            await until_trained(replay.address, updates=before.updates + 50)
            (agent,) = (await status_of(replay.address)).agents
            assert (agent.lease, agent.epoch) == ("live", 1)
            living.send(signal.SIGTERM)
            assert await asyncio.to_thread(living.exit_code) == 0, living.log
    check_story(storm, data, steps=[checkpoint_step(run_dir)])
