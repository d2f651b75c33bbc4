"""From an experiment's file to its cells: combinations, configurations, duplicates, names."""

import pytest
from contracts.sentences import assert_one_sentence
from hypothesis import given, settings
from hypothesis import strategies as st

from dase_grpc.config.presets import layered
from dase_grpc.config.texts import names_a_folder
from dase_grpc.errors import ConfigError, EnvironmentSpecError, UsageError
from dase_grpc.launch.experiments.file import parse_experiment
from dase_grpc.launch.experiments.matrix import NAME_LENGTH, _name, cells_of


def matrix_of(**tables):
    return cells_of(parse_experiment({"set": {"env": "worlds:PointGoal"}, **tables}, name="e"))


def names_of(**tables) -> list[str]:
    return [cell.name for cell in matrix_of(**tables).cells]


# -- combinations -------------------------------------------------------------------------------------


def test_every_combination_is_a_cell_and_the_last_axis_varies_fastest():
    found = [
        (cell.config.train.steps, cell.config.train.seed)
        for cell in matrix_of(matrix={"steps": [10, 20], "seed": [1, 2]}).cells
    ]
    assert found == [(10, 1), (10, 2), (20, 1), (20, 2)]


def test_further_cells_have_the_common_settings_and_their_own():
    matrix = matrix_of(
        set={"env": "worlds:PointGoal", "steps": 10, "train.threads": 3},
        matrix={"seed": [0]},
        include=[{"steps": 99, "seed": 5}],
    )
    assert [(c.name, c.config.train.steps, c.config.train.threads) for c in matrix.cells] == [
        ("seed-0_steps-10", 10, 3),
        ("seed-5_steps-99", 99, 3),
    ]


def test_each_variant_is_crossed_with_the_axes_and_may_set_what_all_cells_do():
    found = matrix_of(
        set={"env": "Pendulum-v1", "steps": 10},
        matrix={"seed": [0, 1]},
        variant=[{"method": "single", "steps": 20}, {"method": "dase", "agents": 3}],
        exclude=[{"agents": 3, "seed": 1}],
    ).cells
    told = [(cell.config.train.seed, cell.config.train.agents, cell.config.train.steps) for cell in found]
    assert told == [(0, 1, 20), (0, 3, 10), (1, 1, 20)]


def test_variants_alone_are_cells():
    assert len(matrix_of(set={"steps": 10}, variant=[{"method": "single"}, {"method": "dase"}]).cells) == 2


def test_an_experiment_of_which_all_is_excluded_has_no_cells():
    with pytest.raises(ConfigError, match="leaves no cell"):
        matrix_of(matrix={"seed": [0]}, exclude=[{"seed": 0}])


# -- configurations -----------------------------------------------------------------------------------


def test_a_cell_has_the_configuration_of_the_same_command_line():
    matrix = matrix_of(
        set={},
        matrix={"algo": ["sac", "td3,ddpg"], "env": ["Humanoid-v5"], "method": ["dase"], "seed": [3]},
    )
    for cell, algo in zip(matrix.cells, ("sac", "td3,ddpg"), strict=True):
        assert cell.config == layered(
            preset_name=None,
            file=None,
            flags={"agent.algorithm": algo, "env.id": "Humanoid-v5", "train.seed": 3},
            assignments=[],
            method="dase",
        )
    assert matrix.cells[0].config.agent.reward_scale == 20.0


def test_a_preset_may_be_an_axis():
    cells = matrix_of(set={}, matrix={"preset": ["quickstart", "paper/td3/Hopper"]}).cells
    assert [cell.name for cell in cells] == ["quickstart", "paper-td3-Hopper"]
    assert [cell.config.env.id for cell in cells] == ["InvertedDoublePendulum-v5", "Hopper-v5"]


def test_an_environment_without_its_version_is_the_latest():
    (cell,) = matrix_of(set={}, matrix={"env": ["HalfCheetah"]}).cells
    assert cell.config.env.id == "HalfCheetah-v5"


def test_a_lockstep_cell_is_one_process_and_a_cluster_one_more_than_it_has_agents():
    tables = {"matrix": {"agents": [3], "train.threads": [1, 2]}}
    assert [cell.weight for cell in matrix_of(**tables).cells] == [1, 2]
    assert [cell.weight for cell in matrix_of(mode="cluster", **tables).cells] == [4, 7]


def test_the_actors_of_a_cluster_cell_keep_cores_busy_too():
    tables = {"set": {"train.explore": False, "agents": 2}, "matrix": {"train.actors": [1, 3]}}
    assert [cell.weight for cell in matrix_of(mode="cluster", **tables).cells] == [5, 9]


BAD = {
    "a value": ({"train.steps": [10, -1]}, "cell steps--1: train.steps = -1 must be greater than 0"),
    "an algorithm": ({"algo": ["td3", "ppo"]}, "cell ppo: --algo 'ppo': there is no algorithm"),
    "a method": ({"method": ["single", "best"]}, "cell best: --method 'best' is none of"),
    "a method that is a list": (
        {"method": [["single"], "dase"]},
        "cell single: method = ['single'] must be a text",
    ),
    "a method that is a number": ({"method": [1, 2]}, "cell 1: method = 1 must be a text"),
    "a preset": ({"preset": ["quick", "quickstart"]}, "cell quick: there is no preset 'quick'"),
    "settings that contradict": (
        {"algo": ["td3", "sac"], "agent.policy_delay": [3]},
        "cell sac: agent.policy_delay = 3 is read by td3 only",
    ),
    "a similarity that a single agent would not read": (
        {"method": ["single"], "dps.divergence": ["kl", "tv"]},
        'cell divergence-tv: dps.divergence = "tv" must be',
    ),
    "an environment": ({"env.id": ["worlds:PointGoal", "worlds:Nothing"]}, "cell worlds-Nothing: the module"),
}


@pytest.mark.parametrize(("axes", "sentence"), BAD.values(), ids=BAD.keys())
def test_one_bad_cell_is_named(axes, sentence):
    with pytest.raises(UsageError) as refused:
        matrix_of(
            set={} if "env.id" in axes or "preset" in axes else {"env": "worlds:PointGoal"}, matrix=axes
        )
    assert str(refused.value).startswith(sentence)


def test_an_environment_that_is_missing_keeps_its_kind_of_error():
    with pytest.raises(EnvironmentSpecError, match=r"cell run: there is no environment 'Hopp-v5'"):
        matrix_of(set={}, matrix={"env": ["Hopp-v5"]})


def test_one_port_for_several_clusters_is_refused():
    with pytest.raises(ConfigError) as refused:
        matrix_of(mode="cluster", set={"metrics.port": 9_500}, matrix={"seeds": 2})
    assert_one_sentence(refused.value, "metrics.port = 9500 would be the port of several runs at once")
    assert len(matrix_of(mode="lockstep", set={"metrics.port": 9_500}, matrix={"seeds": 2}).cells) == 2


def test_a_node_that_an_experiment_does_not_start_is_not_waited_for():
    with pytest.raises(ConfigError) as refused:
        matrix_of(mode="cluster", set={"eval.by": "evaluator"}, matrix={"seeds": 2})
    assert_one_sentence(refused.value, "eval.by = evaluator needs a node that an experiment does not start")


# -- duplicates ---------------------------------------------------------------------------------------


def test_a_single_agent_reads_no_similarity_so_its_cells_are_one():
    matrix = matrix_of(matrix={"method": ["single", "dase"], "dps.divergence": ["jeffreys", "none"]})
    assert [cell.name for cell in matrix.cells] == [
        "single",
        "dase_divergence-jeffreys",
        "dase_divergence-none",
    ]
    assert matrix.notes == [
        "settings of dps, dpd and agents are left out of cells whose method does not read them",
        "4 combinations are 3 cells: 1 has the configuration of another and is run once",
    ]


def test_the_settings_of_dpd_are_left_out_of_the_other_methods():
    matrix = matrix_of(
        set={"dps.floor": True}, matrix={"method": ["single", "dpd", "dase"], "dpd.alpha": [0.5, 1.0]}
    )
    assert [(cell.name, cell.config.dpd.alpha, cell.config.dps.floor) for cell in matrix.cells] == [
        ("single", 0.75, False),
        ("dpd_alpha-0.5", 0.5, False),
        ("dpd_alpha-1.0", 1.0, False),
        ("dase", 0.75, True),
    ]


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        (
            {"method": ["single", "dase"], "agents": [0]},
            "cell single: train.agents = 0 must be greater than 0",
        ),
        ({"method": ["dase", "dpd"], "dpd.alpha": [-1, 1]}, "cell dase_alpha--1: dpd.alpha = -1 must be at"),
        ({"method": ["single", "dpd"], "dpd.alpha": [-1]}, "cell single: dpd.alpha = -1 must be at least 0"),
    ],
)
def test_what_is_left_out_is_checked_all_the_same(axes, sentence):
    with pytest.raises(ConfigError) as refused:
        matrix_of(matrix=axes)
    assert str(refused.value).startswith(sentence)


def test_nothing_is_noted_where_every_combination_is_a_cell():
    assert matrix_of(matrix={"seeds": 2}).notes == []


# -- names --------------------------------------------------------------------------------------------


def test_settings_of_one_name_in_two_sections_are_told_apart():
    assert _name({"a.b": 1, "c.b": 2}, ["a.b", "c.b"]) == "a-b-1_c-b-2"


MIXED = {
    "algo": ["td3", "td3,sac"],
    "method": ["dase"],
    "env": ["worlds:PointGoal", "Pendulum-v1"],
    "agent.hidden": [[64, 32]],
    "replay.capacity": [100_000, "64MiB"],
}
NAMES = {
    "what varies and nothing else": (
        {"set": {"train.threads": 2}, "matrix": MIXED},
        [
            "td3_worlds-PointGoal_capacity-100000",
            "td3_worlds-PointGoal_capacity-64MiB",
            "td3_Pendulum-v1_capacity-100000",
        ],
    ),
    "lists": ({"matrix": {"agent.hidden": [[64, 32], [8]]}}, ["hidden-64x32", "hidden-8"]),
    "one cell alone": ({"matrix": {"seed": [4]}}, ["run"]),
    "arguments of an environment": (
        {"matrix": {"env.kwargs": [{}, {"length": 9}, {"length": 30}]}},
        ["kwargs-none", "kwargs-length-9", "kwargs-length-30"],
    ),
    "exclusions": (
        {
            "matrix": {"steps": [10, 20], "seed": [0, 1, 2]},
            "exclude": [{"steps": 10, "seed": 1}, {"seed": 2}],
        },
        ["steps-10_seed-0", "steps-20_seed-0", "steps-20_seed-1"],
    ),
    "single cells": ({"include": [{"seed": 1}, {"seed": 2}]}, ["seed-1", "seed-2"]),
    "a value that is given twice": ({"matrix": {"seed": [0, 1, 0]}}, ["seed-0", "seed-1"]),
    "one agent without a method, which reads no similarity": (
        {"matrix": {"agents": [1, 2], "dps.divergence": ["kl", "none"]}},
        ["agents-1", "agents-2_divergence-kl", "agents-2_divergence-none"],
    ),
    "methods that fix how many agents there are": (
        {"matrix": {"method": ["single", "dpd", "dase"], "agents": [3, 5]}},
        ["single", "dpd", "dase_agents-3", "dase_agents-5"],
    ),
    "a pair that distils, which reads no similarity": (
        {"matrix": {"method": ["dpd", "dase"], "dps.divergence": ["kl"]}},
        ["dpd", "dase"],
    ),
}


@pytest.mark.parametrize(("tables", "names"), NAMES.values(), ids=NAMES.keys())
def test_cells_are_named_after_what_varies(tables, names):
    assert names_of(**tables)[: len(names)] == names
    if len(tables.get("matrix", {})) < len(MIXED):
        assert len(names_of(**tables)) == len(names)


def test_names_that_would_clash_are_told_apart_by_their_configuration():
    clashing = names_of(matrix={"replay.capacity": ["10 MB", "10  MB"], "seed": [0]})
    assert len(set(clashing)) == 2
    assert all(
        name.startswith("capacity-10-MB-") and len(name) == len("capacity-10-MB-") + 8 for name in clashing
    )
    assert clashing == names_of(matrix={"replay.capacity": ["10 MB", "10  MB"], "seed": [0]})


@settings(max_examples=40)
@given(st.lists(st.text(max_size=300), min_size=1, max_size=4, unique=True))
def test_whatever_varies_names_are_folders_and_each_its_own(values):
    axis = [{"key": value} for value in values]
    names = names_of(matrix={"env.kwargs": axis})
    assert all(names_a_folder(name) and not name.startswith((".", "-")) for name in names)
    assert len({name.casefold() for name in names}) == len(values)
    assert max(map(len, names)) <= NAME_LENGTH + 9
