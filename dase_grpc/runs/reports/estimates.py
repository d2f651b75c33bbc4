"""Estimates from a few runs about all runs like them: interquartile mean, intervals, improvement.

SciPy is loaded by the first call, since nothing else of the project needs it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dase_grpc.runs.logs import Floats

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 10_000
BOOTSTRAP_SEED: Final = 0
TRIMMED: Final = 0.25
"""The share of the runs that the interquartile mean leaves out at each end, rounded down to whole runs."""
FEW: Final = 5
"""With fewer runs than this an interval is shown and means little."""


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """One number per run, and what they say together.

    Attributes:
        values: one for each run of a cell, in the order of the runs.
        std: standard deviation (n−1); NaN for one run.
        iqm: interquartile mean.
        interval: of the interquartile mean; None for one run.
    """

    values: tuple[float, ...]
    mean: float
    std: float
    iqm: float
    interval: Interval | None


@dataclass(frozen=True)
class Improvement:
    """P(X > Y) + ½ P(X = Y) for a run of each; the interval is None where either has only one run."""

    probability: float
    interval: Interval | None


def estimate(values: Sequence[float] | Floats) -> Estimate:
    """Summarises one number per run; there is at least one."""
    table = np.asarray(values, np.float64)
    return Estimate(
        values=tuple(table.tolist()),
        mean=float(table.mean()),
        std=float(table.std(ddof=1)) if len(table) > 1 else math.nan,
        iqm=float(_interquartile_mean(table)),
        interval=_interval((table,), _interquartile_mean),
    )


def improvement(better: Sequence[float], worse: Sequence[float]) -> Improvement:
    """How probably a run of the first kind scores higher than one of the second; ties count half.

    Source of the definition: Agarwal et al. 2021, arXiv 2108.13264. It is U / (n m) of the Mann-Whitney test.
    """
    x, y = np.asarray(better, np.float64), np.asarray(worse, np.float64)
    return Improvement(float(_share_of_wins(x, y)), _interval((x, y), _share_of_wins))


def _interquartile_mean(values: Floats, axis: int = -1) -> Any:
    from scipy.stats import trim_mean

    return trim_mean(values, TRIMMED, axis=axis)


def _share_of_wins(x: Floats, y: Floats, axis: int = -1) -> Any:
    x, y = np.moveaxis(x, axis, -1)[..., :, None], np.moveaxis(y, axis, -1)[..., None, :]
    return np.where(x == y, 0.5, x > y).mean(axis=(-2, -1))


def _interval(samples: tuple[Floats, ...], statistic: Callable[..., Any]) -> Interval | None:
    """The percentile bootstrap: each sample is drawn again by itself, with replacement."""
    from scipy.stats import bootstrap

    if min(map(len, samples)) < 2:
        return None
    found = bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        batch=1_000,
        vectorized=True,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(BOOTSTRAP_SEED),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))
