"""An environment that numbers its steps: which transition is which, and whether it is whole."""

import numpy as np
import pytest
from launch.drill.numbered_world import explore

from dase_grpc.launch.drill.evidence import MARKS, read_ledger, read_marks
from dase_grpc.learning.envs.make import make_env


@pytest.fixture
def explored(tmp_path):
    """Explores a numbered world; gives the environment, its schema, and the finite rows of some steps."""
    return lambda env_id="worlds:PointGoal", steps=50: explore(
        tmp_path / "ledger", steps, env_id=env_id, agent_id=3
    )


@pytest.mark.parametrize("env_id", ["worlds:PointGoal", "worlds:MatrixAction", "worlds:DictObservation"])
def test_each_step_has_the_next_number_and_a_sum_that_fits(explored, env_id):
    rows, env, schema = explored(env_id)
    marks = read_marks(rows, schema, env)
    assert marks.step.tolist() == list(range(1, 51))
    assert marks.number.tolist() == [1] * 50
    assert marks.whole.all()


def test_the_observation_is_that_of_the_world_with_marks_behind_it(explored):
    rows, _, schema = explored()
    assert schema.observation_size == 1 + MARKS
    assert (np.abs(rows[:, schema.columns["observation"]][:, -MARKS:]) < 1).all()
    plain = make_env("worlds:PointGoal", {})
    first, _ = plain.reset(seed=0)
    assert rows[0, 0] == first[0]


def test_what_it_has_taken_is_in_the_ledger_and_each_environment_has_a_number_of_its_own(explored, tmp_path):
    explored(steps=50)
    explored(steps=7)
    taken = [(each.number, each.steps, each.before_second_reset) for each in read_ledger(tmp_path / "ledger")]
    assert taken == [(1, 50, 20), (2, 7, 0)]


def test_steps_that_cannot_be_stored_are_not_counted(explored, tmp_path):
    for env_id in ("worlds:NanAtStep50", "worlds:NanReward", "worlds:HugeReward"):
        rows, env, schema = explored(env_id, steps=120)
        assert len(rows) < 120
        marks = read_marks(rows, schema, env)
        assert marks.step.tolist() == list(range(1, len(rows) + 1))
        assert marks.whole.all()
        assert read_ledger(tmp_path / "ledger")[-1].steps == len(rows)


@pytest.mark.parametrize("row", [0, 7, 49])
def test_no_bit_of_what_the_environment_said_can_change_unseen(explored, row):
    rows, env, schema = explored()
    covered = range(schema.columns["reward"].stop) if row else range(4, schema.columns["reward"].stop)
    for column in covered:
        changed = rows.copy()
        changed.view(np.uint32)[row, column] ^= 1 << 12
        assert not read_marks(changed, schema, env).whole.all(), column
