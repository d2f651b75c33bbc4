"""Policies that tests can hold up, and what is told of them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from patience import PATIENCE_S

from dase_grpc.errors import MalformedError
from dase_grpc.inference.service import THREAD
from dase_grpc.inference.wire import Actions, PolicyDescription
from dase_grpc.schema import Array

ABOUT = PolicyDescription(
    environment="worlds:Small",
    observation_shape=(3,),
    action_shape=(2,),
    action_dtype=np.dtype(np.float64),
    action_low=(-9.0, -9.0),
    action_high=(9.0, 9.0),
    max_rows=1_000,
    agent="agent 1 (the best)",
    algorithm="td3",
    step=600,
    score=12.5,
    commit="abc",
)


REFUSED = 666.0
"""The first component of an observation that a HeldPolicy refuses."""


class HeldPolicy:
    """Acts by the sum and the first component of an observation; while it is held it does not return."""

    def __init__(self) -> None:
        self.batches: list[Array] = []
        self.begun = threading.Semaphore(0)
        self.fails = False
        self._open = threading.Event()
        self._open.set()

    def __call__(self, observations: Array) -> Actions:
        self.batches.append(observations)
        self.begun.release()
        assert self._open.wait(PATIENCE_S)
        if (observations[:, 0] == REFUSED).any():
            raise MalformedError("no action for such an observation")
        if self.fails:
            raise ZeroDivisionError("a bug of the policy's")
        return acts(observations)

    @property
    def sizes(self) -> list[int]:
        """How many observations each batch had."""
        return [len(batch) for batch in self.batches]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block it begins and does not return."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


def acts(observations: Array) -> Actions:
    """What a HeldPolicy answers."""
    return np.stack([observations.sum(1), observations[:, 0]], 1).astype(np.float64)


def rows(*firsts: float) -> Array:
    """An observation for each number, which is its first component."""
    return np.float32([[first, 0.25, -1.0] for first in firsts])


def policy_threads() -> list[threading.Thread]:
    """The worker threads that are left."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]
