"""A running normaliser of observations, learned from an agent's batches; only DDPG's preset uses one.

The paper's table asks DDPG for normalised observations and says no more, and the released code has
none. The numbers are those of OpenAI Baselines' DDPG: z is clipped at ±5 and no standard deviation
counts as less than 0.1. Why the statistics come from batches: docs/algorithms.md.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor

from dase_grpc.learning.memory import OWN, Memory

CLIP: Final = 5.0
MIN_DEVIATION: Final = 0.1


class Normaliser:
    """Mean and variance of each observation dimension, float64 on the agent's device.

    Each update counts as much as any other, and within one the rows count by their weights, as they do
    in the losses; so a row of weight 0 leaves no trace, and only the ratios of the weights matter.
    Before the first update observations are merely clipped. Never synchronises with the host.
    """

    def __init__(self, size: int, device: torch.device, *, memory: Memory = OWN) -> None:
        room = partial(memory.zeros, dtype=torch.float64, device=device)
        self._mean = room("normaliser.mean", (size,))
        self._variance = room("normaliser.variance", (size,)).fill_(1)
        self._count = room("normaliser.count", ())

    @torch.no_grad()
    def learn(self, observation: Tensor, weight: Tensor) -> None:
        """Takes one batch in: observation (B, m), weight (B,), which does not sum to 0.

        The parallel form of Welford's update (Chan, Golub & LeVeque 1983), on weighted moments.
        """
        share = weight.double()
        share = share / share.sum()
        x = observation.double()
        mean = share @ x
        variance = share @ (x - mean).square()
        self._count += 1
        rate = 1 / self._count
        shift = mean - self._mean
        self._mean += rate * shift
        self._variance += rate * shift.square()
        self._variance.lerp_(variance, rate)

    def normalise(self, observation: Tensor) -> Tensor:
        """clip((s − mean) / max(deviation, 0.1), ±5); (B, m) -> (B, m), a new tensor of the same dtype."""
        deviation = self._variance.sqrt().clamp_(min=MIN_DEVIATION)
        z: Tensor = (observation - self._mean).div_(deviation).clamp_(-CLIP, CLIP)
        return z.to(observation.dtype)

    def named_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """All that is to be saved, under `prefix.mean`, `prefix.variance` and `prefix.count`."""
        yield f"{prefix}.mean", self._mean
        yield f"{prefix}.variance", self._variance
        yield f"{prefix}.count", self._count
