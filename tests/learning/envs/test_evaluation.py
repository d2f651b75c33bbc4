import math

import numpy as np
import plain_policies
import pytest
import worlds

from dase_grpc.errors import DivergedError, EnvironmentSpecError
from dase_grpc.learning.envs import evaluation
from dase_grpc.learning.envs.evaluation import Evaluation, Evaluator, record_episode
from dase_grpc.learning.envs.make import make_env, schema_of


class Maker:
    """Makes environments and keeps them for inspection."""

    def __init__(self, world, **kwargs):
        self._world, self._kwargs, self.made = world, kwargs, []

    def __call__(self):
        self.made.append(self._world(**self._kwargs))
        return self.made[-1]

    def evaluator(self, episodes=3, max_episode_steps=50, seed=11):
        schema = schema_of(self._world(**self._kwargs), "a world")
        return Evaluator(self, schema, episodes=episodes, max_episode_steps=max_episode_steps, seed=seed)


def test_returns_and_lengths_are_summed_per_episode():
    result = Maker(worlds.Clock).evaluator().evaluate(plain_policies.ConstantPolicy(0.0))
    assert result == Evaluation(
        return_mean=10.0, return_std=0.0, episodes=3, returns=(10.0,) * 3, lengths=(10,) * 3, cut=0
    )


def test_the_deviation_is_the_populations():
    result = Maker(worlds.StaggeredEnds).evaluator(episodes=8).evaluate(plain_policies.ConstantPolicy(0.0))
    assert len(set(result.returns)) > 2
    assert result.return_mean == pytest.approx(sum(result.returns) / 8)
    variance = sum((value - result.return_mean) ** 2 for value in result.returns) / 8
    assert result.return_std == pytest.approx(math.sqrt(variance))


def test_episode_i_is_reset_once_with_the_seed_plus_twice_i():
    maker = Maker(worlds.Clock)
    maker.evaluator(seed=11).evaluate(plain_policies.ConstantPolicy(0.0))
    assert [env.seeds for env in maker.made] == [[11], [13], [15]]


def test_every_evaluation_uses_fresh_environments_and_closes_them():
    maker = Maker(worlds.Clock)
    evaluator = maker.evaluator()
    assert maker.made == []
    evaluator.evaluate(plain_policies.ConstantPolicy(0.0))
    evaluator.evaluate(plain_policies.ConstantPolicy(0.0))
    assert [env.closed for env in maker.made] == [1] * 6


def test_the_same_policy_gives_the_identical_result_and_a_better_one_a_better_return():
    evaluator = Maker(worlds.PointGoal).evaluator(episodes=10)
    best = evaluator.evaluate(plain_policies.GoalPolicy())
    assert best == evaluator.evaluate(plain_policies.GoalPolicy())
    assert -3 < best.return_mean < 0
    assert best.return_mean > evaluator.evaluate(plain_policies.ConstantPolicy(0.0)).return_mean + 5


def test_the_policy_is_asked_once_per_step_for_all_episodes_still_going_on():
    maker, policy = Maker(worlds.StaggeredEnds), plain_policies.ConstantPolicy(0.0)
    result = maker.evaluator(episodes=8).evaluate(policy)
    expected = [sum(length > step for length in result.lengths) for step in range(max(result.lengths))]
    assert [len(asked) for asked in policy.asked] == expected
    assert expected[0] == 8 > expected[-1]


def test_more_episodes_than_environments_at_once_are_played_in_turn(monkeypatch):
    policy = plain_policies.ConstantPolicy(0.0)
    expected = Maker(worlds.StaggeredEnds).evaluator(episodes=8, max_episode_steps=5).evaluate(policy)
    monkeypatch.setattr(evaluation, "SIDE_BY_SIDE", 3)
    maker = Maker(worlds.StaggeredEnds)
    assert maker.evaluator(episodes=8, max_episode_steps=5).evaluate(policy) == expected
    assert [env.seeds for env in maker.made] == [[11 + 2 * i] for i in range(8)]
    assert max(map(len, policy.asked[-expected.lengths[-1] :])) <= 3


def test_an_ended_environment_is_not_stepped_again():
    maker = Maker(worlds.StaggeredEnds)
    result = maker.evaluator(episodes=8).evaluate(plain_policies.ConstantPolicy(0.0))
    assert tuple(len(env.actions) for env in maker.made) == result.lengths


def test_each_environment_gets_its_own_action_without_noise_in_its_own_units():
    class Follow:
        def act(self, observation):
            return np.repeat(observation[:, :1] / 100, 3, axis=1)

    maker = Maker(worlds.EndpointAction)
    maker.evaluator().evaluate(Follow())
    assert np.allclose(maker.made[2].actions, [0, 0.5, 0.5])


@pytest.mark.parametrize(("upper", "action"), [(False, -1.0), (True, 1.0)])
def test_the_ends_of_the_action_box_are_reached_exactly(upper, action):
    evaluator = Maker(worlds.EndpointAction, upper=upper).evaluator()
    assert evaluator.evaluate(plain_policies.ConstantPolicy(action, action, action)).return_mean == 0


@pytest.mark.parametrize(("world", "cap", "cut"), [(worlds.Endless, 20, 3), (worlds.Clock, 10, 0)])
def test_episodes_that_do_not_end_are_cut_and_counted_but_not_those_that_end_at_the_cap(world, cap, cut):
    result = Maker(world).evaluator(max_episode_steps=cap).evaluate(plain_policies.ConstantPolicy(0.0))
    assert (result.cut, result.lengths, result.return_mean) == (cut, (cap,) * 3, float(cap))


def test_where_an_observation_is_not_finite_the_action_is_zero_and_the_policy_sees_no_nan():
    class NanInOneEpisode(worlds.Clock):
        def observe(self):
            return np.array([np.nan if self.time == 4 and self.seeds == [13] else self.time, 0])

    maker, policy = Maker(NanInOneEpisode), plain_policies.ConstantPolicy(0.5)
    result = maker.evaluator().evaluate(policy)
    assert result.return_mean == 10
    assert np.isfinite(np.concatenate(policy.asked)).all()
    assert [len(asked) for asked in policy.asked] == [3] * 10
    zeros = [[i for i, action in enumerate(env.actions) if action[0] == 0] for env in maker.made]
    assert zeros == [[], [4], []]


def test_a_return_that_is_not_finite_stays_so_in_the_result_without_a_warning():
    class Infinite(worlds.Clock):
        def reward(self, action):
            return math.inf

    result = Maker(worlds.NanReward).evaluator().evaluate(plain_policies.ConstantPolicy(0.0))
    assert all(math.isnan(value) for value in (result.return_mean, result.return_std, *result.returns))
    assert result.lengths == (10, 10, 10)
    result = Maker(Infinite).evaluator().evaluate(plain_policies.ConstantPolicy(0.0))
    assert result.return_mean == math.inf
    assert math.isnan(result.return_std)


def test_environments_are_closed_when_one_of_them_raises():
    maker = Maker(worlds.RaisesAtStep)
    with pytest.raises(RuntimeError, match="broke at step 3"):
        maker.evaluator().evaluate(plain_policies.ConstantPolicy(0.0))
    assert [env.closed for env in maker.made] == [1, 1, 1]


def test_environments_are_closed_when_the_next_cannot_be_made():
    maker = Maker(worlds.Clock)

    def make():
        if len(maker.made) == 2:
            raise EnvironmentSpecError("no more licences")
        return maker()

    schema = schema_of(worlds.Clock(), "a world")
    with pytest.raises(EnvironmentSpecError):
        Evaluator(make, schema, episodes=3, max_episode_steps=5, seed=1).evaluate(
            plain_policies.ConstantPolicy(0.0)
        )
    assert [env.closed for env in maker.made] == [1, 1]


def test_a_policy_that_gives_no_finite_action_is_an_error_that_says_so():
    with pytest.raises(DivergedError, match="the policy has diverged: its actions are not finite; lower "):
        Maker(worlds.Clock).evaluator().evaluate(plain_policies.ConstantPolicy(np.nan))


def test_evaluating_leaves_reused_observation_buffers_behind():
    policy = plain_policies.ConstantPolicy(0.0)
    Maker(worlds.BufferReuse).evaluator(episodes=1).evaluate(policy)
    assert [asked[0, 0] for asked in policy.asked] == list(range(10))


def test_a_half_cheetah_can_be_evaluated():
    schema = schema_of(make_env("HalfCheetah-v5", {}), "HalfCheetah-v5")
    evaluator = Evaluator(
        lambda: make_env("HalfCheetah-v5", {}), schema, episodes=2, max_episode_steps=20, seed=1
    )
    policy = plain_policies.ConstantPolicy(*[0.3] * 6)
    result = evaluator.evaluate(policy)
    assert result == evaluator.evaluate(policy)
    assert (result.cut, result.lengths) == (2, (20, 20))
    assert result.returns[0] != result.returns[1]


# --- video ---


def record(env, **options):
    schema = schema_of(env, "a world")
    settings = {"seed": 3, "max_episode_steps": 100, **options}
    return record_episode(env, plain_policies.GoalPolicy(), schema, **settings)


def test_a_recorded_episode_has_a_frame_for_each_state_and_its_return():
    frames, total = record(worlds.PointGoal(render_mode="rgb_array"))
    assert len(frames) == 21
    assert all(frame.shape == (16, 32, 3) and frame.dtype == np.uint8 for frame in frames)
    assert not np.array_equal(frames[0], frames[-1])
    evaluated = Maker(worlds.PointGoal).evaluator(episodes=1, seed=3).evaluate(plain_policies.GoalPolicy())
    assert total == evaluated.return_mean


def test_a_recorded_episode_that_does_not_end_is_cut():
    frames, _ = record(worlds.PointGoal(render_mode="rgb_array", length=1000), max_episode_steps=7)
    assert len(frames) == 8


def test_recorded_frames_are_copies():
    class OneCanvas(worlds.PointGoal):
        canvas = np.zeros((2, 2, 3), np.uint8)

        def render(self):
            self.canvas += 1
            return self.canvas

    frames, _ = record(OneCanvas(render_mode="rgb_array"))
    assert [frame[0, 0, 0] for frame in frames] == list(range(1, 22))


def test_an_environment_that_does_not_render_is_refused_with_the_remedy():
    with pytest.raises(EnvironmentSpecError, match='render_mode="rgb_array"'):
        record(worlds.PointGoal())


def test_a_renderer_that_fails_is_refused_with_its_cause():
    class NoDisplay(worlds.PointGoal):
        def render(self):
            raise OSError("no display\nfound")

    with pytest.raises(EnvironmentSpecError, match=r"OSError: no display found.*MUJOCO_GL"):
        record(NoDisplay(render_mode="rgb_array"))
