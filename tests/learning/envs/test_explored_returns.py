"""Explored rows of n-step returns: the values that follow from them, and every step exactly once."""

from functools import partial

import gymnasium
import numpy as np
import plain_policies
import pytest
import worlds
from gymnasium.spaces import Box

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.errors import EnvironmentFailedError
from dase_grpc.learning.agents.snapshots import Behaviour
from dase_grpc.learning.envs.explorer import Explorer
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.learning.envs.noise import Gaussian
from dase_grpc.learning.envs.restarts import RestartableEnv
from dase_grpc.learning.training.collection import Rollout, actor_explorers
from dase_grpc.process.watchdog import Watch
from dase_grpc.schema import Array

POLICY = plain_policies.ConstantPolicy(0.25)
HALF = 0.5
"""A discount whose powers, and whose sums of the rewards here, float32 holds exactly."""


def explorer(env, *, n_step=3, start_steps=0, noise=0.0) -> Explorer:
    return Explorer(
        env,
        schema_of(env, "a world"),
        agent_id=0,
        rng=np.random.default_rng(4),
        episode_seed=lambda episode: 100 + 2 * episode,
        start_steps=start_steps,
        noise=Gaussian(noise),
        n_step=n_step,
        discount=HALF,
    )


def steps_of(exploring: Explorer, count: int):
    return [exploring.step(POLICY, 0) for _ in range(count)]


def brief(rows) -> list[tuple[float, ...]]:
    """Observation, next observation, reward and bootstrap of rows of a Clock."""
    return [(row[0], row[3], row[5], row[6]) for row in rows]


# -- values -------------------------------------------------------------------------------------------


class Chain(gymnasium.Env):
    """Goes from state to state, each with a reward, up to the last one, which terminates.

    Begins in a state drawn from the seed, and is truncated after a number of steps drawn from it.
    """

    rewards = (1.0, -0.5, 2.0, 0.25, -4.0, 8.0)

    def __init__(self):
        self.observation_space, self.action_space = Box(0, 9, (1,), np.float32), worlds.UNIT

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._state, self._left = (int(drawn) for drawn in self.np_random.integers([0, 1], [6, 8]))
        return np.float32([self._state]), {}

    def step(self, action):
        reward = self.rewards[self._state]
        self._state, self._left = self._state + 1, self._left - 1
        terminated = self._state == len(self.rewards)
        return np.float32([self._state]), reward, terminated, self._left == 0, {}

    @classmethod
    def values(cls) -> list[float]:
        """The discounted sum of the rewards from each state on."""
        rewards = cls.rewards
        return [sum(HALF**k * r for k, r in enumerate(rewards[at:])) for at in range(len(rewards))]


def collected(n_step: int, rounds: int = 150) -> list[Array]:
    """The rows of each of three explorers of one actor, those that it holds at its end included."""
    envs = [Chain() for _ in range(3)]
    config = AgentConfig(n_step=n_step, gamma=HALF)
    schema = schema_of(envs[0], "chain")
    explorers = actor_explorers(envs, schema, config=config, agent_id=1, seed=3, actor=2)
    rollout, rows = Rollout(explorers), [[], [], []]
    for _ in range(rounds):
        for number, step in enumerate(rollout.round(Behaviour(POLICY, 7))):
            rows[number] += step.rows
    for number, each in enumerate(explorers):
        rows[number] += each.flush()
    assert rollout.flush() == []
    return [np.array(each) for each in rows]


def evaluated(rows: Array, state: slice | int, then: slice | int, reward: int, *, discount=HALF):
    """The table for which each row's target, r + γ · bootstrap · V(s'), is right in the mean; float64."""
    rows = rows.astype(np.float64)
    visited = sorted({*rows[:, state]})
    system, right = np.eye(len(visited)), np.zeros(len(visited))
    for number, each in enumerate(visited):
        of_state = rows[rows[:, state] == each]
        right[number] = of_state[:, reward].mean()
        for row in of_state[of_state[:, reward + 1] != 0]:
            system[number, visited.index(row[then])] -= discount * row[reward + 1] / len(of_state)
    return np.linalg.solve(system, right)


@pytest.mark.parametrize("n_step", [1, 2, 3, 7])
def test_the_values_of_a_chain_follow_from_the_rows_whatever_n_is(n_step):
    rows = np.concatenate(collected(n_step))
    assert {0.0, *(HALF**k for k in range(min(n_step, 5)))} <= {*rows[:, 4].tolist()}
    np.testing.assert_allclose(evaluated(rows, 0, 2, 3), Chain.values(), rtol=0, atol=1e-14)


def test_each_step_of_each_environment_is_one_row_in_order_whatever_n_is():
    for single, several in zip(collected(1), collected(3), strict=True):
        assert single.shape == several.shape == (150, 7)
        same = [0, 1, 5, 6]  # observation, action, agent and version
        assert single[:, same].tobytes() == several[:, same].tobytes()


class Paid(worlds.Clock):
    """Pays the action; endless."""

    length = None

    def reward(self, action):
        return float(action[0])


class PlusPlusMinusMinus:
    """Acts by the time: 1, 1, -1, -1 and so on, so that either action comes after either alike."""

    def act(self, observation):
        return np.where(observation[:, :1] % 4 < 2, 1, -1).astype(np.float32)


@pytest.mark.parametrize(("n_step", "value"), [(1, 1 / (1 - HALF)), (2, 1 / (1 - HALF**2))])
def test_of_actions_after_the_first_the_return_is_the_collectors_not_the_policys(n_step, value):
    """Q(1) of who always takes 1, from rows of who takes 1 every other time: two steps lose the second."""
    exploring = explorer(Paid(), n_step=n_step)
    steps = [exploring.step(PlusPlusMinusMinus(), 0) for _ in range(80 + n_step - 1)]
    rows = np.array([row for step in steps for row in step.rows])
    action, taken = 2, np.ones((len(rows), 1), np.float32)  # the policy's, after the return
    table = evaluated(np.hstack([rows[:, :7], taken]), action, 7, 5)
    assert table[1] == pytest.approx(value, rel=1e-13)


# -- ends of returns ----------------------------------------------------------------------------------


def test_a_refused_reward_ends_the_returns_before_it_as_a_truncation_does():
    steps = steps_of(explorer(worlds.NanReward()), 6)
    assert [len(step.rows) for step in steps] == [0, 0, 2, 0, 0, 1]
    assert [step.reason for step in steps] == [None, None, "reward", None, None, None]
    assert brief(steps[2].rows) == [(0, 2, 1.5, 0.5), (1, 2, 1, 1)]
    assert brief(steps[5].rows) == [(3, 6, 1.75, 0.25)]


def test_no_return_reaches_over_an_observation_that_is_not_finite():
    rows = [row for step in steps_of(explorer(worlds.NanAtStep50()), 100) for row in step.rows]
    assert sorted({*range(100)} - {row[0] for row in rows}) == [49, 50]
    assert np.isfinite(rows).all()
    assert brief(rows[46:50]) == [
        (46, 49, 1.75, 0.25),
        (47, 49, 1.5, 0.5),
        (48, 49, 1, 1),
        (51, 54, 1.75, 0.25),
    ]


def test_a_return_that_float32_cannot_hold_is_refused_like_such_a_reward():
    class Huge(worlds.Clock):
        length = None

        def reward(self, action):
            return 3e38 if self.time in (2, 3) else 1.0

    steps = steps_of(explorer(Huge(), n_step=2), 6)
    assert [step.reason for step in steps] == [None, None, "reward", None, None, None]
    assert [row[0] for step in steps for row in step.rows] == [0, 2, 3, 4]


def breaking(*, at=5, max_restarts=2):
    """A Clock that raises in each of its steps with this number, and is made anew."""
    make = partial(make_env, "worlds:RaisesAtStep", {"at": at})
    return RestartableEnv(make, Watch("agent 0"), max_restarts=max_restarts, pause=lambda seconds: None)


CUT = [(2, 4, 1.5, 0.5), (3, 4, 1, 1)]
"""What is held of four steps when the fifth raises."""


@pytest.mark.parametrize("observed", [False, True], ids=["by itself", "in a rollout"])
def test_what_is_held_when_an_environment_is_made_anew_goes_out_first_with_the_next_step(observed):
    exploring, steps = explorer(breaking()), []
    for _ in range(7):
        if observed:
            exploring.observe()
        steps.append(exploring.step(POLICY, 0))
    assert [len(step.rows) for step in steps] == [0, 0, 1, 1, 2, 0, 1]
    assert steps[4].restarts == ("step",)
    assert brief(steps[4].rows) == CUT
    assert brief(steps[6].rows) == [(0, 3, 1.75, 0.25)]


def test_what_is_held_when_an_environment_fails_for_good_is_kept():
    failed = explorer(breaking(max_restarts=0))
    steps_of(failed, 4)
    with pytest.raises(EnvironmentFailedError):
        failed.step(POLICY, 0)
    resumed = explorer(worlds.Clock())
    resumed.resume(*failed.state())
    assert resumed.replay()
    assert brief(resumed.step(POLICY, 0).rows) == brief(failed.flush()) == CUT


def test_a_return_of_one_step_out_of_many_comes_at_the_end_of_its_episode():
    steps = steps_of(explorer(worlds.Terminating(), n_step=100), 20)
    assert [len(step.rows) for step in steps] == ([0] * 9 + [10]) * 2
    rows = brief(steps[9].rows)
    assert {row[3] for row in rows} == {0}
    assert rows[-3:] == [(7, 10, 1.75, 0), (8, 10, 1.5, 0), (9, 10, 1, 0)]


# -- going on from a saved state ----------------------------------------------------------------------


@pytest.mark.parametrize("world", [worlds.PointGoal, worlds.StaggeredEnds, worlds.NanReward])
@pytest.mark.parametrize("at", [0, 1, 2, 19, 20, 21, 33])
def test_an_explorer_goes_on_from_where_another_was_saved(world, at):
    straight, resumed = (explorer(world(), start_steps=25, noise=0.1) for _ in range(2))
    steps_of(straight, at)
    resumed.resume(*straight.state())
    assert resumed.replay()
    pairs = zip(steps_of(straight, 45), steps_of(resumed, 45), strict=True)
    assert all(np.array(one.rows).tobytes() == np.array(two.rows).tobytes() for one, two in pairs)
    assert np.array(straight.flush()).tobytes() == np.array(resumed.flush()).tobytes()


def test_single_steps_keep_nothing_more_and_what_kept_nothing_goes_on_as_if_nothing_were_held():
    for n_step, held in ((1, []), (3, ["held"])):
        exploring = explorer(worlds.Clock(), n_step=n_step)
        steps_of(exploring, 5)
        numbers, arrays = exploring.state()
        assert [*arrays] == ["actions", "observation", *held]
    resumed = explorer(worlds.Clock())
    resumed.resume(numbers, {name: array for name, array in arrays.items() if name != "held"})
    assert resumed.replay()
    assert [row[0] for step in steps_of(resumed, 3) for row in step.rows] == [5]


@pytest.mark.parametrize("longest", [3, 10_000], ids=["too long to keep", "it does not repeat"])
def test_where_an_episode_cannot_be_gone_on_with_what_is_held_of_it_goes_out_first(monkeypatch, longest):
    monkeypatch.setattr("dase_grpc.learning.envs.explorer.REPLAYED_STEPS", longest)
    exploring = explorer(worlds.Unrepeatable())
    steps_of(exploring, 7)
    expected, resumed = exploring.state(), explorer(worlds.Unrepeatable())
    resumed.resume(*expected)
    assert not resumed.replay()
    first, second = steps_of(resumed, 2)
    assert np.array(first.rows).tobytes() == np.array(exploring.flush()).tobytes()
    assert (len(first.rows), second.rows) == (2, ())
