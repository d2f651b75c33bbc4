"""Noise of exploration: what becomes of a policy's action before it is taken; by default N(0, σ) is added."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dase_grpc.errors import AlgorithmError
from dase_grpc.schema import Array


class Noise(ABC):
    """What explores beside a policy; each environment has one of its own, which belongs to one thread."""

    @abstractmethod
    def __call__(self, action: Array, *, version: int, length: int, rng: np.random.Generator) -> Array:
        """The action to take instead of the policy's, (n,) float32; it is clipped to [-1, 1] afterwards.

        version is the policy's, the updates that it has had; length the steps of the episode so far. The
        first call may come within an episode. All chance comes from `rng`, which a resumed run goes on with.
        """

    def state_dict(self) -> Mapping[str, npt.NDArray[Any]]:
        """What it remembers, for checkpoints: arrays by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:  # noqa: B027  # most keep nothing
        """Goes on from what `state_dict` gave; a KeyError or ValueError where it does not fit."""


class Gaussian(Noise):
    """N(0, deviation²) in each dimension."""

    def __init__(self, deviation: float) -> None:
        self.deviation = np.float32(deviation)

    def __call__(self, action: Array, *, version: int, length: int, rng: np.random.Generator) -> Array:
        """See Noise."""
        return action + rng.standard_normal(len(action), np.float32) * self.deviation


def require_action(given: Any, size: int) -> Array:
    """What a noise gave, (size,) float32.

    Raises:
        AlgorithmError: it is no such array, or not finite.
    """
    if not isinstance(given, np.ndarray) or given.shape != (size,) or given.dtype.kind not in "fiu":
        raise AlgorithmError(f"an exploration noise has to give {size} numbers for an action of {size}")
    if not np.isfinite(given).all():
        raise AlgorithmError("an exploration noise gave an action that is not finite")
    return given.astype(np.float32, copy=False)
