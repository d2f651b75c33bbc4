"""Agents of a lockstep run whose own configurations are not what the run's makes of them."""

import sys
from threading import Event

import gymnasium
import numpy as np
import pytest
from contracts.sentences import assert_one_sentence
from gymnasium.spaces import Box
from launch.resuming import curve
from small import new_run, small_config
from worlds import PointGoal

from dase_grpc.config.sections import EnvConfig
from dase_grpc.errors import EnvironmentSpecError
from dase_grpc.launch.lockstep import BUFFER_FILE, open_lockstep, run_lockstep
from dase_grpc.runs.directory import RunDirectory


class MirroredGoal(gymnasium.ActionWrapper):
    """PointGoal in which every action does the opposite."""

    def __init__(self) -> None:
        super().__init__(PointGoal())

    def action(self, action):
        return -action


class StrongGoal(PointGoal):
    """PointGoal with other bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = Box(-2.0, 2.0, (1,), np.float32)


MIRRORED = EnvConfig(id="peer_worlds:MirroredGoal")
STRONG = EnvConfig(id="peer_worlds:StrongGoal")


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """The environments above are found by a name of their own, wherever pytest put this module."""
    monkeypatch.setitem(sys.modules, "peer_worlds", sys.modules[__name__])


def configs_with(config, agent_id, **changed):
    """The agents' own configurations, of which one has other sections."""
    own = [config.for_agent(each) for each in range(config.train.agents)]
    own[agent_id] = own[agent_id].model_copy(update=changed)
    return own


def played(root, config, **options):
    directory = new_run(root, config)
    with open_lockstep(config, directory, **options) as opened:
        run_lockstep(opened, Event(), lambda: None)
        stored = opened.store.ring.schema.named(np.load(directory.replay / BUFFER_FILE))
        return opened, stored, directory


def moved(rows, agent_id):
    """What each transition did to the distance, over its action."""
    own = rows[rows["agent_id"] == agent_id]
    return (own["next_observation"] - own["observation"]) / own["action"]


def test_an_agent_explores_another_environment_and_its_rows_have_the_run_s_schema(tmp_path):
    config = small_config()
    opened, stored, directory = played(tmp_path, config, configs=configs_with(config, 1, env=MIRRORED))
    assert opened.store.ring.schema.environment == "worlds:PointGoal"
    np.testing.assert_allclose(moved(stored, 0), -0.25, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(moved(stored, 1), 0.25, rtol=1e-3, atol=1e-3)
    assert RunDirectory.open(directory.path).config == config  # what the run says it was


def test_a_random_agent_acts_uniformly_to_the_end_and_never_updates(tmp_path):
    config = small_config(train__steps=250)
    random = config.agent.model_copy(update={"start_steps": 251})
    opened, stored, _ = played(tmp_path, config, configs=configs_with(config, 1, agent=random))
    assert [learner.progress.updates for learner in opened.learners] == [231, 0]
    own = stored[stored["agent_id"] == 1]
    assert (own["policy_version"] == 0).all()
    assert np.histogram(own["action"], bins=4, range=(-1, 1))[0].min() > 30


@pytest.mark.slow
def test_a_configuration_that_is_as_the_run_s_changes_no_bit(tmp_path):
    config = small_config()
    (_, plain, first), (_, same, second) = (
        played(tmp_path / name, config, **options)
        for name, options in (("a", {}), ("b", {"configs": configs_with(config, 0)}))
    )
    np.testing.assert_array_equal(plain, same)
    assert curve(first.agent(0)) == curve(second.agent(0))


@pytest.mark.parametrize("agent", [0, 1])
def test_an_environment_of_other_bounds_is_refused_before_any_step(tmp_path, agent):
    config = small_config()
    with pytest.raises(EnvironmentSpecError) as refused:
        played(tmp_path, config, configs=configs_with(config, agent, env=STRONG))
    assert_one_sentence(str(refused.value), "agents that share a buffer need the same")
