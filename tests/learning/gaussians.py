"""Gaussians to measure, and oracles that share no code with what they check."""

import math

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from scipy import stats

MEASURED = ("jeffreys", "js", "kl")

JS_ERROR = 3e-3

quick = settings(max_examples=25)

seeds = st.integers(0, 2**32 - 1)

sizes = st.integers(1, 6)


# --- oracles ----------------------------------------------------------------------------------------------


def kl_oracle(mean_p, cov_p, mean_q, cov_q) -> float:
    """KL(p‖q) as cross-entropy minus entropy, the entropy by SciPy."""
    shift = mean_p - mean_q
    quadratic = np.trace(np.linalg.solve(cov_q, cov_p)) + shift @ np.linalg.solve(cov_q, shift)
    cross = (len(mean_p) * math.log(2 * math.pi) + np.linalg.slogdet(cov_q)[1] + quadratic) / 2
    return float(cross - stats.multivariate_normal(mean_p, cov_p).entropy())


def jeffreys_oracle(mean, cov, variance) -> float:
    origin, reference = np.zeros(len(mean)), variance * np.eye(len(mean))
    return (kl_oracle(mean, cov, origin, reference) + kl_oracle(origin, reference, mean, cov)) / 2


def gaussian(seed: int, n: int, *, spread: float = 1.0, shift: float = 1.0):
    """A mean and a well-conditioned covariance at the scale of the default reference."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((n, n + 4))
    mean = rng.standard_normal(n) * shift * math.sqrt(0.1)
    return mean, 0.1 * spread * (0.7 * root @ root.T / (n + 4) + 0.3 * np.eye(n))
