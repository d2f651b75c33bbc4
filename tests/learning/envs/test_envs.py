import logging
import sys
import warnings
from pathlib import Path

import gymnasium
import mujoco
import numpy as np
import pytest
import worlds
from gymnasium.spaces import Box

from dase_grpc.errors import EnvironmentSpecError
from dase_grpc.learning.envs.answers import ActionMap, coarsened, to_float32
from dase_grpc.learning.envs.make import EXPECTED_WARNING, make_env, schema_of

SUPPORTED = [
    "Ant-v5",
    "HalfCheetah-v5",
    "Hopper-v5",
    "Humanoid-v5",
    "Swimmer-v5",
    "Walker2d-v5",
    "InvertedPendulum-v5",
    "InvertedDoublePendulum-v5",
    "LunarLanderContinuous-v3",
    "BipedalWalker-v3",
    "Pendulum-v1",
]


def refusal(env_id, kwargs=None, **options):
    with pytest.raises(EnvironmentSpecError) as caught:
        make_env(env_id, kwargs or {}, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    return sentence


# --- making ---


@pytest.mark.parametrize("env_id", SUPPORTED)
def test_the_supported_environments_step_without_a_word(env_id, capfd, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo would leave its MUJOCO_LOG.TXT here
    env = make_env(env_id, {})
    schema = schema_of(env, env_id)
    observation, _ = env.reset(seed=1)
    assert to_float32(observation, schema.observation_size).shape == (schema.observation_size,)
    env.step(ActionMap(env.action_space)(np.zeros(schema.action_size, np.float32)))
    env.close()
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert list(tmp_path.iterdir()) == []


def test_keyword_arguments_reach_the_environment():
    assert make_env("worlds:PointGoal", {"length": 3}).unwrapped.length == 3
    assert make_env("Pendulum-v1", {"g": 3.0}).unwrapped.g == 3.0
    assert make_env("Pendulum-v1", {"max_episode_steps": 4}).spec.max_episode_steps == 4
    assert make_env("worlds:limited", {"max_episode_steps": 4}).get_wrapper_attr("_max_episode_steps") == 4


def test_the_render_mode_reaches_the_environment_only_where_it_is_given():
    assert make_env("worlds:PointGoal", {}, render_mode="rgb_array").render_mode == "rgb_array"
    assert make_env("worlds:PointGoal", {}).render_mode is None
    assert make_env("Pendulum-v1", {}, render_mode="rgb_array").render_mode == "rgb_array"
    assert "render_mode" in refusal("worlds:BothFlags", render_mode="rgb_array")


def test_a_module_may_register_the_environment_instead_of_holding_it():
    assert make_env("worlds:RegisteredWorld-v0", {}).spec.max_episode_steps == 5
    assert isinstance(make_env("RegisteredWorld-v0", {}).unwrapped, worlds.PointGoal)


def test_a_module_in_the_current_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    Path("my_own_world.py").write_text("from worlds import PointGoal as Mine\n", encoding="utf-8")
    assert isinstance(make_env("my_own_world:Mine", {}).unwrapped, worlds.PointGoal)


def test_gymnasiums_passive_checker_runs_only_where_it_is_asked_for():
    assert "PassiveEnvChecker" not in str(make_env("Pendulum-v1", {}))
    assert "PassiveEnvChecker" in str(make_env("Pendulum-v1", {"disable_env_checker": False}))


# --- what cannot be made ---


@pytest.mark.parametrize(
    ("env_id", "said"),
    [
        ("HalfCheeta-v5", "did you mean 'HalfCheetah-v5'?"),
        ("HalfCheetah-v9", "did you mean 'HalfCheetah-v5'?"),
        ("cheetah", "did you mean 'HalfCheetah-v5'?"),
        ("LunarLanderContinuous-v2", "did you mean 'LunarLanderContinuous-v3'?"),
        ("walker2d", "did you mean 'Walker2d-v5'?"),
        ("ALE/Pong-v5", "package:Name-v0"),
        ("two words!", "there is no environment 'two words!'"),
        ("worlds:PointGaol", "neither has 'PointGaol' nor registers"),
        ("worlds:PointGaol", "did you mean 'PointGoal'?"),
        ("worlds:RegisteredWorld-v3", "did you mean 'RegisteredWorld-v0'?"),
        ("Pendulum:v1", "no module 'Pendulum'"),
        ("worlds.nothing:Env", "no module 'worlds.nothing'"),
        (":Env", "importing ''"),
        ("no_such_world:Env", "no module 'no_such_world'"),
        ("worlds:returns_nothing", "returned nothing instead of a gymnasium.Env"),
        ("plain_policies:ConstantPolicy", "returned an object of type ConstantPolicy"),
        ("worlds:an_instance", "an object of type Endless, so name a class"),
        ("worlds:not_callable", "an object of type int, so name a class"),
        ("worlds:DiscreteObservation", "Discrete(5)"),
        ("worlds:DiscreteObservation", "FlattenObservation"),
        ("worlds:DiscretesObservation", "MultiDiscrete([2 3])"),
        ("worlds:EmptyObservation", "Dict()"),
        ("worlds:NoSpaces", "None"),
        ("worlds:WideObservation", "shrink the observation"),
        ("worlds:DiscreteAction", "Discrete(3)"),
        ("CartPole-v1", "Discrete(2)"),
        ("CartPole-v1", "choose an environment with continuous actions or wrap it"),
        ("MountainCar-v0", "has the action space Discrete(3), but agents"),
        ("MountainCar-v0", "by continuous actions, so take MountainCarContinuous-v0"),
        ("worlds:UnboundedAction", "action dimension 1 has the bounds [-1.0, inf]"),
        ("worlds:HugeAction", "action dimension 0"),
        ("worlds:UnboundedIntegerAction", "action dimension 0 has the bounds [-inf, inf]"),
    ],
)
def test_what_is_missing_or_has_spaces_no_agent_can_use_is_refused_with_a_remedy(env_id, said):
    assert said in refusal(env_id)


def test_a_missing_module_is_refused_and_says_where_it_was_looked_for():
    assert str(Path.cwd()) in refusal("no_such_world:Env")


def test_a_module_that_needs_a_missing_package_names_that_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needy_world.py").write_text("import no_such_package\n", encoding="utf-8")
    assert "needs 'no_such_package'" in refusal("needy_world:Env")


def test_a_module_that_raises_while_it_is_imported_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_world.py").write_text("1 / 0\n", encoding="utf-8")
    assert "ZeroDivisionError: division by zero" in refusal("broken_world:Env")


def test_without_box2d_the_extra_to_install_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("Box2D", "gymnasium.envs.box2d"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    assert 'pip install "dase-grpc[box2d]"' in refusal("LunarLanderContinuous-v3")


def test_any_other_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "jax" in refusal("phys2d/CartPole-v1")
        assert "gymnasium-robotics" in refusal("Hopper-v3")


def test_a_factory_that_raises_is_refused_in_one_line_with_its_cause():
    sentence = refusal("worlds:RefusesToStart")
    assert "ValueError: no licence for this simulator" in sentence
    with pytest.raises(EnvironmentSpecError) as caught:
        make_env("worlds:RefusesToStart", {})
    assert isinstance(caught.value.__cause__, ValueError)


def test_unknown_keyword_arguments_are_refused_and_shown():
    for env_id in ("worlds:PointGoal", "Pendulum-v1"):
        sentence = refusal(env_id, {"gravity": 3})
        assert "{'gravity': 3}" in sentence
        assert "unexpected keyword argument 'gravity'" in sentence


def test_a_factorys_own_refusal_is_passed_on_unchanged(monkeypatch):
    monkeypatch.setattr(worlds, "wraps", lambda: make_env("CartPole-v1", {}), raising=False)
    assert refusal("worlds:wraps") == refusal("CartPole-v1")


# --- spaces ---


def test_dict_tuple_and_picture_observations_are_flattened():
    for name, size in (("DictObservation", 8), ("TupleObservation", 3), ("PictureObservation", 12)):
        env = make_env(f"worlds:{name}", {})
        assert schema_of(env, name).observation_size == size
        assert to_float32(env.reset(seed=0)[0], size).shape == (size,)
        assert to_float32(env.step(np.float32([0]))[0], size).shape == (size,)


def test_a_refused_environment_is_closed(monkeypatch):
    made = []
    monkeypatch.setattr(
        worlds, "kept", lambda: made.append(worlds.DiscreteAction()) or made[0], raising=False
    )
    refusal("worlds:kept")
    assert made[0].closed == 1


def test_the_schema_holds_sizes_and_flat_bounds_in_the_environments_units():
    schema = schema_of(make_env("worlds:MatrixAction", {}), "worlds:MatrixAction")
    assert (schema.environment, schema.observation_size, schema.action_size) == ("worlds:MatrixAction", 2, 6)
    assert schema.action_low == (0,) * 6
    assert schema.action_high == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    pendulum = schema_of(make_env("Pendulum-v1", {}), "Pendulum-v1")
    assert (pendulum.action_low, pendulum.action_high) == ((-2.0,), (2.0,))


# --- actions and observations ---


@pytest.mark.parametrize(
    "space",
    [
        Box(np.float32([-1, 0, 0]), np.float32([1, 1, 1])),
        Box(-1, 1, (3,), np.float32),
        Box(np.float32([-0.1, 0.3, -1e30]), np.float32([0.3, 0.7, 1e-30])),
        Box(np.array([-0.1, 0.1, -1e-300]), np.array([0.3, 0.3, 1e300]), dtype=np.float64),
        Box(0.1, 0.7, (2, 3), np.float64),
        Box(-0.4, 0.4, (), np.float32),
        Box(-2, 5, (2,), np.int32),
        Box(0, 255, (2,), np.uint8),
        Box(0, 2**63 - 1, (2,), np.int64),
        Box(-(2**63) + 1, 2**62 + 1, (1,), np.int64),
        Box(0, 2**64 - 1, (2,), np.uint64),
    ],
    ids=str,
)
def test_normalised_actions_reach_both_ends_exactly_and_never_leave_the_box(space):
    to_env = ActionMap(space)
    size = int(np.prod(space.shape))
    assert (to_env(np.full(size, -1, np.float32)) == space.low).all()
    assert (to_env(np.full(size, 1, np.float32)) == space.high).all()
    assert (to_env(np.full(size, 1.5, np.float32)) == space.high).all()
    rng = np.random.default_rng(0)
    for _ in range(200):
        action = to_env(rng.uniform(-1, 1, size).astype(np.float32))
        assert action.dtype == space.dtype
        assert action.shape == space.shape
        assert space.contains(action)


def test_normalised_actions_are_mapped_linearly_per_dimension():
    to_env = ActionMap(Box(np.float32([-1, 0, -2]), np.float32([1, 1, 6])))
    assert to_env(np.float32([0, 0, 0])).tolist() == [0, 0.5, 2]
    assert to_env(np.float32([0.5, 0.5, -0.5])).tolist() == [0.5, 0.75, 0]


def test_whole_number_actions_are_rounded_to_the_nearest():
    to_env = ActionMap(make_env("worlds:IntegerAction", {}).action_space)
    assert to_env(np.float32([0.99])).tolist() == [5]
    assert to_env(np.float32([-0.99])).tolist() == [-2]


@pytest.mark.parametrize("space", [Box(-1, 1, (2,), np.float32), Box(-2, 2, (2,), np.float32)], ids=str)
def test_the_mapped_action_is_a_new_array(space):
    action = np.zeros(2, np.float32)
    ActionMap(space)(action)[:] = 9
    assert action.tolist() == [0, 0]


def test_observations_become_float32_copies_without_a_warning_where_they_overflow():
    received = np.array([1e300, -1e300, np.nan, 0.5])
    copied = to_float32(received, 4)
    assert copied.dtype == np.float32
    assert np.array_equal(copied, np.float32([np.inf, -np.inf, np.nan, 0.5]), equal_nan=True)
    same = np.zeros(2, np.float32)
    assert not np.shares_memory(to_float32(same, 2), same)


@pytest.mark.parametrize(
    ("observation", "said"),
    [
        (np.array([0.1, 1764402570.25]), "observation 1 is 1764402570.25 and is stored as 1764402560"),
        (np.array([2**40 + 1], np.int64), f"observation 0 is {2**40 + 1} and is stored as {2**40}"),
        ([1e300, -33554433.0], "observation 1 is -33554433.0 and is stored as -33554432"),
        (np.array([0.1, 1e300, np.inf, np.nan, 2.0**24, 2.0**100]), None),
        (np.array([1764402570.25], np.float32), None),
        ([], None),
    ],
)
def test_a_number_that_float32_is_too_coarse_for_is_named(observation, said):
    assert coarsened(observation) == said


# --- MuJoCo's warnings ---


def test_only_the_expected_mujoco_warning_is_silenced(monkeypatch, caplog):
    hook = []

    def make():
        hook.append(mujoco.get_mju_user_warning())
        hook[0](EXPECTED_WARNING + " and will be removed")
        hook[0]("the simulation is unstable\n")
        return worlds.Endless()

    monkeypatch.setattr(worlds, "warns", make, raising=False)
    with caplog.at_level(logging.WARNING):
        make_env("worlds:warns", {})
    assert [record.getMessage() for record in caplog.records] == ["MuJoCo: the simulation is unstable"]
    assert mujoco.get_mju_user_warning() is None


def test_a_users_own_mujoco_warning_hook_is_kept_and_gets_the_other_warnings(monkeypatch):
    heard = []
    mujoco.set_mju_user_warning(heard.append)
    try:
        monkeypatch.setattr(
            worlds, "warns", lambda: mujoco.get_mju_user_warning()("odd") or worlds.Endless(), raising=False
        )
        make_env("worlds:warns", {})
        refusal("worlds:RefusesToStart")
        make_env("HalfCheetah-v5", {}).close()
        assert heard == ["odd"]
        mujoco.get_mju_user_warning()("again")
        assert heard == ["odd", "again"]
    finally:
        mujoco.set_mju_user_warning(None)


def test_gymnasium_still_says_the_expected_warning_without_us(capfd, tmp_path, monkeypatch):
    """When this fails, Gymnasium or MuJoCo has changed and `EXPECTED_WARNING` can go."""
    if int(mujoco.__version__.split(".")[0]) < 4:
        pytest.skip("MuJoCo 4 was the first to say it")
    monkeypatch.chdir(tmp_path)
    gymnasium.make("HalfCheetah-v5").close()
    assert EXPECTED_WARNING in capfd.readouterr().err
