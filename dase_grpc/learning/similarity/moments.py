"""Mean and covariance of groups of deviations, of one batch or running over batches.

Pure functions on float64 tensors with leading dimensions; nothing waits for the device, so there is no
eigendecomposition here (torch's synchronises). Equations and reasons: docs/dps.md.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final, Self

import torch
from torch import Tensor

from dase_grpc.learning.agents.memory import OWN, Memory, overwrite

SIMILARITY: Final = "similarity"
"""What the names of the running moments begin with, in an agent's memory."""

SIGN_STEPS: Final = 40
"""Newton-Schulz steps; each enlarges a small eigenvalue by half, and 1.5^40 is 1e7."""

_FORGOTTEN: Final = 1e-100
"""A group whose weight has decayed to this is as if never seen: its squares would underflow next."""
_NAMES: Final = ("mean", "scatter", "weight", "squares")
_TINY: Final = torch.finfo(torch.float64).tiny


def moments(deviation: Tensor, member: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (G, n), covariance (G, n, n) with divisor count − 1, and count (G,) of each group's rows.

    deviation is (b, n) float64, member (G, b) bool. Divisors are at least 1. Leading dimensions are kept.
    """
    mean, spread, count = scatter(deviation, member)
    return mean, spread / (count - 1).clamp(min=1)[..., None, None], count


def scatter(deviation: Tensor, member: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (G, n), scatter Σ (d − mean)(d − mean)ᵀ (G, n, n), and count (G,) of each group's rows.

    The mean is refined once, so that a dimension with one constant value has exactly no variance,
    whatever the order of the rows.
    """
    rows = member[..., None]
    count = member.sum(-1)
    size = count.clamp(min=1)[..., None, None]
    deviation = deviation[..., None, :, :]
    mean = torch.where(rows, deviation, 0.0).sum(-2, keepdim=True) / size
    mean = mean + torch.where(rows, deviation - mean, 0.0).sum(-2, keepdim=True) / size
    centred = torch.where(rows, deviation - mean, 0.0)
    return mean.squeeze(-2), centred.mT @ centred, count


def shrunk(cov: Tensor, reference_variance: float, share: float) -> Tensor:
    """(1 − s) Σ + s r I, with s = share in [0, 1]: linear shrinkage towards the reference."""
    return (1.0 - share) * cov + share * reference_variance * _identity(cov)


def floored(cov: Tensor, reference_variance: float) -> Tensor:
    """Σ with each eigenvalue below r raised to r; eigenvectors and other eigenvalues stay.

    It is rI + ½ (A + |A|) with A = Σ − rI, and |A| = A sign(A). Eigenvalues closer to r than some 1e-7 of
    the farthest may be raised only in part, which no divergence can tell: all are flat at r.
    """
    reference = reference_variance * _identity(cov)
    excess = cov - reference
    raised = reference + (excess + excess @ _sign(excess)) / 2
    return (raised + raised.mT) / 2


def _sign(symmetric: Tensor) -> Tensor:
    """The matrix with the same eigenvectors and the signs of the eigenvalues, by X ← ½ X (3I − X²)."""
    size = symmetric.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=_TINY)
    sign = symmetric / size
    for _ in range(SIGN_STEPS):
        sign = 1.5 * sign - 0.5 * (sign @ sign @ sign)
    return sign


def _identity(cov: Tensor) -> Tensor:
    return torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)


class RunningMoments:
    """Weighted mean and covariance of G groups of deviations in R^n over all batches taken in.

    At each `take` the weight of every earlier row falls by γ = 2^(−1/half_life), that of a new row is 1.
    Older scatter is merged with the batch's around their common mean (Chan, Golub and LeVeque 1979), so
    that no large sums cancel and a dimension that never varied has exactly no variance.

    Owned by one thread. half_life is in calls of `take`, positive. It writes `held` in place: mean (G, n),
    scatter (G, n, n), weight (G,) and squares (G,), float64, zeros at first; of a stack, with K in front.
    """

    def __init__(self, half_life: float, held: Mapping[str, Tensor]) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self._held = {name: held[name] for name in _NAMES}

    @classmethod
    def empty(
        cls, groups: int, size: int, *, half_life: float, device: torch.device, memory: Memory = OWN
    ) -> Self:
        """Of G = `groups` groups that nothing is known of yet, n = `size`."""
        room = partial(memory.zeros, dtype=torch.float64, device=device)
        shapes = (groups, size), (groups, size, size), (groups,), (groups,)
        held = {name: room(f"{SIMILARITY}.{name}", shape) for name, shape in zip(_NAMES, shapes, strict=True)}
        return cls(half_life, held)

    def take(self, deviation: Tensor, member: Tensor, *, live: Tensor | None = None) -> None:
        """Takes a batch in: (b, n) float64 deviations and (G, b) membership; of a stack, with K in front.

        A group with a row that is not finite keeps what it had, older by one update. In a stack, `live` is
        (K,) bool: what is not keeps what it had as it is.
        """
        member = member & sound(deviation, member)[..., None]
        mean, spread, count = scatter(deviation, member)
        held = self._held
        weight = held["weight"] * self._decay
        known = weight > _FORGOTTEN
        weight = torch.where(known, weight, 0.0)
        total = weight + count
        share = count / total.clamp(min=_TINY)
        shift = mean - held["mean"]
        between = (weight * share)[..., None, None] * shift[..., :, None] * shift[..., None, :]
        older = torch.where(known[..., None, None], held["scatter"] * self._decay, 0.0)
        squares = torch.where(known, held["squares"] * self._decay**2, 0.0) + count
        taken = (held["mean"] + share[..., None] * shift, older + spread + between, total, squares)
        for tensor, new in zip(held.values(), taken, strict=True):
            overwrite(tensor, new, live=live)

    def tensors(self) -> dict[str, Tensor]:
        """All that is to be saved, the tensors themselves; whoever writes into them sets them."""
        return self._held

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (G, n), covariance (G, n, n) and effective number of rows (G,), all float64.

        With w the weights of all rows so far, the covariance is Σ w (d − μ)(d − μ)ᵀ / (Σ w − Σ w² / Σ w)
        and the number of rows (Σ w)² / Σ w²; after one batch they are those of `moments.moments`.
        """
        mean, spread, weight, squares = self._held.values()
        rows = weight.square() / squares.clamp(min=_TINY)
        freedom = weight - squares / weight.clamp(min=_TINY)
        return mean.clone(), spread / freedom.clamp(min=_TINY)[..., None, None], rows


def sound(deviation: Tensor, member: Tensor) -> Tensor:
    """Whether every row of a group is finite, (G,) bool."""
    return ~(member & ~deviation.isfinite().all(-1)[..., None, :]).any(-1)
