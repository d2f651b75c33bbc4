"""What an agent's files say as numbers: curves, scores, and how far a run came."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dase_grpc.config.resolve import resolve
from dase_grpc.progress import duration
from dase_grpc.runs.curves import (
    AgentFiles,
    Series,
    around,
    column,
    final_score,
    mean_of,
    peers_of,
    recent,
    recent_weights,
    returns,
    shared_curves,
    smoothed,
    spread,
    status,
)
from dase_grpc.runs.directory import AgentDirectory, RunDirectory
from dase_grpc.runs.logs import Evaluations

SETTINGS = {"train": {"agents": 2, "steps": 5_000, "checkpoint_every": 1_000}}


def series(*values: float, every: int = 1000) -> Series:
    return Series(np.arange(len(values)) * every, np.array(values))


@given(
    hnp.arrays(np.float64, st.integers(0, 60), elements=st.floats(-1e6, 1e6)),
    st.sampled_from([1, 3, 25]),
)
def test_smoothing_is_the_mean_of_the_part_of_the_window_that_exists(values: Any, window: int) -> None:
    half = window // 2
    plain = [values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))]
    np.testing.assert_allclose(smoothed(values, window), plain, atol=1e-6)


def test_smoothing_goes_along_the_last_axis() -> None:
    values = np.random.default_rng(0).normal(size=(3, 40))
    np.testing.assert_allclose(smoothed(values), [smoothed(row) for row in values])


def test_smoothing_leaves_out_what_is_not_finite() -> None:
    np.testing.assert_allclose(smoothed(np.array([1, np.nan, 3, np.inf]), 3), [1, 2, 3, 3])
    np.testing.assert_array_equal(smoothed(np.array([np.nan]), 3), [np.nan])


def test_of_a_step_evaluated_again_the_last_counts() -> None:
    nothing = np.zeros(4)
    found = returns(
        Evaluations(np.array([1, 2, 3, 2]), np.array([1.0, 2, 3, 20]), nothing, nothing.astype(int), nothing)
    )
    assert (found.step.tolist(), found.value.tolist()) == ([1, 2, 3], [1, 20, 3])


def test_agents_are_averaged_where_all_have_been_evaluated() -> None:
    shared = shared_curves([series(1, 2, 3), series(), series(10, 20)])
    assert shared.step.tolist() == [0, 1000]
    assert shared.value.tolist() == [[1, 2], [10, 20]]
    assert shared_curves([]).value.shape == (0, 0)


def test_the_spread_of_one_agent_is_zero_and_of_two_is_theirs() -> None:
    assert spread(np.array([[1.0, 2.0]])).tolist() == [0, 0]
    np.testing.assert_allclose(spread(np.array([[1.0], [3.0]])), [np.sqrt(2)])


@pytest.mark.parametrize(("count", "score"), [(1, 0), (10, 4.5), (12, 6.5)])
def test_the_final_score_is_the_mean_of_the_last_ten(count: int, score: float) -> None:
    assert final_score(series(*range(count))) == score


@pytest.mark.parametrize(
    ("step", "every", "mean"),
    [(10_000, 1_000, 10), (5_000, 1_000, 5), (15_000, 1_000, 15), (10_000, 200, 10)]
    + [(each, 1_000, np.nan) for each in (0, 4_000, 16_000, 20_000, 40_000)]
    + [(10_500, 50, np.nan)],  # no evaluation
)
def test_around_a_step_are_eleven_evaluations_and_not_half_of_them(
    step: int, every: int, mean: float
) -> None:
    np.testing.assert_equal(around(series(*range(21)), step, every=every), mean)


def test_a_mean_is_a_number_where_the_sum_is_none() -> None:
    assert mean_of(np.array([[1.7e308, 1.0], [1.7e308, 2.0]])).tolist() == [1.7e308, 1.5]
    assert np.isnan(mean_of(np.array([np.inf, -np.inf])))
    assert final_score(Series(np.arange(3), np.full(3, 1.7e308))) == pytest.approx(1.7e308)


def test_records_without_a_number_are_left_out() -> None:
    records = [{"step": 1, "a": 2}, {"step": 2, "a": None}, {"step": 3}, {"a": 1}, {"step": 5, "a": 4.5}]
    found = column(records, "a")
    assert (found.step.tolist(), found.value.tolist()) == ([1, 5], [2, 4.5])
    assert len(column([], "a")) == 0


def test_peers_are_by_number_without_oneself() -> None:
    records = [
        {"step": 1, "similarity": {"0": 1.0, "10": 0.5, "2": None}},
        {"step": 2, "similarity": None},
        {"step": 3, "similarity": {"2": 0.25}},
        {"step": 4},
    ]
    found = peers_of(0, records)
    assert list(found) == [2, 10]
    assert (found[2].step.tolist(), found[2].value.tolist()) == ([3], [0.25])


def test_peers_have_other_numbers_too() -> None:
    found = peers_of(
        1,
        [{"step": 5, "similarity": {"0": 0.5}, "divergence_mean_by_source": {"0": 7.0}}],
        "divergence_mean_by_source",
    )
    assert (found[0].step.tolist(), found[0].value.tolist()) == ([5], [7.0])


def test_recent_is_the_mean_of_the_last_quarter() -> None:
    series = Series(np.arange(8), np.arange(8.0))
    assert recent(series) == 6.5
    assert recent(Series(series.step[:3], series.value[:3])) == 2.0
    assert recent(Series(series.step[:0], series.value[:0])) is None


def test_recent_weights_are_the_mean_of_the_last_quarter_of_each_pair() -> None:
    records = [{"step": step, "similarity": {"3": float(step)}} for step in range(8)]
    ids, weights = recent_weights({0: records, 1: []})
    assert ids == [0, 1, 3]
    np.testing.assert_array_equal(weights, [[np.nan, np.nan, 6.5], [np.nan] * 3, [np.nan] * 3])


# -- how far a run came --------------------------------------------------------------------------------


def make_run(root: Path, mode: str = "cluster") -> RunDirectory:
    return RunDirectory.create(root, mode, resolve(SETTINGS), mode=mode)


def write(agent: AgentDirectory, step: int, *, checkpoint: int | None) -> None:
    """The last files of an agent after `step` steps."""
    agent.metrics.append({"step": step, "wall_seconds": step / 10})
    if checkpoint is not None:
        (agent.checkpoints / f"step-{checkpoint:09d}").mkdir(parents=True)


def said(run: RunDirectory) -> str:
    return status(run, {agent.agent_id: AgentFiles.read(agent) for agent in run.agents()})


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((5_000, 5_000), (5_000, 5_000), "finished"),
        ((5_000, 5_000), (4_321, 4_321), "stopped at step 4,321 of 5,000"),
        ((0, 0), (0, 0), "stopped at step 0 of 5,000"),
        ((5_000, 5_000), (4_321, 4_000), "running or failed at step 4,321 of 5,000"),
        ((5_000, 5_000), (4_000, 4_000), "running or failed at step 4,000 of 5,000"),
        ((5_000, 5_000), (400, None), "running or failed at step 400 of 5,000"),
    ],
)
def test_the_status_follows_from_the_steps_and_the_last_checkpoint(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int | None], expected: str
) -> None:
    run = make_run(tmp_path)
    for agent, (step, checkpoint) in enumerate((first, second)):
        write(run.agent(agent), step, checkpoint=checkpoint)
    assert said(run) == expected


def test_an_agent_that_has_written_nothing_counts_as_running_unless_nodes_run_alone(tmp_path: Path) -> None:
    for mode, expected in (("cluster", "running or failed at step 0 of 5,000"), ("node", "finished")):
        run = make_run(tmp_path, mode)
        assert said(run) == "running or failed at step 0 of 5,000"
        write(run.agent(1), 5_000, checkpoint=5_000)
        assert said(run) == expected


def test_a_folder_of_an_evaluator_has_finished_with_the_evaluation_of_the_last_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, "evaluator")
    for step, expected in ((4_000, "running or failed at step 4,000 of 5,000"), (5_000, "finished")):
        run.agent(1).evaluations.append(
            step=step, return_mean=0.0, return_std=0.0, episodes=1, wall_seconds=1.0
        )
        assert said(run) == expected


def test_the_duration_is_the_largest_time_of_any_file(tmp_path: Path) -> None:
    agent = make_run(tmp_path).agent(0)
    assert AgentFiles.read(agent).seconds == 0
    agent.evaluations.append(step=0, return_mean=0, return_std=0, episodes=1, wall_seconds=130)
    assert AgentFiles.read(agent).seconds == 130
    write(agent, 2_000, checkpoint=None)
    assert AgentFiles.read(agent).seconds == 200
    assert [duration(seconds) for seconds in (5, 130, 7_260)] == ["5 s", "2 min 10 s", "2 h 1 min"]
