"""Rows of several agents, and the options that they are weighed by."""

import itertools

import numpy as np
import torch
from hypothesis import strategies as st

from dase_grpc.config.algorithms import SCOPES
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.schema import TransitionSchema

OWN, R = 1, 0.1

FINE = 1e-6  # weights are float32

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


def batch_of(actions, ids) -> Batch:
    """A batch cut from packed rows, as the learner gets it."""
    n = np.shape(actions)[1]
    schema = TransitionSchema("Toy-v0", 2, n, (-1.0,) * n, (1.0,) * n)
    packed = np.zeros((len(ids), schema.width), np.float32)
    packed[:, schema.columns["action"]] = actions
    schema.named(packed)["agent_id"] = ids
    return Batch.from_rows(schema, torch.from_numpy(packed))
