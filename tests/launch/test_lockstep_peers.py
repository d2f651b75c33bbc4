"""Agents of a lockstep run that differ from its configuration."""

import sys
from threading import Event

import gymnasium
import numpy as np
import pytest
from contracts.sentences import assert_one_sentence
from gymnasium.spaces import Box
from small import new_run, small_config
from worlds import PointGoal

from dase_grpc.config.sections import EnvConfig
from dase_grpc.errors import ConfigError, EnvironmentSpecError
from dase_grpc.launch.lockstep import BUFFER_FILE, Peer, open_lockstep, run_lockstep
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


def rows(opened, directory: RunDirectory):
    return opened.store.ring.schema.named(np.load(directory.replay / BUFFER_FILE))


def played(root, peers, *, config=None):
    config = config or small_config()
    directory = new_run(root, config)
    with open_lockstep(config, directory, peers=peers) as opened:
        run_lockstep(opened, Event(), lambda: None)
        return opened, rows(opened, directory), directory


def moved(rows, agent_id):
    """What each transition did to the distance, over its action."""
    own = rows[rows["agent_id"] == agent_id]
    return (own["next_observation"] - own["observation"]) / own["action"]


def test_a_peer_explores_another_environment_and_its_rows_have_the_run_s_schema(tmp_path):
    opened, stored, _ = played(tmp_path, {1: Peer(env=MIRRORED)})
    assert opened.store.ring.schema.environment == "worlds:PointGoal"
    np.testing.assert_allclose(moved(stored, 0), -0.25, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(moved(stored, 1), 0.25, rtol=1e-3, atol=1e-3)


def test_a_random_peer_acts_uniformly_to_the_end_and_never_updates(tmp_path):
    opened, stored, _ = played(tmp_path, {1: Peer(random=True)}, config=small_config(train__steps=400))
    assert [learner.progress.updates for learner in opened.learners] == [381, 0]
    own = stored[stored["agent_id"] == 1]
    assert (own["policy_version"] == 0).all()
    quarters = np.histogram(own["action"], bins=4, range=(-1, 1))[0]
    assert quarters.min() > 60


def test_a_peer_changes_nothing_about_what_the_run_says_it_was(tmp_path):
    _, _, directory = played(tmp_path, {1: Peer(env=MIRRORED, random=True)})
    assert RunDirectory.open(directory.path).config == small_config()


@pytest.mark.slow
def test_a_peer_that_is_as_configured_changes_no_bit(tmp_path):
    (_, plain, first), (_, same, second) = (
        played(tmp_path / name, peers) for name, peers in (("a", {}), ("b", {0: Peer(), 1: Peer()}))
    )
    np.testing.assert_array_equal(plain, same)
    curves = [each.agent(0).evaluations.path.read_text().splitlines() for each in (first, second)]
    without_time = [[line.rpartition(",")[0] for line in lines] for lines in curves]
    assert without_time[0] == without_time[1]


@pytest.mark.parametrize("agent", [0, 1])
def test_an_environment_of_other_bounds_is_refused_before_any_step(tmp_path, agent):
    config = small_config()
    with (
        pytest.raises(EnvironmentSpecError, match="agents that share a buffer need the same") as refused,
        open_lockstep(config, new_run(tmp_path, config), peers={agent: Peer(env=STRONG)}),
    ):
        pass
    assert_one_sentence(str(refused.value))


def test_an_agent_that_the_run_does_not_have_is_refused(tmp_path):
    config = small_config()
    with (
        pytest.raises(ConfigError, match=r"no agent 2 to replace; train\.agents = 2"),
        open_lockstep(config, new_run(tmp_path, config), peers={2: Peer(random=True)}),
    ):
        pass
