"""Learners of PointGoal beside faults, and what they must have left in the files of a durable replay."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
from nodes.learning_cases import status_of, until_trained
from nodes.processes import replay_process

from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.schema import TransitionSchema

EPISODE = 20


@contextmanager
def replay_at(address, *arguments):
    """A replay process on a port that stays the same; it answers."""
    with replay_process(f"--listen={address}", "--run-id=the-run", *arguments) as (node, _):
        yield node


async def trained_on(address, *, more=20, task=None):
    """Waits until agent 0 has reported as many updates more."""
    agents = (await status_of(address)).agents
    updates = agents[0].progress.updates if agents else 0
    return await until_trained(address, updates=updates + more, task=task)


def check_rollouts(rows, steps):
    """Rows of one agent are there once; of each writer's `steps` only the last episode may be cut."""
    assert len(np.unique(rows, axis=0)) == len(rows) == sum(steps)
    named = point_goal().named(np.ascontiguousarray(rows))
    ends = ~np.isin(named["next_observation"], named["observation"])
    assert np.count_nonzero(ends) == sum(-(-number // EPISODE) for number in steps)


def point_goal() -> TransitionSchema:
    """The schema of the tiny world that learners of tests train in."""
    env = make_env("worlds:PointGoal", {})
    schema = schema_of(env, "worlds:PointGoal")
    env.close()
    return schema


def check_story(storm, data_dir: Path, *, steps: list[int], capacity: int = 10_000) -> None:
    """Checks the rows of agent 0, whose learners, one after the other, took these numbers of steps.

    `storm` reads the files. Every row but an episode's last goes on where the one before ended, so none is
    missing, doubled or out of order; and the committed number is that of all the steps.
    """
    files, schema = storm.read_files(data_dir), point_goal()
    total = sum(steps)
    assert files.sequences == {(0, "learner-0"): total}
    assert files.total == total
    assert len(files.rows) == min(total, capacity)
    own = schema.named(np.ascontiguousarray(files.rows))
    assert (own["agent_id"] == 0).all()
    assert len(np.unique(files.rows, axis=0)) == len(files.rows)
    begins, first = set(), 0
    for count in steps:
        begins |= {first + start for start in range(0, count, EPISODE)}
        first += count
    numbers = np.arange(total - len(files.rows) + 1, total)
    follows = np.array([number not in begins for number in numbers], dtype=bool)
    assert (own["next_observation"][:-1] == own["observation"][1:])[follows].all()
