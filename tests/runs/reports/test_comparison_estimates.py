"""Statistics over runs, against hand computation and SciPy's own tests."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from dase_grpc.runs.reports.estimates import Improvement, Interval, estimate, improvement

SCORES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=8)


def test_mean_spread_and_interquartile_mean_of_known_numbers() -> None:
    found = estimate([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -100.0])
    assert found.values == (100, 1, 2, 3, 4, 5, 6, -100)
    assert found.mean == 21 / 8
    assert found.iqm == (2 + 3 + 4 + 5) / 4  # 2 of 8 left out at each end
    deviations = [(value - 21 / 8) ** 2 for value in found.values]
    assert found.std == pytest.approx(math.sqrt(sum(deviations) / 7))


@pytest.mark.parametrize(
    ("values", "iqm"), [([1, 2, 9], 4), ([0, 1, 3, 100], 2), ([0, 1, 2, 6, 100], 3), ([7], 7)]
)
def test_the_runs_left_out_are_rounded_down(values: list[float], iqm: float) -> None:
    assert estimate(values).iqm == iqm


def test_one_run_has_no_spread_and_no_interval() -> None:
    found = estimate([3.5])
    assert (found.mean, found.iqm, found.interval) == (3.5, 3.5, None)
    assert math.isnan(found.std)


def test_the_interval_of_two_runs_reaches_from_one_to_the_other() -> None:
    """Of four equally likely resamples one is twice the lower run and one twice the higher."""
    assert estimate([1.0, 5.0]).interval == Interval(1.0, 5.0)


def test_equal_runs_have_an_interval_without_width() -> None:
    assert estimate([2.0, 2.0, 2.0]).interval == Interval(2.0, 2.0)


def test_the_same_numbers_give_the_same_interval() -> None:
    values = np.random.default_rng(3).normal(size=9).tolist()
    assert estimate(values) == estimate(values)


@pytest.mark.slow
def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """The percentile bootstrap of 20 runs is known to be a little narrow, never this much."""
    rng = np.random.default_rng(0)
    intervals = [estimate(rng.normal(10, 2, size=20)).interval for _ in range(100)]
    covered = sum(each is not None and each.low <= 10 <= each.high for each in intervals)
    assert 85 <= covered <= 99


def test_the_interval_holds_the_estimate_and_narrows_with_more_runs() -> None:
    rng = np.random.default_rng(1)
    few, many = (estimate(rng.normal(size=count)) for count in (6, 60))
    assert few.interval is not None
    assert many.interval is not None
    assert few.interval.low < few.iqm < few.interval.high
    assert many.interval.high - many.interval.low < (few.interval.high - few.interval.low) / 1.5


def counted(better: list[float], worse: list[float]) -> float:
    wins = sum(Fraction(2 * (x > y) + (x == y), 2) for x in better for y in worse)
    return float(wins / (len(better) * len(worse)))


@settings(max_examples=25)
@given(SCORES, SCORES)
def test_improvement_is_the_share_of_pairs_won_and_mann_whitneys_u(
    better: list[float], worse: list[float]
) -> None:
    found = improvement(better, worse)
    assert found.probability == pytest.approx(counted(better, worse), abs=1e-12)
    u = mannwhitneyu(better, worse).statistic
    assert found.probability == pytest.approx(u / (len(better) * len(worse)), abs=1e-12)
    assert (found.interval is None) == (min(len(better), len(worse)) == 1)


def test_improvement_of_the_other_way_round_adds_up_to_one() -> None:
    x, y = [1.0, 2.0, 2.0], [2.0, 0.0, 5.0, 1.0]
    forth, back = improvement(x, y), improvement(y, x)
    assert forth.probability == pytest.approx(
        6.5 / 12
    )  # 1 beats 0 and ties 1; each 2 beats 0 and 1 and ties 2
    assert forth.probability + back.probability == 1


def test_runs_that_do_not_overlap_leave_no_doubt_and_equal_ones_all() -> None:
    assert improvement([5.0, 6.0], [1.0, 2.0, 3.0]) == Improvement(1.0, Interval(1.0, 1.0))
    assert improvement([2.0, 2.0], [2.0, 2.0]) == Improvement(0.5, Interval(0.5, 0.5))


def test_the_interval_of_an_improvement_holds_it() -> None:
    rng = np.random.default_rng(2)
    found = improvement(rng.normal(0.5, 1, 12).tolist(), rng.normal(0, 1, 9).tolist())
    assert found.interval is not None
    assert 0 <= found.interval.low < found.probability < found.interval.high <= 1
