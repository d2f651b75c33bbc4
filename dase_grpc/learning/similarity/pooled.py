"""The Jeffreys divergence of all external rows together on a CPU: the default of DPS, in few calls.

Where rows are gathered instead of masked, and nothing waits for a device, there is far less to compute.
The reference twin is `dps.measure`, which everything else uses.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.learning.similarity.divergences import pivot_rounding

UNKNOWN: Final = (math.inf, math.inf)


def suffices(options: DpsConfig) -> bool:
    """Whether `terms` says all that these options ask for."""
    others = options.regularised or options.debias or options.normalise or options.memory
    return (options.divergence, options.scope) == ("jeffreys", "pooled") and not others


def terms(deviation: npt.NDArray[np.float64], reference_variance: float) -> tuple[float, float]:
    """The covariance's and the mean's summand of ρ, in nats; each infinite where it cannot be measured.

    deviation is (e, n), rows that share one λ. What `dps.measure` finds for a group of these rows, up to
    the order of float64 sums.
    """
    count, size = deviation.shape
    if count <= size + 1:
        return UNKNOWN
    with np.errstate(all="ignore"):  # what is not finite makes the result infinite
        mean = deviation.sum(0) / count
        centred = deviation - mean
        left = centred.sum(0) / count  # as in moments.scatter
        mean += left
        centred -= left
        scaled = centred.T @ centred
        scaled /= (count - 1) * reference_variance
        try:
            factor = np.linalg.cholesky(scaled)
        except np.linalg.LinAlgError:
            return UNKNOWN
        if not (np.square(factor.diagonal()) > pivot_rounding(size) * scaled.diagonal()).all():
            return UNKNOWN
        inverse = np.linalg.inv(factor)
        shift = mean / math.sqrt(reference_variance)
        solved = inverse @ shift
        covariance = float(np.square(factor - inverse.T).sum()) / 4
        of_mean = float(shift @ shift + solved @ solved) / 4
    return _or_infinite(covariance), _or_infinite(of_mean)


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
