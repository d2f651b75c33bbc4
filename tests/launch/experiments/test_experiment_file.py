"""An experiment's file: every setting under one name, and every mistake in one sentence."""

import pytest
from contracts.sentences import assert_one_sentence

from dase_grpc.errors import ConfigError
from dase_grpc.launch.experiments.file import parse_experiment, read_experiment


def parsed(**tables):
    return parse_experiment(tables, name="file")


def refusal(**tables) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        parsed(**tables)
    return refused.value


ONE = {"seed": [0]}


def test_an_experiment_is_named_after_its_file_and_runs_in_lockstep(tmp_path):
    path = tmp_path / "first-look.toml"
    path.write_text("[matrix]\nseed = [0]\n")
    experiment = read_experiment(path)
    assert (experiment.name, experiment.mode) == ("first-look", "lockstep")


def test_a_name_and_a_mode_can_be_given():
    experiment = parsed(name="other", mode="cluster", matrix=ONE)
    assert (experiment.name, experiment.mode) == ("other", "cluster")


def test_short_names_dotted_keys_and_nested_tables_are_the_same_settings():
    nested = parsed(set={"env": {"id": "A-v1"}, "train": {"steps": 5}}, matrix=ONE)
    dotted = parsed(set={"env.id": "A-v1", "train.steps": 5}, matrix=ONE)
    short = parsed(set={"env": "A-v1", "steps": 5}, matrix=ONE)
    assert nested.common == dotted.common == short.common == {"env.id": "A-v1", "train.steps": 5}


def test_the_arguments_of_an_environment_are_one_setting():
    experiment = parsed(set={"env": {"id": "A-v1", "kwargs": {"at": 3}}}, matrix=ONE)
    assert experiment.common == {"env.id": "A-v1", "env.kwargs": {"at": 3}}


def test_seeds_counts_from_zero_and_keeps_the_order_of_the_axes():
    axes = parsed(matrix={"seeds": 3, "env": ["A-v1"]}).axes
    assert list(axes.items()) == [("train.seed", [0, 1, 2]), ("env.id", ["A-v1"])]


REFUSED = {
    "an unknown key": ({"metrix": ONE}, "unknown key metrix; did you mean matrix?"),
    "a key that is like no other": ({"zzz": 1, "matrix": ONE}, "unknown key zzz; there are name, mode"),
    "a name that is a path": ({"name": "a/b", "matrix": ONE}, "name = 'a/b' cannot name an experiment"),
    "a name with a control character": ({"name": "a\0b", "matrix": ONE}, "name = 'a\\x00b' cannot name"),
    "a name of two lines": ({"name": "a\nb", "matrix": ONE}, "name = 'a\\nb' cannot name"),
    "a name longer than a file's": ({"name": "ü" * 101, "matrix": ONE}, "of at most 200 bytes"),
    "more seeds than can be": (
        {"matrix": {"seeds": 10**9}},
        "matrix.seeds = 1000000000 is more than the 10,000 cells of an experiment",
    ),
    "lists that multiply": (
        {"matrix": {key: [1, 2, 3] * 4 for key in ("seed", "steps", "agents", "eval.every")}},
        "[matrix] has 12 x 12 x 12 x 12 combinations, more than 10,000",
    ),
    "a hidden name": ({"name": ".a", "matrix": ONE}, "name = '.a' cannot name"),
    "a name that is no text": ({"name": 5, "matrix": ONE}, "name = 5 cannot name"),
    "a flag that is no flag": ({"keep_buffers": 1, "matrix": ONE}, "keep_buffers = 1 is neither true nor"),
    "an unknown mode": ({"mode": "fast", "matrix": ONE}, "mode = 'fast' is neither lockstep nor cluster"),
    "an unknown axis": (
        {"matrix": {"dps.divergance": ["kl"]}},
        "[matrix]: unknown setting dps.divergance; did you mean dps.divergence?",
    ),
    "an axis without its section": (
        {"matrix": {"divergence": ["kl"]}},
        "unknown setting divergence; did you mean dps.divergence?",
    ),
    "an unknown short name": ({"set": {"sed": 1}, "matrix": ONE}, "[set]: unknown setting sed; did you mean"),
    "an axis without values": ({"matrix": {"seed": []}}, "matrix.train.seed is an empty list"),
    "an axis that is no list": ({"matrix": {"env": "A-v1"}}, "matrix.env.id = 'A-v1' must be a list"),
    "no number of seeds": ({"matrix": {"seeds": 0}}, "matrix.seeds = 0 must be how many"),
    "true as a number of seeds": ({"matrix": {"seeds": True}}, "matrix.seeds = True must be how many"),
    "a list of seeds under seeds": ({"matrix": {"seeds": [1, 2]}}, "matrix.seeds = [1, 2] must be how many"),
    "seed and seeds": ({"matrix": {"seed": [1], "seeds": 2}}, "[matrix] has seed and seeds"),
    "a matrix that is no table": ({"matrix": [1]}, "matrix = [1] must be a table"),
    "settings that are no table": ({"set": 1, "matrix": ONE}, "set = 1 must be a table"),
    "a setting under two names": (
        {"set": {"steps": 1, "train.steps": 2}, "matrix": ONE},
        "[set] sets train.steps twice",
    ),
    "a setting and an axis": (
        {"set": {"train.seed": 1}, "matrix": ONE},
        "train.seed is in [set] and in [matrix]",
    ),
    "an exclusion that is one table": ({"matrix": ONE, "exclude": {"seed": 0}}, "written as [[exclude]]"),
    "an exclusion of no axis": (
        {"matrix": ONE, "exclude": [{"method": "dase"}]},
        "[[exclude]] names method, which is not in [matrix]",
    ),
    "an exclusion of no value": (
        {"matrix": ONE, "exclude": [{"seed": 7}]},
        "[[exclude]] names train.seed = 7, which is not in [matrix]",
    ),
    "a setting of a variant that is in the matrix too": (
        {"matrix": ONE, "variant": [{"seed": 3}]},
        "train.seed is in [matrix] and in a [[variant]]; leave it out of one of them",
    ),
    "an exclusion of a value that no variant has": (
        {"matrix": ONE, "variant": [{"agents": 2}], "exclude": [{"agents": 3}]},
        "[[exclude]] names train.agents = 3, which is not in [matrix]",
    ),
    "an empty exclusion": ({"matrix": ONE, "exclude": [{}]}, "[[exclude]] names no setting"),
    "no cells": ({"set": {"steps": 1}}, "there are no cells"),
    "an empty matrix": ({"matrix": {}}, "there are no cells"),
}


@pytest.mark.parametrize(("tables", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_a_mistake_is_told_in_one_sentence(tables, sentence):
    assert_one_sentence(refusal(**tables), sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("[matrix\n", "is not valid TOML"), ("[matrix]\nseed = []\n", "bad.toml: matrix.train.seed is an")],
)
def test_a_bad_file_is_named(tmp_path, text, sentence):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_experiment(path)
    assert sentence in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the experiment .*missing\.toml: No such file"):
        read_experiment(tmp_path / "missing.toml")
