"""Rows of several agents, and what they weigh by NumPy and SciPy."""

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from dase_grpc.config.algorithms import SCOPES

OWN, R = 1, 0.1

FINE = 1e-6  # weights are float32

quick = settings(max_examples=25, deadline=None)

seeds = st.integers(0, 2**32 - 1)

sizes = st.integers(1, 6)

flags = st.booleans()

shares = st.sampled_from([0.0, 0.1, 0.5, 1.0])

OPTIONS = [
    {},
    {"floor": True},
    {"normalise": True},
    {"shrinkage": 0.3},
    {"debias": True},
    {"floor": True, "normalise": True, "shrinkage": 0.3, "debias": True},
]

EVERY = list(itertools.product(SCOPES, OPTIONS))


def rows(seed: int, *, n: int = 3, each: int = 12, agents: int = 4, noise: float = 0.25):
    """Each agent's rows, with a deviation and a spread of its own, in a shuffled order."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(agents), each)
    rng.shuffle(ids)
    policy = rng.uniform(-0.5, 0.5, (len(ids), n))
    spread = noise * (0.5 + rng.random((agents, n)))
    shift = 0.2 * rng.standard_normal((agents, n))
    actions = policy + shift[ids] + spread[ids] * rng.standard_normal((len(ids), n))
    return actions, policy, ids
