"""Which runs are the same experiment, and what experiments are called."""

from pathlib import Path
from typing import Any

import pytest
from synthetic import flat, write_run

from dase_grpc.config.presets import layered
from dase_grpc.config.resolve import resolve, setting_names
from dase_grpc.runs.reports.sources import (
    SAME_EXPERIMENT,
    SourceRun,
    described,
    differing,
    environment,
    grouped,
    labels,
    read_runs,
)


class Bench:
    """Writes runs that differ in what is named, and reads them."""

    def __init__(self, root: Path) -> None:
        self.root, self._count = root, 0

    def run(self, agents: int = 2, **settings: Any) -> SourceRun:
        """A setting is given as section__key=value."""
        self._count += 1
        tables: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            section, _, key = name.partition("__")
            tables.setdefault(section, {})[key] = value
        curves = [flat(self._count, 3)] * agents
        path = write_run(self.root, f"run{self._count}", *curves, settings=tables)
        ((run,), _) = read_runs([path])
        return run


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def names(*runs: SourceRun) -> list[str]:
    return labels(grouped(runs))


def test_seed_length_threads_logging_and_ports_make_no_other_experiment(bench: Bench) -> None:
    runs = [
        bench.run(),
        bench.run(train__seed=1),
        bench.run(train__threads=4),
        bench.run(train__steps=1_500),
        bench.run(train__log_every=7, train__checkpoint_every=9, metrics__port=9500),
    ]
    (group,) = grouped(runs)
    assert len(group.runs) == 5
    assert [run.seed for run in group.runs] == [0, 0, 0, 0, 1]


def test_the_total_of_steps_counts_where_beta_grows_until_there(bench: Bench) -> None:
    drawn: dict[str, Any] = {"replay__sampling": "prioritised", "priorities__beta": 0.4}
    runs = [bench.run(train__steps=steps, **drawn) for steps in (1_000, 1_500)]
    assert names(*runs) == ["steps=1000", "steps=1500"]
    constant = [
        bench.run(train__steps=steps, priorities__beta_final=0.4, **drawn) for steps in (1_000, 1_500)
    ]
    assert len(grouped(constant)) == 1


def test_the_settings_that_do_not_count_exist() -> None:
    assert set(setting_names()) >= SAME_EXPERIMENT


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("dps__divergence", "none"),
        ("dps__scope", "agent"),
        ("dps__floor", True),
        ("replay__capacity", 50_000),
        ("replay__prefetch", 1),
        ("agent__batch_size", 64),
        ("agent__gamma", 0.9),
        ("eval__episodes", 3),
        ("env__kwargs", {"forward_reward_weight": 2.0}),
        ("env__id", "Ant-v5"),
    ],
)
def test_any_other_setting_does(bench: Bench, setting: str, value: Any) -> None:
    assert len(grouped([bench.run(), bench.run(**{setting: value})])) == 2


def test_what_has_no_effect_makes_no_other_experiment(bench: Bench) -> None:
    assert (
        len(grouped([bench.run(1), bench.run(1, dps__divergence="none"), bench.run(1, dps__floor=True)])) == 1
    )
    assert len(grouped([bench.run(), bench.run(replay__min_size=256)])) == 1
    few = {"agent__start_steps": 10, "agent__batch_size": 8}
    assert len(grouped([bench.run(**few), bench.run(**few, replay__min_size=20)])) == 2


def test_a_label_says_only_what_distinguishes(bench: Bench) -> None:
    assert names(bench.run(1), bench.run(2), bench.run(5)) == ["single", "DASE K=2", "DASE K=5"]
    assert names(bench.run(), bench.run(dps__divergence="none")) == ["divergence=jeffreys", "divergence=none"]
    assert names(bench.run(replay__capacity=100_000), bench.run(replay__capacity="64MiB")) == [
        "buffer 100,000",
        "buffer 64MiB",
    ]
    assert names(bench.run(agent__hidden=[64, 64]), bench.run()) == ["hidden=[256, 256]", "hidden=[64, 64]"]
    assert names(bench.run(1), bench.run(dps__divergence="kl"), bench.run(dps__divergence="none")) == [
        "single",
        "DASE K=2, divergence=kl",
        "DASE K=2, divergence=none",
    ]


def test_a_setting_is_said_only_where_a_name_needs_it(bench: Bench) -> None:
    hopper = {"env__id": "Hopper-v5"}
    runs = [
        bench.run(1),
        bench.run(train__method="dpd"),
        bench.run(),
        bench.run(dps__divergence="none"),
        bench.run(5),
        bench.run(1, **hopper),
        bench.run(**hopper),
    ]
    pair = "DASE K=2, divergence=jeffreys"
    assert names(*runs) == ["single", "DPD", pair, "DASE K=2, divergence=none", "DASE K=5", "single", pair]


def test_a_lone_experiment_says_what_it_is(bench: Bench) -> None:
    assert names(bench.run(1)) == ["TD3, single"]
    assert names(bench.run(train__method="dpd")) == ["TD3, DPD"]


def test_what_an_algorithm_brings_along_is_not_said(bench: Bench) -> None:
    sac = {"agent__algorithm": "sac", "agent__reward_scale": 5.0}
    groups = grouped([bench.run(), bench.run(**sac)])
    assert labels(groups) == ["SAC", "TD3"]
    assert differing(groups) == ["agent.algorithm", "agent.reward_scale"]
    assert described(groups[0], differing(groups)) == "agent.algorithm = sac; agent.reward_scale = 5.0"


def test_labels_agree_over_environments_whose_settings_differ(bench: Bench) -> None:
    humanoid = {"env__id": "Humanoid-v5", "agent__reward_scale": 20.0}
    found = names(bench.run(1), bench.run(2), bench.run(1, **humanoid), bench.run(2, **humanoid))
    assert found == ["single", "DASE K=2"] * 2


def test_methods_are_told_apart(bench: Bench) -> None:
    assert names(bench.run(), bench.run(train__method="dpd"), bench.run(1)) == ["single", "DPD", "DASE K=2"]


def test_mixed_ensembles_are_named_by_their_algorithms_and_differ_by_their_members(bench: Bench) -> None:
    def mixed(**agent: Any) -> SourceRun:
        flags = {"agent.algorithm": "td3,sac", "env.id": "HalfCheetah-v5"}
        config = layered(flags=flags)
        members = [each.model_dump(mode="json") for each in config.members]
        members[1] |= agent
        path = write_run(bench.root, f"mixed{agent}", flat(1, 3), flat(2, 3), settings={"members": members})
        return read_runs([path])[0][0]

    both = grouped([mixed(), bench.run(), mixed(batch_size=128)])
    assert [group.algorithms for group in both] == ["td3", "td3+sac", "td3+sac"]
    assert labels(both) == [
        "TD3",
        "TD3+SAC, members.1.batch_size=128",
        "TD3+SAC, members.1.batch_size=256",
    ]


def test_an_environments_name_holds_its_arguments(bench: Bench) -> None:
    run = bench.run(env__kwargs={"b": "x", "a": 1.5})
    assert environment(run.config) == "HalfCheetah-v5 (a=1.5, b=x)"
    assert names(run, bench.run()) == ["TD3, DASE K=2"] * 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("1", '"1"'),
        (1, "1"),
        ("true", '"true"'),
        (True, "true"),
        ("inf", "inf"),
        (float("inf"), "Infinity"),
        ("Infinity", '"Infinity"'),
        ("", '""'),
        ("hard mode", "hard mode"),
        ("x, b=y", '"x, b=y"'),
        (["x"], '["x"]'),
        ('["x"]', '"[\\"x\\"]"'),
        ({"y": 1, "x": "2"}, '{"x": "2", "y": 1}'),
        ("坂", "坂"),
        ("\x01坂", '"\\u0001坂"'),
        ("坂\u2028", '"\\u5742\\u2028"'),
    ],
)
def test_an_argument_is_quoted_where_it_could_be_taken_for_another(value: Any, shown: str) -> None:
    config = resolve({"env": {"id": "HalfCheetah-v5", "kwargs": {"a": value}}})
    assert environment(config) == f"HalfCheetah-v5 (a={shown})"


def test_arguments_that_look_alike_make_other_environments(bench: Bench) -> None:
    kwargs: list[dict[str, Any]] = [
        {"a": 1},
        {"a": "1"},
        {"a": "x, b=y"},
        {"a": "x", "b": "y"},
        {"a=x, b": "y"},
    ]
    found = grouped([bench.run(env__kwargs=each) for each in kwargs])
    assert len({group.environment for group in found}) == len(kwargs)


def test_where_the_buffer_is_kept_and_how_it_is_read_makes_no_other_experiment(bench: Bench) -> None:
    runs = [bench.run(), bench.run(replay__storage="disk"), bench.run(replay__in_place=False)]
    assert len(grouped(runs)) == 1
