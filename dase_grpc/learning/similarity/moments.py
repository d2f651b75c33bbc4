"""Mean and covariance of groups of deviations, and what may be done to a covariance before it is judged.

Pure functions on float64 tensors with leading dimensions; nothing waits for the device, so there is no
eigendecomposition here (torch's synchronises). Equations and reasons: docs/dps.md.
"""

from typing import Final

import torch
from torch import Tensor

SIGN_STEPS: Final = 40
"""Newton-Schulz steps; each enlarges a small eigenvalue by half, and 1.5^40 is 1e7."""


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
    tiny = torch.finfo(symmetric.dtype).tiny
    size = symmetric.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=tiny)
    sign = symmetric / size
    for _ in range(SIGN_STEPS):
        sign = 1.5 * sign - 0.5 * (sign @ sign @ sign)
    return sign


def _identity(cov: Tensor) -> Tensor:
    return torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
