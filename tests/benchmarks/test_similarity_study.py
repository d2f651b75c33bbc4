"""The study's bookkeeping, what it reads from a run, and its tables; what it measures is in the docs."""

import math
import sys

import numpy as np
import pytest
from scipy import stats

from dase_grpc.config.resolve import resolve
from dase_grpc.errors import ConfigError
from dase_grpc.runs.directory import RunDirectory


@pytest.fixture
def study(script):
    return script("similarity_study")


def cells(study, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["study", *flags])
    return study.cells_of(study._arguments())


def test_every_named_measure_is_one_configuration_and_has_its_name_back(study):
    labels = [study.label(settings) for settings in study.NAMED.values()]
    assert len(set(labels)) == len(labels)
    assert [study.short(each) for each in labels] == list(study.NAMED)
    assert study.short('{"divergence": "kl", "floor": true}') == '{"divergence": "kl", "floor": true}'
    assert set(study.BUILT_IN) - {study.SINGLE} <= set(study.NAMED)
    assert set(study.REFERENCES) < set(study.BUILT_IN)


def test_seeds_come_first_then_measures_then_tasks(study, monkeypatch):
    found = cells(study, monkeypatch, "--measure", "none", "--measure", "single", "--seeds", "3,4")
    assert [(cell.seed, cell.name, cell.task) for cell in found] == [
        (seed, name, task) for seed in (3, 4) for name in ("none", "single") for task in study.TASKS
    ]
    assert [cell.agents for cell in found] == [2, 2, 1, 1] * 2
    assert len(cells(study, monkeypatch)) == len(study.BUILT_IN) * 5 * len(study.TASKS)


def test_settings_go_on_top_of_each_measure(study, monkeypatch):
    flags = ("--set", "dps.normalise=true", "--seeds", "0", "--task", "Hopper-v5")
    (alone,) = cells(study, monkeypatch, *flags)
    assert alone.measure == study.label({"normalise": True})
    found = cells(study, monkeypatch, *flags, "--measure", "floor", "--measure", "single")
    assert [cell.name for cell in found] == ["floor+normalise", "single"]
    with pytest.raises(ConfigError, match=r"dps\.flor"):
        cells(study, monkeypatch, "--set", "dps.flor=true")


def test_the_configuration_is_that_of_the_cell(study):
    cell = study.Cell("Walker2d-v5", 2, study.label({"floor": True}), 7, 9_000)
    config = study.configuration(cell)
    assert (config.env.id, config.train.agents, config.train.seed, config.train.steps) == (
        "Walker2d-v5",
        2,
        7,
        9_000,
    )
    assert config.dps.floor
    assert (config.agent.hidden, config.agent.batch_size, config.train.threads) == ((64, 64), 64, 1)


def test_a_result_is_read_from_the_files_of_a_run(study, tmp_path):
    run = RunDirectory.create(tmp_path, "run", resolve({"env": {"id": "X-v0"}}), mode="lockstep")
    for agent, offset in enumerate((0.0, 10.0)):
        for index in range(8):
            run.agent(agent).evaluations.append(
                step=index * 100, return_mean=index + offset, return_std=0, episodes=1, wall_seconds=0
            )
        for index, weight in enumerate((None, 0.1, 0.2, 0.9)):
            run.agent(agent).metrics.append(
                {
                    "step": index,
                    "similarity_weight": weight,
                    "external_share": weight,
                    "effective_batch": 40.0 + index,
                }
            )
    result = study.Result.of(run)
    assert result.final == 5 + 5  # agents' means over the evaluations 3 ... 7
    assert result.area == 3.5 + 5
    assert (result.similarity_weight, result.external_share, result.effective_batch) == (0.2, 0.2, 41.5)


def test_results_survive_the_file(study, tmp_path):
    file = tmp_path / "study.csv"
    pair = study.Cell("Hopper-v5", 2, study.label({}), 3, 10_000)
    alone = study.Cell("Hopper-v5", 1, study.label({}), 3, 10_000)
    results = {pair: study.Result(1.5, 2.5, 1e-7, 0.25, 48.0), alone: study.Result(1.0, -math.inf)}
    for cell, result in results.items():
        study.append_result(file, cell, result)
    found = study.read_results(file)
    assert found[pair] == results[pair]
    assert (found[alone].final, found[alone].area) == (1.0, -math.inf)
    assert math.isnan(found[alone].effective_batch)


def scored(study, finals, *, agents=2):
    return {
        study.Cell("Hopper-v5", agents, study.label(study.NAMED.get(name, {})), seed, 10_000): study.Result(
            final, 2 * final, *((1e-3, 0.5, 40.0) if agents == 2 else ())
        )
        for name, values in finals.items()
        for seed, final in enumerate(values)
    }


def test_the_table_pairs_the_seeds(study):
    results = scored(study, {"isolated": (100, 200, 300), "jeffreys": (90, 190, 290, 500)})
    results |= scored(study, {"single": (50,)}, agents=1)
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in study.table("Hopper-v5", results).splitlines()
    ]
    rows = {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}
    assert list(rows) == ["`jeffreys`", "`isolated`", "`single`"]
    paired = rows["`jeffreys`"]
    assert paired["seeds"] == "4"
    assert paired["final − `isolated`"] == "−10 [−10, −10]"
    assert paired["area − `isolated`"] == "−20 [−20, −20]"
    assert paired["final − `jeffreys`"] == "–"
    assert (paired["λ"], paired["external share"], paired["effective batch"]) == ("1e-03", "0.50", "40")
    assert rows["`single`"]["final"] == "50"
    assert rows["`single`"]["λ"] == "–"
    assert study.table("Walker2d-v5", results).count("\n") == 1


def test_intervals_are_scipy_s_and_none_where_there_is_nothing_to_resample(study):
    from similarity_measures import interval

    values = [1.0, 2.0, 4.0, 9.0, 3.0]
    expected = stats.bootstrap((values,), np.mean, rng=np.random.default_rng(0)).confidence_interval
    assert interval(values) == (expected.low, expected.high)
    assert interval(values) == interval(values)
    assert interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    assert interval([1.0, 2.0]) is None
    assert interval([1.0, 2.0, -math.inf]) is None


@pytest.mark.slow
def test_a_short_run_is_played_and_scored(study, monkeypatch):
    monkeypatch.setitem(study.SETTINGS, "eval", {"every": 30, "episodes": 1, "max_episode_steps": 5})
    monkeypatch.setitem(study.SETTINGS, "train", {"log_every": 30, "threads": 1})
    monkeypatch.setitem(study.SETTINGS["agent"], "start_steps", 20)
    result = study.play(study.Cell("Hopper-v5", 2, study.label({"floor": True, "normalise": True}), 0, 90))
    assert 0 < result.final < 50
    assert 0 < result.similarity_weight < 1
    assert 32 < result.effective_batch < 64


def test_numbers_have_a_minus_sign_and_no_minus_zero(study):
    from similarity_measures import number, small, with_interval

    assert [number(value) for value in (-1234.5, -0.4, 0.4, -math.inf)] == ["−1,234", "0", "0", "−inf"]
    assert [small(value) for value in (0.0, 0.5, 0.0004)] == ["0.00", "0.50", "4e-04"]
    assert with_interval([]) == "–"
    assert with_interval([3.0, 3.0]) == "3"
