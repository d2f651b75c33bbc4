"""Seeds: every random stream of a run, derived from the run's one seed by NumPy's SeedSequence.

A stream is named by its purpose and its agent, so adding a stream never moves another.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np


class Purpose(IntEnum):
    """What a random stream is for; the numbers are part of what makes a seed reproducible."""

    NETWORKS = 0
    EXPLORATION = 1
    ENVIRONMENT = 2
    EVALUATION = 3
    SAMPLING = 4
    TARGET_NOISE = 5
    ACTOR_EXPLORATION = 6
    ACTOR_ENVIRONMENT = 7
    SHARDS = 8
    SCORE = 9


def sequence(seed: int, purpose: Purpose, *key: int) -> np.random.SeedSequence:
    """The seed sequence of one purpose; `key` is the agent id and whatever else tells streams apart."""
    return np.random.SeedSequence(seed, spawn_key=(int(purpose), *key))


def generator(seed: int, purpose: Purpose, *key: int) -> np.random.Generator:
    """A NumPy generator on the stream of `purpose` and `key`."""
    return np.random.default_rng(sequence(seed, purpose, *key))


def integer(seed: int, purpose: Purpose, *key: int) -> int:
    """A 31-bit integer seed for libraries that take one (torch, Gymnasium).

    Seeds of evaluations and scores are odd and all others even, so that none ever meets a training seed.
    """
    state = int(sequence(seed, purpose, *key).generate_state(1)[0]) >> 1
    return (state | 1) if purpose in (Purpose.EVALUATION, Purpose.SCORE) else (state & ~1)


def generator_state(rng: np.random.Generator) -> dict[str, Any]:
    """Where a generator stands, as JSON can hold it; numbers of more than 53 bits are texts."""
    state: Any = rng.bit_generator.state
    return {**state, "state": {key: str(value) for key, value in state["state"].items()}}


def restore_generator(rng: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Sets a generator to where `generator_state` found one of the same kind.

    A state that is none is a KeyError, TypeError or ValueError.
    """
    words = {key: int(value) for key, value in state["state"].items()}
    rng.bit_generator.state = {**state, "state": words}
