import json
import logging

import numpy as np
import plain_policies
import pytest
import worlds
from contracts.sentences import assert_one_sentence
from gymnasium.spaces import Box

from dase_grpc.errors import DivergedError
from dase_grpc.learning.envs.explorer import Explorer
from dase_grpc.learning.envs.make import schema_of
from dase_grpc.learning.envs.noise import Gaussian
from dase_grpc.learning.envs.steps import Episode
from dase_grpc.schema import TransitionSchema

POLICY = plain_policies.ConstantPolicy(0.25)


def explorer(env, *, seed=0, agent_id=0, first_seed=100, start_steps=0, noise=0.0, anew=False) -> Explorer:
    return Explorer(
        env,
        schema_of(env, "a world"),
        agent_id=agent_id,
        rng=np.random.default_rng(seed),
        episode_seed=lambda episode: first_seed + 2 * episode,
        start_steps=start_steps,
        noise=Gaussian(noise),
        anew=anew,
    )


def explore(env, count, policy=POLICY, version=0, **options):
    exploring = explorer(env, **options)
    return exploring, [exploring.step(policy, version) for _ in range(count)]


def named(env, steps):
    schema: TransitionSchema = schema_of(env, "a world")
    return schema.named(np.stack([row for step in steps for row in step.rows]))


def test_a_row_holds_what_the_environment_returned():
    env = worlds.Clock()
    _, steps = explore(env, 3, agent_id=7, version=5)
    rows = named(env, steps)
    assert steps[0].rows[0].dtype == np.float32
    assert steps[0].rows[0].shape == (schema_of(env, "").width,)
    assert rows["observation"].tolist() == [[0, 0], [1, 0], [2, 0]]
    assert rows["next_observation"].tolist() == [[1, 0], [2, 0], [3, 0]]
    assert rows["action"].tolist() == [[0.25]] * 3
    assert rows["reward"].tolist() == [1, 1, 1]
    assert rows["bootstrap"].tolist() == [1, 1, 1]
    assert rows["agent_id"].tolist() == [7, 7, 7]
    assert rows["policy_version"].tolist() == [5, 5, 5]


def test_large_policy_versions_keep_their_bit_pattern():
    env = worlds.Clock()
    _, steps = explore(env, 1, version=2**32 - 1, agent_id=2**31 - 1)
    assert named(env, steps)["policy_version"].tolist() == [2**32 - 1]
    assert named(env, steps)["agent_id"].tolist() == [2**31 - 1]


def test_nothing_happens_before_the_first_step():
    env = worlds.Clock()
    explorer(env)
    assert (env.seeds, env.actions) == ([], [])


def test_each_episode_has_its_own_seed_and_each_step_is_exactly_one_environment_step():
    env = worlds.Clock()
    explore(env, 25, first_seed=42)
    assert env.seeds == [42, 44, 46]
    assert len(env.actions) == 25


def test_the_stored_next_observation_is_the_last_of_the_episode_and_then_a_new_one_begins():
    env = worlds.Clock()
    _, steps = explore(env, 11)
    rows = named(env, steps)
    assert rows["next_observation"][9].tolist() == [10, 0]
    assert rows["observation"][10].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("world", "last"), [(worlds.ConstantReward, 1), (worlds.Terminating, 0), (worlds.BothFlags, 0)]
)
def test_truncation_bootstraps_termination_does_not_and_wins_where_both_flags_are_set(world, last):
    env = world()
    _, steps = explore(env, 20)
    assert named(env, steps)["bootstrap"].tolist() == ([1] * 9 + [last]) * 2
    assert steps[-1].episode == Episode(10.0, 10)


@pytest.mark.parametrize(("world", "return_"), [(worlds.Clock, 10.0), (worlds.HugeReward, 1e300)])
def test_an_ended_episode_is_reported_with_length_and_return_in_float64(world, return_):
    _, steps = explore(world(), 20)
    assert [step.episode for step in steps] == ([None] * 9 + [Episode(return_, 10)]) * 2


@pytest.mark.parametrize("world", [worlds.BufferReuse, worlds.SpoilsActions])
def test_copies_are_stored_where_the_environment_reuses_or_overwrites_an_array(world):
    env = world()
    _, steps = explore(env, 3)
    rows = named(env, steps)
    assert rows["observation"][:, 0].tolist() == [0, 1, 2]
    assert rows["next_observation"][:, 0].tolist() == [1, 2, 3]
    assert rows["action"].tolist() == [[0.25]] * 3


def test_a_row_belongs_to_the_receiver():
    exploring = explorer(worlds.Clock())
    (first,) = exploring.step(POLICY, 0).rows
    first[:] = 99
    assert exploring.step(POLICY, 0).rows[0][0] == 1


def test_the_first_actions_are_uniform_and_the_policy_is_not_asked():
    policy = plain_policies.ConstantPolicy(0.25)
    env = worlds.Clock()
    _, steps = explore(env, 501, policy, start_steps=500)
    actions = named(env, steps)["action"][:500]
    assert len(policy.asked) == 1
    assert len(np.unique(actions)) > 490
    assert actions.min() < -0.9
    assert actions.max() > 0.9
    assert abs(actions.mean()) < 0.1


def test_later_actions_are_the_policys_plus_noise():
    env = worlds.Clock()
    _, steps = explore(env, 1000, noise=0.1)
    actions = named(env, steps)["action"]
    assert actions.mean() == pytest.approx(0.25, abs=0.02)
    assert actions.std() == pytest.approx(0.1, abs=0.01)


def test_the_stored_action_is_normalised_and_clipped_and_the_environments_is_in_its_units():
    env = worlds.EndpointAction()
    _, steps = explore(env, 50, plain_policies.ConstantPolicy(1.0, -1.0, 0.0), noise=0.5)
    actions = named(env, steps)["action"]
    assert np.abs(actions).max() == 1
    assert np.allclose(np.stack(env.actions), actions * [1, 0.5, 0.5] + [0, 0.5, 0.5])


def test_the_policy_is_asked_with_one_float32_row():
    policy = plain_policies.ConstantPolicy(0.0)
    explore(worlds.Clock(), 2, policy)
    assert policy.asked[1].dtype == np.float32
    assert policy.asked[1].tolist() == [[1, 0]]


def test_the_same_seeds_give_the_same_rows_and_another_seed_gives_others():
    def rows(seed):
        return [
            s.rows[0].tobytes()
            for s in explore(worlds.PointGoal(), 40, start_steps=20, noise=0.1, seed=seed)[1]
        ]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_rows_around_a_nan_observation_are_refused_and_its_action_is_random_and_not_the_policys():
    env, policy = worlds.NanAtStep50(), plain_policies.ConstantPolicy(0.25)
    _, steps = explore(env, 100, policy)
    assert [index for index, step in enumerate(steps) if not step.rows] == [49, 50]
    assert [step.reason for step in steps[48:52]] == [None, "observation", "observation", None]
    assert steps[-1].episode == Episode(100.0, 100)
    assert len(policy.asked) == 99
    assert np.isfinite(np.stack(policy.asked)).all()
    assert [index for index, action in enumerate(env.actions) if action[0] != 0.25] == [50]


@pytest.mark.parametrize(
    ("world", "at", "reason"),
    [
        (worlds.HugeObservation, [2, 3], "observation"),
        (worlds.HugeReward, [6], "reward"),
        (worlds.NanReward, [2], "reward"),
    ],
)
def test_what_float32_cannot_hold_is_refused_without_a_warning(world, at, reason):
    _, steps = explore(world(), 10)
    assert {index: step.reason for index, step in enumerate(steps) if not step.rows} == dict.fromkeys(
        at, reason
    )


def test_the_step_that_ends_an_episode_reports_it_even_if_its_row_is_refused():
    class NanAtTheEnd(worlds.Clock):
        def observe(self):
            return np.array([np.nan if self.time == 10 else 0, 0])

    _, steps = explore(NanAtTheEnd(), 11)
    assert (steps[9].rows, steps[9].reason, steps[9].episode) == ((), "observation", Episode(10.0, 10))
    assert len(steps[10].rows) == 1


def test_after_a_hundred_refused_rows_in_a_row_the_environment_is_reset_and_that_is_logged_once(caplog):
    env = worlds.AlwaysNan()
    with caplog.at_level(logging.WARNING):
        _, steps = explore(env, 350, agent_id=3)
    assert env.seeds == [100, 102, 104, 106]
    assert all(not step.rows and step.episode is None for step in steps)
    assert {step.reason for step in steps} == {"observation"}
    (record,) = caplog.records
    assert record.getMessage().startswith("agent 3: 100 transitions in a row were not finite")


def test_a_good_row_starts_the_count_of_refused_ones_anew():
    class MostlyNan(worlds.Endless):
        def observe(self):
            return np.array([0 if self.time % 100 < 2 else np.nan, 0])

    env = MostlyNan()
    explore(env, 1000)
    assert env.seeds == [100]


def test_a_policy_that_gives_no_finite_action_is_an_error_that_says_so():
    exploring = explorer(worlds.Clock(), agent_id=3)
    exploring.step(POLICY, 0)
    for bad in (np.nan, np.inf):
        with pytest.raises(DivergedError) as caught:
            exploring.step(plain_policies.ConstantPolicy(bad), 0)
        assert_one_sentence(caught.value, "agent 3 at step 1 ", "lower agent.actor_lr")


def test_what_the_environment_raises_surfaces():
    with pytest.raises(RuntimeError, match="the simulator broke at step 3"):
        explore(worlds.RaisesAtStep(3), 3)


# -- going on from a saved state ----------------------------------------------------------------------


def through_json(numbers):
    return json.loads(json.dumps(numbers, allow_nan=False))


@pytest.mark.parametrize(
    "world", [worlds.PointGoal, worlds.StaggeredEnds, worlds.NanAtStep50, worlds.HugeReward]
)
@pytest.mark.parametrize("at", [0, 1, 19, 20, 33, 50, 51, 60])
def test_an_explorer_goes_on_from_where_another_was_saved(world, at):
    options = {"start_steps": 25, "noise": 0.1, "seed": 4}
    straight, steps = explore(world(), at, **options)
    numbers, arrays = straight.state()
    resumed = explorer(world(), **options)
    resumed.resume(through_json(numbers), arrays)
    assert resumed.replay()
    for _ in range(45):
        one, two = (each.step(POLICY, 0) for each in (straight, resumed))
        assert (one.reason, one.episode) == (two.reason, two.episode)
        assert [row.tobytes() for row in one.rows] == [row.tobytes() for row in two.rows]
    assert len(steps) == at


def test_an_explorer_that_goes_on_anew_ends_its_episode_and_draws_from_streams_of_its_own():
    straight, _ = explore(worlds.PointGoal(), 33, start_steps=1_000, seed=4)
    resumed = explorer(worlds.PointGoal(), start_steps=1_000, seed=5, first_seed=901, anew=True)
    numbers, arrays = straight.state()
    resumed.resume(through_json(numbers), arrays)
    assert resumed.replay(), "the episode is played again by the seed that it began with"
    other, ours = ([each.step(POLICY, 0).rows[0] for _ in range(20)] for each in (straight, resumed))
    assert ours[0][0] == other[0][0]
    assert not any(np.array_equal(*pair) for pair in zip(ours, other, strict=True))
    start, _ = worlds.PointGoal().reset(seed=901 + 2 * 2)
    assert ours[7][0] == start[0]
    again = explorer(worlds.PointGoal(), start_steps=1_000, seed=6, first_seed=7, anew=True)
    again.resume(*resumed.state())
    assert again.replay()


def test_a_state_that_was_saved_without_its_episodes_seed_is_gone_on_from():
    straight, _ = explore(worlds.PointGoal(), 33)
    numbers, arrays = straight.state()
    del numbers["seed"]
    resumed = explorer(worlds.PointGoal())
    resumed.resume(numbers, arrays)
    assert resumed.replay()


def test_a_saved_state_is_not_changed_by_what_comes_after():
    exploring, _ = explore(worlds.PointGoal(), 7)
    numbers, arrays = exploring.state()
    before = {name: array.copy() for name, array in arrays.items()}
    for _ in range(7):
        exploring.step(POLICY, 0)
    assert arrays["actions"].shape == (7, 1)
    assert all((arrays[name] == before[name]).all() for name in before)
    assert numbers["length"] == 7


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: worlds.PointGoal(length=5), id="it ends earlier"),
        pytest.param(worlds.RewardedGoal, id="it rewards otherwise"),
        pytest.param(worlds.Unrepeatable, id="it observes otherwise"),
    ],
)
def test_where_the_environment_comes_elsewhere_a_new_episode_begins_and_that_is_said(other, caplog):
    exploring, _ = explore(worlds.PointGoal(), 27)
    env = other()
    resumed = explorer(env, agent_id=3)
    with caplog.at_level(logging.WARNING):
        resumed.resume(*exploring.state())
        assert not resumed.replay()
    (record,) = caplog.records
    assert "agent 3 at step 27: the environment is not where it was" in record.getMessage()
    start, _ = env.reset(seed=104)  # that of the third episode
    assert resumed.step(POLICY, 0).rows[0][0] == start[0]


def test_of_an_episode_too_long_to_keep_nothing_is_kept_and_a_new_one_begins(monkeypatch, caplog):
    monkeypatch.setattr("dase_grpc.learning.envs.explorer.REPLAYED_STEPS", 30)
    exploring, _ = explore(worlds.Endless(), 31)
    numbers, arrays = exploring.state()
    assert arrays == {}
    with caplog.at_level(logging.WARNING):
        assert not resumed_from(worlds.Endless(), numbers, arrays)
    assert "more than 30 steps" in caplog.text
    at_the_limit, _ = explore(worlds.Endless(), 30)
    assert resumed_from(worlds.Endless(), *at_the_limit.state())


def resumed_from(env, numbers, arrays) -> bool:
    exploring = explorer(env)
    exploring.resume(numbers, arrays)
    return exploring.replay()


def test_what_the_environment_raises_while_it_plays_again_surfaces():
    exploring, _ = explore(worlds.Clock(), 7)
    with pytest.raises(RuntimeError, match="the simulator broke at step 3"):
        resumed_from(worlds.RaisesAtStep(3), *exploring.state())


class Stamped(worlds.Clock):
    """Its observation holds the time in Unix seconds, from its first or only in its last step."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self._at_once = at_once
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float64)

    def reset(self, **options):
        observation, info = super().reset(**options)
        return observation + np.array([0, 1764402570.25 * self._at_once]), info

    def step(self, action):
        observation, *rest = super().step(action)
        return (observation + np.array([0, 1764402570.25]), *rest)


@pytest.mark.parametrize(("at_once", "steps"), [(True, 1), (False, 10)])
def test_observations_that_float32_is_too_coarse_for_are_said_once(caplog, at_once, steps):
    exploring, _ = explore(Stamped(at_once=at_once), steps)
    assert [record.getMessage() for record in caplog.records] == [
        "agent 0: observations are float32 here, and observation 1 is 1764402570.25 and is stored as "
        "1764402560, so that small changes of it are lost; have the environment return it scaled, or its "
        "difference from a start value"
    ]
    for _ in range(25):
        exploring.step(POLICY, 0)
    assert len(caplog.records) == 1
