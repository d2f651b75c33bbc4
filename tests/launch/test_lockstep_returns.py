"""Lockstep runs with n-step returns: resumed to the bit, each agent with its own n."""

import numpy as np
import pytest
from resuming import MEMBERS, assert_equal, config, resume, train, train_killed_after, train_until
from small import SETTINGS

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.launch.lockstep import BUFFER_FILE
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.runs.checkpoint import latest
from dase_grpc.runs.directory import RunDirectory

MODES = ["lockstep", "stack"]


def three(env: str = "worlds:PointGoal", **settings) -> RunConfig:
    """`config`, with returns of three steps."""
    return config(env, agent__n_step=3, **settings)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict[str, RunDirectory]:
    return {mode: train(tmp_path_factory.mktemp(mode), three(), mode=mode) for mode in MODES}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", [37, 60, 61])
def test_a_run_that_was_stopped_goes_on_from_that_very_step(tmp_path, straight, mode, step):
    stopped = train_until(tmp_path, three(), step, mode=mode)
    assert latest(stopped.agent(1).checkpoints).name == f"step-{step:09d}"
    assert_equal(straight[mode], resume(stopped))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_was_killed_goes_on_from_its_last_round(tmp_path, straight, mode):
    assert_equal(straight[mode], resume(train_killed_after(tmp_path, three(), 75, mode=mode)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_n_steps_and_n_more_are_as_2n_at_once(tmp_path, straight, mode):
    """65 lies within an episode: what is held at the end of the first run is not cut."""
    resumed = resume(train(tmp_path, three(train__steps=65), mode=mode), steps=120)
    assert_equal(straight[mode], resumed, first_steps=65)


@pytest.mark.slow
def test_a_run_whose_environments_raise_by_their_seeds_goes_on_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("dase_grpc.learning.envs.restarts.FIRST_PAUSE_S", 0)
    settings = three("worlds:Brittle", env__max_restarts=50)
    stopped = train_until(tmp_path, settings, 67)
    assert_equal(train(tmp_path, settings, "straight"), resume(stopped))


def test_each_member_of_an_ensemble_has_its_own_n_and_discount(tmp_path):
    common = {section: keys for section, keys in SETTINGS.items() if section != "agent"}
    members = [MEMBERS[0], {**MEMBERS[1], "n_step": 3, "gamma": 0.5}]
    run = train(tmp_path, resolve(common, {"members": members, "train": {"steps": 70}}))
    schema = schema_of(make_env("worlds:PointGoal", {}), "worlds:PointGoal")
    rows = schema.named(np.load(run.replay / BUFFER_FILE))
    found = {agent: [*rows[rows["agent_id"] == agent]["bootstrap"]] for agent in (0, 1)}
    assert found[0] == [1] * 70
    assert found[1] == ([0.25] * 18 + [0.5, 1]) * 3 + [0.25] * 8
