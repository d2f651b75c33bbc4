"""Settings that are assigned one by one, and those that do not exist."""

import pytest
from contracts.sentences import assert_one_sentence, refuses
from refused_settings import refusal_of, setting

from dase_grpc.config.resolve import RunConfig, parse_assignments, resolve
from dase_grpc.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "guess"),
    [
        ("train.stepz", "train.steps"),
        ("trian.steps", "train.steps"),
        ("train.batch_size", "agent.batch_size"),
        ("agent.capacity", "replay.capacity"),
        ("train.start_steps", "agent.start_steps"),
        ("dps.divergance", "dps.divergence"),
        ("evaluation.every", "eval.every"),
        ("train.strat_steps", "agent.start_steps"),
        ("dps.agents", "train.agents"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_known_one(key, guess):
    error = refusal_of(f"{key}=5")
    assert_one_sentence(error)
    assert str(error) == f"unknown setting {key}; did you mean {guess}?"


@pytest.mark.parametrize("key", ["foo.bar", "q.zz"])
def test_an_unknown_setting_like_no_other_points_to_the_list(key):
    assert str(refusal_of(f"{key}=5")) == f"unknown setting {key}; `dase config` lists all settings"


def test_an_unknown_setting_outside_any_section_is_refused():
    with pytest.raises(ConfigError, match=r"^unknown setting steps; did you mean train\.steps\?$"):
        resolve({"steps": 5})
    with pytest.raises(ConfigError, match=r"^unknown setting strat_steps; .* agent\.start_steps\?$"):
        resolve({"strat_steps": 5})


@pytest.mark.parametrize("key", ["start_steps", "strat_steps"])
def test_an_assignment_without_a_section_is_refused_with_the_setting_it_may_mean(key):
    assert str(refusal_of(f"{key}=500")) == (
        f"--set '{key}=500' is not of the form section.key=value; did you mean --set agent.start_steps=500?"
    )
    assert "e.g. --set dps.divergence=kl" in str(refusal_of("nonsense=1"))


def test_an_assignment_to_a_section_is_refused_with_the_form_of_one_in_it():
    error = refusal_of("agent={hidden=[4]}")
    assert_one_sentence(error, "name a setting in the section agent, e.g. --set agent.algorithm=VALUE")
    assert_one_sentence(refusal_of("members=[]"), "name the algorithms of a mixed ensemble as in --algo")


@pytest.mark.parametrize("agents", [{}, {"agents": 1}, {"agents": "1"}])
def test_single_in_a_file_is_one_agent(agents):
    config = resolve({"train": {"method": "single", **agents}})
    assert config == resolve({"train": {"agents": 1}})
    assert config.method == "single"


def test_single_and_several_agents_contradict_each_other():
    with pytest.raises(ConfigError) as caught:
        resolve({"train": {"method": "single", "agents": 3}})
    assert str(caught.value) == (
        "train.method = single trains one agent, and train.agents = 3; set it to 1, or leave one of them out"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=5", 5),
        ("a.b=1_000", 1000),
        ("a.b=1e5", 1e5),
        ("a.b=true", True),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b={c = 1}", {"c": 1}),
        ('a.b="5"', "5"),
        ("a.b='text'", "text"),
        ("a.b=kl", "kl"),
        ("a.b=512MiB", "512MiB"),
        ("a.b=worlds:PointGoal", "worlds:PointGoal"),
        ("a.b=", ""),
        ("a.b= spaced out ", "spaced out"),
        ("a.b=x=1", "x=1"),
        ("a.b=[1, 2", "[1, 2"),
        ("a.b=01", "01"),
        (" a . b = 5", 5),
    ],
)
def test_an_assigned_value_is_toml_or_else_a_text(text, value):
    assert parse_assignments([text]) == {"a": {"b": value}}


def test_assignments_may_go_deeper_than_a_section_and_merge():
    texts = ["env.kwargs.reward.scale=2", "env.kwargs.reward.bias=1", "env.id=X"]
    assert parse_assignments(texts) == {"env": {"kwargs": {"reward": {"scale": 2, "bias": 1}}, "id": "X"}}


@pytest.mark.parametrize("text", ["", "=", "a.b", "=5", ".b=5", "a.=5", "a..b=5"])
def test_an_assignment_of_another_form_is_refused_with_an_example(text):
    with refuses(ConfigError, "--set", repr(text), "--set dps.divergence=kl"):
        parse_assignments([text])


def test_numbers_that_say_the_same_are_the_same_setting():
    assert setting("train.steps=1e5").train.steps == setting('train.steps="100000"').train.steps == 100_000
    assert setting("replay.capacity='1000000'") == setting("replay.capacity=1000000") == RunConfig()
