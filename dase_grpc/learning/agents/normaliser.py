"""A running normaliser of observations, learned from an agent's batches; only DDPG's preset uses one.

The paper's table asks DDPG for normalised observations and says no more, and the released code has
none. The numbers are those of OpenAI Baselines' DDPG: z is clipped at ±5 and no standard deviation
counts as less than 0.1. Why the statistics come from batches: docs/algorithms.md.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final, Self

import torch
from torch import Tensor

from dase_grpc.learning.agents.memory import OWN, Memory, overwrite

CLIP: Final = 5.0
MIN_DEVIATION: Final = 0.1


class Normaliser:
    """Mean and variance of each observation dimension, float64 on the agent's device; or those of a stack.

    Each update counts as much as any other, and within one the rows count by their weights, as they do
    in the losses; so a row of weight 0 leaves no trace, and only the ratios of the weights matter.
    Before the first update observations are merely clipped. Never synchronises with the host.

    Args:
        mean, variance, count: (m,), (m,) and () float64, 0, 1 and 0 at first; of a stack, with K in front.
    """

    def __init__(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        self._mean = mean
        self._variance = variance
        self._count = count

    @classmethod
    def new(cls, size: int, device: torch.device, *, memory: Memory = OWN) -> Self:
        """That of an agent that has not learned anything yet."""
        room = partial(memory.zeros, dtype=torch.float64, device=device)
        variance = room("normaliser.variance", (size,)).fill_(1)
        return cls(room("normaliser.mean", (size,)), variance, room("normaliser.count", ()))

    @classmethod
    def stacked(cls, held: Mapping[str, Tensor]) -> Self:
        """Those of all agents of a stack; `held` is what its memory holds."""
        return cls(*(held[f"normaliser.{name}"] for name in ("mean", "variance", "count")))

    @torch.no_grad()
    def learn(self, observation: Tensor, weight: Tensor, *, live: Tensor | None = None) -> None:
        """Takes one batch in: observation (B, m), weight (B,), which does not sum to 0.

        The parallel form of Welford's update (Chan, Golub & LeVeque 1983), on weighted moments. Of a stack,
        both have K in front, and those agents learn for whom `live` is true, (K,) bool.
        """
        share = weight.double()
        share = share / share.sum(-1, keepdim=True)
        x = observation.double()
        mean = _mean(share, x)
        variance = _mean(share, (x - mean[..., None, :]).square())
        count = self._count + 1
        rate = (1 / count)[..., None]
        shift = mean - self._mean
        new_mean = self._mean + rate * shift
        new_variance = (self._variance + rate * shift.square()).lerp_(variance, rate)
        overwrite(self._count, count, live=live)
        overwrite(self._mean, new_mean, live=live)
        overwrite(self._variance, new_variance, live=live)

    def normalise(self, observation: Tensor) -> Tensor:
        """clip((s − mean) / max(deviation, 0.1), ±5); (B, m) -> (B, m), a new tensor of the same dtype."""
        deviation = self._variance.sqrt().clamp_(min=MIN_DEVIATION)
        z: Tensor = (observation - self._mean[..., None, :]).div_(deviation[..., None, :]).clamp_(-CLIP, CLIP)
        return z.to(observation.dtype)

    def named_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """All that is to be saved, under `prefix.mean`, `prefix.variance` and `prefix.count`."""
        yield f"{prefix}.mean", self._mean
        yield f"{prefix}.variance", self._variance
        yield f"{prefix}.count", self._count


def _mean(share: Tensor, x: Tensor) -> Tensor:
    """Σ share · x over the rows; (B,) and (B, m), or (K, B) and (K, B, m)."""
    return share @ x if share.ndim == 1 else (share[:, None] @ x)[:, 0]
