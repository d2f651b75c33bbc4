"""Presets are the paper's tables, and `layered` puts a command line's layers on top of each other."""

import copy
import tomllib

import numpy as np
import pytest
import tomli_w
from contracts.sentences import refuses

from dase_grpc.config.algorithms import ALGORITHMS, READ_BY_ONE, AgentConfig
from dase_grpc.config.presets import BASE_PRESETS, ENVIRONMENTS, PRESETS, layered, paper_preset, preset
from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.errors import ConfigError

PAPER = {
    "dps": {"divergence": "jeffreys", "scope": "pooled", "reference_variance": 0.1},
    "eval": {"every": 1_000, "episodes": 10},
}
SHARED = {
    "gamma": 0.99,
    "exploration_noise": 0.1,
    "start_steps": 25_000,
    "batch_size": 256,
    "products": "float32",
}
TD3_AND_SAC = {
    "critic_lr": 3e-4,
    "actor_lr": 3e-4,
    "critic_weight_decay": 0.0,
    "tau": 5e-3,
    "hidden": (256, 256),
}
TABLES = {
    "td3": TD3_AND_SAC
    | {"reward_scale": 1.0, "normalise_observations": False}
    | {"policy_delay": 2, "target_noise": 0.2, "target_noise_clip": 0.5},
    "ddpg": {
        "critic_lr": 1e-3,
        "actor_lr": 1e-4,
        "critic_weight_decay": 1e-2,
        "tau": 1e-3,
        "hidden": (400, 300),
    }
    | {"reward_scale": 1.0, "normalise_observations": True},
    "sac": TD3_AND_SAC
    | {"reward_scale": 5.0, "normalise_observations": False}
    | {"policy_noise": 0.1, "policy_noise_clip": 0.25},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_paper_preset_is_the_papers_table_for_its_algorithm(algorithm):
    config = resolve(preset(f"paper/{algorithm}")).model_dump()
    table = PAPER | {"agent": SHARED | TABLES[algorithm] | {"algorithm": algorithm}}
    assert {name: {key: config[name][key] for key in keys} for name, keys in table.items()} == table


def test_the_defaults_are_the_papers_table_for_td3():
    assert RunConfig().agent == resolve(preset("paper/td3")).agent
    assert RunConfig().dps == resolve(preset("paper/td3")).dps


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_paper_preset_says_all_that_its_algorithm_reads_and_no_environment_and_no_seed(algorithm):
    read = {key for key in AgentConfig.model_fields if READ_BY_ONE.get(key, algorithm) == algorithm}
    said = preset(f"paper/{algorithm}")
    assert set(said["agent"]) == read
    assert "env" not in said
    assert "seed" not in said["train"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_preset_of_an_environment_adds_it_and_the_papers_exception_for_the_humanoid(algorithm, name):
    base, own = resolve(preset(f"paper/{algorithm}")), resolve(preset(f"paper/{algorithm}/{name}"))
    assert own.env.id == ENVIRONMENTS[name]
    scale = 20.0 if (algorithm, name) == ("sac", "Humanoid") else base.agent.reward_scale
    assert own == base.model_copy(
        update={"env": own.env, "agent": base.agent.model_copy(update={"reward_scale": scale})}
    )


def test_the_environments_are_the_papers_eight_in_versions_that_gymnasium_has():
    gymnasium = pytest.importorskip("gymnasium")
    assert len(ENVIRONMENTS) == 8
    assert set(ENVIRONMENTS.values()) <= set(gymnasium.registry)
    assert len(PRESETS) == 1 + 3 + 3 * 8


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_by_itself(name):
    assert isinstance(resolve(preset(name)), RunConfig)


def test_the_quick_start_is_a_small_mujoco_task_with_two_agents():
    config = resolve(preset("quickstart"))
    assert (config.env.id, config.train.agents) == ("InvertedDoublePendulum-v5", 2)
    assert config.train.steps <= 50_000


def test_an_unknown_preset_is_refused_and_the_known_ones_are_named():
    with refuses(ConfigError, "'paper/td4'", *BASE_PRESETS, *ENVIRONMENTS):
        preset("paper/td4")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text(tomli_w.dumps({"train": {"steps": 22, "seed": 2}, "env": {"kwargs": {"a": 1, "b": 1}}}))
    return path


def test_nothing_named_is_the_quick_start_and_an_environment_alone_the_papers_td3():
    assert layered() == resolve(preset("quickstart"))
    assert layered(flags={"env.id": "Ant-v4"}) == resolve(preset("paper/td3/Ant"), {"env": {"id": "Ant-v4"}})
    assert layered(flags={"env.id": "My-v0"}) == resolve(preset("paper/td3"), {"env": {"id": "My-v0"}})


def test_an_environment_set_by_assignment_chooses_the_preset_as_its_flag_does():
    for env_id in ("Ant-v5", "My-v0"):
        assert layered(assignments=[f"env.id={env_id}"]) == layered(flags={"env.id": env_id})
    assert layered(assignments=["env.kwargs.a=1"]).agent == layered().agent


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_chooses_the_papers_preset_with_and_without_an_environment(algorithm):
    flags = {"agent.algorithm": algorithm, "env.id": None}
    assert layered(flags=flags) == resolve(preset(f"paper/{algorithm}"))
    flags["env.id"] = "Humanoid-v5"
    assert layered(flags=flags) == resolve(preset(f"paper/{algorithm}/Humanoid"))


def test_an_algorithm_of_ones_own_has_the_papers_settings_of_td3_or_those_of_a_preset_that_is_named():
    own, humanoid = {"agent": {"algorithm": "mine:Agent"}}, {"env": {"id": "Humanoid-v5"}}
    flags = {"agent.algorithm": "mine:Agent", "env.id": "Humanoid-v5"}
    assert layered(flags=flags) == resolve(preset("paper/td3/Humanoid"), humanoid, own)
    chosen = layered(preset_name="paper/sac", assignments=["agent.algorithm=mine:Agent"])
    assert chosen == resolve(preset("paper/sac"), own)
    with refuses(ConfigError, "e.g. --preset paper/sac --set agent.algorithm=mine:Agent"):
        layered(preset_name="paper/sac", flags=flags)


def test_an_algorithm_of_ones_own_may_read_what_one_alone_reads():
    config = resolve({"agent": {"algorithm": "mine:Agent", "policy_delay": 3, "policy_noise": 0.3}})
    assert (config.agent.policy_delay, config.agent.policy_noise) == (3, 0.3)


@pytest.mark.parametrize("way", ["flags", "assignments", "file"])
def test_the_environments_own_preset_is_found_however_the_environment_is_named(way, tmp_path):
    (tmp_path / "env.toml").write_text('[env]\nid = "Humanoid-v4"\n')
    flags = {"agent.algorithm": "sac"}
    given = {
        "flags": {"flags": flags | {"env.id": "Humanoid-v4"}},
        "assignments": {"flags": flags, "assignments": ["env.id=Humanoid-v4"]},
        "file": {"flags": flags, "file": tmp_path / "env.toml"},
    }
    config = layered(**given[way])
    assert (config.env.id, config.agent.reward_scale) == ("Humanoid-v4", 20.0)


def test_an_algorithm_that_is_named_wins_over_the_files_and_the_file_over_its_preset(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[agent]\nalgorithm = "td3"\nreward_scale = 2.0\n')
    config = layered(file=path, flags={"agent.algorithm": "ddpg"})
    assert (config.agent.algorithm, config.agent.reward_scale, config.agent.tau) == ("ddpg", 2.0, 1e-3)


def test_an_algorithm_and_a_preset_are_not_given_together():
    with refuses(ConfigError, "--algo sac", "--preset quickstart", "--preset paper/sac"):
        layered(preset_name="quickstart", flags={"agent.algorithm": "sac"})


@pytest.mark.parametrize(
    ("env_id", "name"),
    [
        (None, "paper/sac"),
        ("Ant-v5", "paper/sac/Ant"),
        ("Ant-v4", "paper/sac/Ant"),
        ("AntMaze-v5", "paper/sac"),
        ("LunarLander-v3", "paper/sac"),
        ("my_package:Ant-v5", "paper/sac"),
        ("LunarLanderContinuous-v3", "paper/sac/LunarLanderContinuous"),
    ],
)
def test_an_environment_has_its_own_preset_where_the_paper_has_it(env_id, name):
    assert paper_preset("sac", env_id) == name
    assert preset(name)


def test_a_file_without_a_preset_stands_on_the_defaults(file):
    config = layered(file=file)
    assert config == resolve({"train": {"steps": 22, "seed": 2}, "env": {"kwargs": {"a": 1, "b": 1}}})


def test_file_wins_over_preset_flags_over_file_and_assignments_over_flags(file):
    config = layered(
        preset_name="quickstart",
        file=file,
        flags={"train.seed": 3, "train.agents": 3, "env.id": None},
        assignments=["train.agents=4", "env.kwargs.b=4"],
    )
    assert config.replay.capacity == preset("quickstart")["replay"]["capacity"]
    assert config.env.id == preset("quickstart")["env"]["id"]  # None: the flag was not given
    assert (config.train.steps, config.train.seed, config.train.agents) == (22, 3, 4)
    assert config.env.kwargs == {"a": 1, "b": 4}


def test_the_last_of_equal_assignments_wins_and_zero_is_a_flag_that_was_given(file):
    assert layered(assignments=["train.seed=1", "train.seed=2"]).train.seed == 2
    assert layered(file=file, flags={"train.seed": 0}).train.seed == 0


def test_presets_are_the_same_after_use(file):
    before = copy.deepcopy(dict(PRESETS))
    layered(preset_name="quickstart", file=file, assignments=["env.kwargs.c=1", "agent.hidden=[1]"])
    assert dict(PRESETS) == before


def test_arguments_of_an_environment_are_what_a_resumed_run_reads_from_the_start():
    given = {"a": (1, [(2.0, "x")]), "b": {"c": ({"d": ()},)}, "e": np.float64(0.5), "f": True}
    config = resolve({"env": {"kwargs": given}})
    assert config.env.kwargs == {"a": [1, [[2.0, "x"]]], "b": {"c": [{"d": []}]}, "e": 0.5, "f": True}
    assert type(config.env.kwargs["e"]) is float
    assert resolve(tomllib.loads(tomli_w.dumps(config.model_dump(mode="json")))) == config


def test_an_infinite_argument_of_an_environment_is_kept():
    config = layered(assignments=["env.kwargs.range=[0.7, inf]"])
    written = tomli_w.dumps(config.model_dump(mode="json"))
    assert resolve(tomllib.loads(written)) == config
