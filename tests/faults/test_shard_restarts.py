"""Real processes: one of two shards is killed, the learners go on, it comes back, and nothing is lost."""

import asyncio
import signal

import numpy as np
import pytest
from faults.stories import check_rollouts, point_goal, replay_at
from nodes.learning_cases import status_of, until_trained
from nodes.processes import learner_arguments, process
from patience import PATIENCE_S

STEPS = 2_500
pytestmark = [pytest.mark.slow, pytest.mark.faults]


async def steps_at(address):
    return [agent.progress.step for agent in (await status_of(address)).agents]


async def all_beyond(address, before, *, steps):
    return all(now >= then + steps for now, then in zip(await steps_at(address), before, strict=True))


async def test_two_learners_finish_though_one_of_two_shards_is_killed_and_every_step_is_stored_once(
    storm, tmp_path
):
    addresses = [storm.free_address() for _ in range(2)]
    data = [tmp_path / f"shard-{index}" for index in range(2)]
    arguments = learner_arguments(
        ",".join(map(str, addresses)), tmp_path / "run", train__agents=2, train__steps=STEPS
    )
    shards = [(f"--shard={index}/2", f"--data-dir={data[index]}") for index in range(2)]
    with replay_at(addresses[0], *shards[0]) as first, process(*arguments) as one, process(*arguments) as two:
        with replay_at(addresses[1], *shards[1]) as second:
            for agent_id in (0, 1):
                await until_trained(addresses[0], agent_id=agent_id)
            second.send(signal.SIGKILL)
            second.exit_code()
        before = await steps_at(addresses[0])
        async with asyncio.timeout(PATIENCE_S):
            while not await all_beyond(addresses[0], before, steps=100):  # noqa: ASYNC110 - another node's state
                await asyncio.sleep(0.05)
        with replay_at(addresses[1], *shards[1]) as second:
            for learner in (one, two):
                assert await asyncio.to_thread(learner.exit_code) == 0, learner.log
                assert "came back" not in learner.log
                assert "Traceback" not in learner.log
            for shard in (first, second):
                shard.send(signal.SIGTERM)
                assert shard.exit_code() == 0
    files = [storm.read_files(each) for each in data]
    for agent_id in (0, 1):
        assert sum(each.sequences[agent_id, f"learner-{agent_id}"] for each in files) == STEPS
    check_steps(np.concatenate([each.rows for each in files]))


def check_steps(rows):
    """Each learner's steps are there once: all but the last of an episode lead to where another begins."""
    ids = point_goal().agent_ids(rows)
    for agent_id in (0, 1):
        check_rollouts(rows[ids == agent_id], [STEPS])
    assert len(rows) == 2 * STEPS
