"""Presets are the paper's tables, and `layered` puts a command line's layers on top of each other."""

import copy

import pytest
import tomli_w
from contracts.sentences import assert_one_sentence

from dase_grpc.config import RunConfig, resolve
from dase_grpc.errors import ConfigError
from dase_grpc.presets import PRESETS, layered, preset

PAPER = {
    "dps.divergence": "jeffreys",
    "dps.scope": "pooled",
    "dps.reference_variance": 0.1,
    "eval.every": 1_000,
    "eval.episodes": 10,
    "agent.gamma": 0.99,
    "agent.exploration_noise": 0.1,
    "agent.start_steps": 25_000,
    "agent.batch_size": 256,
}
PAPER_TD3 = PAPER | {
    "agent.algorithm": "td3",
    "agent.critic_lr": 3e-4,
    "agent.actor_lr": 3e-4,
    "agent.tau": 5e-3,
    "agent.hidden": (256, 256),
    "agent.policy_delay": 2,
    "agent.target_noise": 0.2,
    "agent.target_noise_clip": 0.5,
}


def value(config: RunConfig, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize("key", PAPER_TD3)
def test_the_paper_preset_is_the_papers_table_for_td3(key):
    assert value(resolve(preset("paper/td3")), key) == PAPER_TD3[key]


def test_the_defaults_are_the_papers_table_for_td3():
    assert RunConfig().agent == resolve(preset("paper/td3")).agent
    assert RunConfig().dps == resolve(preset("paper/td3")).dps


def test_the_paper_preset_leaves_no_setting_of_an_algorithm_to_the_defaults():
    assert set(preset("paper/td3")["agent"]) == set(type(RunConfig().agent).model_fields)


def test_the_paper_preset_chooses_no_environment_and_no_seed():
    assert "env" not in preset("paper/td3")
    assert "seed" not in preset("paper/td3")["train"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_by_itself(name):
    assert isinstance(resolve(preset(name)), RunConfig)


def test_the_quick_start_is_a_small_mujoco_task_with_two_agents():
    config = resolve(preset("quickstart"))
    assert config.env.id == "InvertedDoublePendulum-v5"
    assert config.train.agents == 2
    assert config.train.steps <= 50_000


def test_an_unknown_preset_is_refused_and_the_known_ones_are_named():
    with pytest.raises(ConfigError) as refusal:
        preset("paper/td4")
    assert_one_sentence(refusal.value, "'paper/td4'", *PRESETS)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text(tomli_w.dumps({"train": {"steps": 22, "seed": 2}, "env": {"kwargs": {"a": 1, "b": 1}}}))
    return path


def layers(**given: object) -> RunConfig:
    nothing = {"preset_name": None, "file": None, "flags": {}, "assignments": [], "otherwise": "paper/td3"}
    return layered(**{**nothing, **given})


def test_without_preset_and_file_the_command_chooses_the_preset():
    assert layers(otherwise="quickstart") == resolve(preset("quickstart"))
    assert layers(otherwise="paper/td3") == resolve(preset("paper/td3"))


def test_a_preset_that_is_named_wins_over_the_commands_choice():
    assert layers(preset_name="quickstart", otherwise="paper/td3") == resolve(preset("quickstart"))


def test_a_file_without_a_preset_stands_on_the_defaults(file):
    config = layers(file=file, otherwise="quickstart")
    assert config == resolve({"train": {"steps": 22, "seed": 2}, "env": {"kwargs": {"a": 1, "b": 1}}})


def test_file_wins_over_preset_flags_over_file_and_assignments_over_flags(file):
    config = layers(
        preset_name="quickstart",
        file=file,
        flags={"train.seed": 3, "train.agents": 3, "env.id": None},
        assignments=["train.agents=4", "env.kwargs.b=4"],
    )
    assert config.replay.capacity == preset("quickstart")["replay"]["capacity"]
    assert config.env.id == preset("quickstart")["env"]["id"]  # None: the flag was not given
    assert config.train.steps == 22
    assert config.train.seed == 3
    assert config.train.agents == 4
    assert config.env.kwargs == {"a": 1, "b": 4}


def test_the_last_of_equal_assignments_wins():
    assert layers(assignments=["train.seed=1", "train.seed=2"]).train.seed == 2


def test_zero_is_a_flag_that_was_given():
    assert layers(flags={"train.seed": 0}, assignments=[]).train.seed == 0


def test_presets_are_the_same_after_use(file):
    before = copy.deepcopy(dict(PRESETS))
    layers(preset_name="quickstart", file=file, assignments=["env.kwargs.c=1", "agent.hidden=[1]"])
    assert dict(PRESETS) == before
