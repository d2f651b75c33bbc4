"""Running moments of deviations: what earlier batches said, for groups that have few rows in each.

Float64 on the device, with masks; nothing waits for the host. Equations and bias: docs/dps.md.
"""

from functools import partial
from typing import Final

import torch
from torch import Tensor

from dase_grpc.learning.memory import OWN, Memory
from dase_grpc.learning.moments import scatter

_FORGOTTEN: Final = 1e-100
"""A group whose weight has decayed to this is as if never seen: its squares would underflow next."""
_TINY: Final = torch.finfo(torch.float64).tiny


class RunningMoments:
    """Weighted mean and covariance of G groups of deviations in R^n over all batches taken in.

    At each `take` the weight of every earlier row falls by γ = 2^(−1/half_life), that of a new row is 1.
    Older scatter is merged with the batch's around their common mean (Chan, Golub and LeVeque 1979), so
    that no large sums cancel and a dimension that never varied has exactly no variance.

    Owned by one thread. Holds its tensors for life and writes them in place.

    Args:
        groups, size: G and n.
        half_life: in calls of `take`; positive.
        device: where the deviations are.
    """

    def __init__(
        self,
        groups: int,
        size: int,
        *,
        half_life: float,
        device: torch.device,
        memory: Memory = OWN,
    ) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        room = partial(memory.zeros, dtype=torch.float64, device=device)
        self._mean = room("similarity.mean", (groups, size))
        self._scatter = room("similarity.scatter", (groups, size, size))
        self._weight = room("similarity.weight", (groups,))
        self._squares = room("similarity.squares", (groups,))

    def take(self, deviation: Tensor, member: Tensor) -> None:
        """Takes a batch in: (b, n) float64 deviations and (G, b) membership.

        A group with a row that is not finite keeps what it had, older by one update.
        """
        member = member & sound(deviation, member)[:, None]
        mean, spread, count = scatter(deviation, member)
        weight = self._weight * self._decay
        known = weight > _FORGOTTEN
        weight = torch.where(known, weight, 0.0)
        total = weight + count
        share = count / total.clamp(min=_TINY)
        shift = mean - self._mean
        between = (weight * share)[:, None, None] * shift[:, :, None] * shift[:, None, :]
        older = torch.where(known[:, None, None], self._scatter * self._decay, 0.0)
        self._scatter.copy_(older + spread + between)
        self._mean.copy_(self._mean + share[:, None] * shift)
        self._squares.copy_(torch.where(known, self._squares * self._decay**2, 0.0) + count)
        self._weight.copy_(total)

    def tensors(self) -> dict[str, Tensor]:
        """All that is to be saved, the tensors themselves; whoever writes into them sets them."""
        return {
            "mean": self._mean,
            "scatter": self._scatter,
            "weight": self._weight,
            "squares": self._squares,
        }

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (G, n), covariance (G, n, n) and effective number of rows (G,), all float64.

        With w the weights of all rows so far, the covariance is Σ w (d − μ)(d − μ)ᵀ / (Σ w − Σ w² / Σ w)
        and the number of rows (Σ w)² / Σ w²; after one batch they are those of `moments.moments`.
        """
        rows = self._weight.square() / self._squares.clamp(min=_TINY)
        freedom = self._weight - self._squares / self._weight.clamp(min=_TINY)
        return self._mean.clone(), self._scatter / freedom.clamp(min=_TINY)[:, None, None], rows


def sound(deviation: Tensor, member: Tensor) -> Tensor:
    """Whether every row of a group is finite, (G,) bool."""
    return ~(member & ~deviation.isfinite().all(-1)).any(-1)
