"""A comparison's numbers as texts and its definitions as sentences, the same on every screen and page."""

from typing import Final

from dase_grpc.runs.curves import FINAL
from dase_grpc.runs.reference import PublishedPoint, PublishedRow
from dase_grpc.runs.reports.compare import Cell, EnvironmentResults
from dase_grpc.runs.reports.estimates import (
    BOOTSTRAP_SEED,
    CONFIDENCE,
    FEW,
    RESAMPLES,
    Estimate,
    Improvement,
    Interval,
)
from dase_grpc.runs.reports.html import number

CAUTION: Final = "†"
"""Marks an interval of so few runs that it means little."""

UNIT: Final = (
    "One run is one sample: the agents of a run are averaged first, since they share a buffer and are not "
    "independent; all statistics are over runs."
)
FINAL_SCORE: Final = f"Final score: mean of the last {FINAL} evaluations up to the common last step."
AREA: Final = (
    "Area: under the learning curve on the common steps, by the trapezoidal rule, divided by the steps that "
    "it spans."
)
BEST: Final = (
    "Best evaluation: the highest on the common steps, one per run; it grows with noise and with the number "
    "of evaluations."
)
INTERVAL: Final = (
    f"IQM: the interquartile mean over runs (a quarter of them, rounded down, left out at each end, so below "
    f"4 runs it is the mean); in brackets its {CONFIDENCE * 100:g} % confidence interval by the percentile "
    f"bootstrap over runs ({RESAMPLES:,} resamples, seed {BOOTSTRAP_SEED}). {CAUTION} marks an interval of "
    f"fewer than {FEW} runs: it means little."
)
IMPROVEMENT: Final = (
    "P(X > Y) + ½ P(X = Y), the probability that a run of the row's cell ends higher than one of the "
    "column's, by final score; 0.5 says nothing either way."
)
EQUAL_TOTAL: Final = (
    "At equal total steps: the final score at the step at which the K agents of a run have together made as "
    "many environment steps as those of every other cell, so an agent among K has made 1/K of them."
)
PUBLISHED: Final = (
    "As published: mean ± standard deviation over 10 seeds of the 11 evaluations around a step, or of the "
    "last 10 at 1M; ours the same way, where the runs go far enough (Saglam et al. "
    "2022, arXiv 2207.13453; from the authors' released curves, MIT license). Their environments are Gym v2 "
    "and v3 with MuJoCo 1.50 and Box2D 2.3.10: a comparison, not a target. The rank says how many of the 30 "
    "single and K = 2 curves of the published cell are independent."
)
COMBINATION: Final = "combination: carries no information of its own"


def spread(estimate: Estimate, digits: int) -> str:
    """The mean, and its standard deviation where there is one."""
    if len(estimate.values) < 2:
        return number(estimate.mean, digits)
    return f"{number(estimate.mean, digits)} ± {number(estimate.std, digits)}"


def robust(estimate: Estimate, digits: int) -> str:
    """The interquartile mean with its interval, if there is one."""
    interval = brackets(estimate.interval, digits, len(estimate.values))
    return f"{number(estimate.iqm, digits)} {interval}".rstrip()


def brackets(interval: Interval | None, digits: int, runs: int) -> str:
    """An interval, marked where it comes from few runs; nothing where there is none."""
    if interval is None:
        return ""
    mark = CAUTION if runs < FEW else ""
    return f"[{number(interval.low, digits)}, {number(interval.high, digits)}]{mark}"


def published(point: PublishedPoint, digits: int) -> str:
    """A published mean and its standard deviation over seeds."""
    return f"{number(point.mean, digits)} ± {number(point.std, digits)}"


def chance(result: Improvement, runs: int) -> str:
    """A probability of improvement with its interval; runs is the smaller number of runs of the two."""
    return f"{result.probability:.2f} {brackets(result.interval, 2, runs)}".rstrip()


def origin(row: PublishedRow) -> str:
    """What the published row's curves are worth."""
    own = COMBINATION if row.combined else "own"
    return f"{own}; rank {row.cell_rank}" if row.cell_rank else own


def step(count: int) -> str:
    """A published step in short."""
    return "1M, final" if count >= 1_000_000 else f"{count // 1_000}k"


def digits(each: EnvironmentResults) -> int:
    """Decimals that all scores in an environment get: none where any is in the hundreds."""
    largest = max(abs(value.mean) for cell in each.cells for value in (cell.final, cell.area, cell.best))
    return 0 if largest >= 100 else 1 if largest >= 10 else 2


def of_runs(cell: Cell) -> str:
    """How many runs a cell has, and how many of them go on."""
    unfinished = sum(not run.finished for run in cell.runs)
    return f"{len(cell.runs)} ({unfinished} unfinished)" if unfinished else str(len(cell.runs))
