"""The divergences ρ between the deviations' Gaussian and the reference N(0, rI), as pure functions.

Everything is float64, takes leading dimensions, and neither waits for the device nor makes shapes that
depend on data. Source: Saglam et al. 2022, arXiv 2207.13453; choices and traps: docs/dps.md.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

SAMPLES: Final = 2048

PIVOT_ROUNDING: Final = 64 * torch.finfo(torch.float64).eps
"""Up to this share of a dimension's variance, times their number, its Cholesky pivot may be rounding errors.

A pivot is the variance of one dimension given those before it.
"""

_LN2: Final = math.log(2.0)
_SAMPLE_SEED: Final = 20_220_713
_HALF_SOBOL_STEP: Final = 2.0**-31


@dataclass(frozen=True)
class RelativeGaussian:
    """p = N(z, W Wᵀ): a Gaussian in units of √r, in which the reference q is N(0, I).

    z is (..., n), W and its inverse (..., n, n) lower triangular. Where `definite` is false W is the
    identity and stands for nothing. `size` is the number of action dimensions, also of a `shifted_reference`.
    """

    mean: Tensor
    factor: Tensor
    inverse: Tensor
    definite: Tensor
    size: int


def relative_gaussian(mean: Tensor, cov: Tensor, reference_variance: float) -> RelativeGaussian:
    """Divides mean by √r and factors cov/r; float64, any leading dimensions.

    Not definite: the factorisation fails, or a pivot is nothing but rounding errors.
    """
    scaled = cov / reference_variance
    factor, info = torch.linalg.cholesky_ex(scaled)
    pivot = factor.diagonal(dim1=-2, dim2=-1).square()
    rounding = scaled.diagonal(dim1=-2, dim2=-1) * (PIVOT_ROUNDING * cov.shape[-1])
    definite = (info == 0) & (pivot > rounding).all(-1)
    identity = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
    factor = torch.where(definite[..., None, None], factor, identity)
    inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    size = cov.shape[-1]
    return RelativeGaussian(mean / math.sqrt(reference_variance), factor, inverse, definite, size)


def shifted_reference(deviation: Tensor, reference_variance: float) -> RelativeGaussian:
    """N(d, rI) for each row d of (..., n), along the axis of d: one-dimensional, the others add nothing.

    Not definite where d is not finite.
    """
    square = deviation.square().sum(-1, keepdim=True) / reference_variance
    definite = square.isfinite().squeeze(-1)
    unit = torch.ones_like(square)[..., None]
    return RelativeGaussian(square.sqrt(), unit, unit, definite, deviation.shape[-1])


def jeffreys(p: RelativeGaussian) -> Tensor:
    """½ [KL(p‖q) + KL(q‖p)] = ¼ [tr Σ/r + r tr Σ⁻¹ − 2n] + ¼ μᵀ(I/r + Σ⁻¹)μ: log-determinants cancel."""
    return covariance_term(p) + mean_term(p)


def covariance_term(p: RelativeGaussian) -> Tensor:
    """¼ [tr Σ/r + r tr Σ⁻¹ − 2n], the part of the Jeffreys divergence that is 0 for Σ = rI.

    With Σ/r = WWᵀ it equals ¼ ‖W − W⁻ᵀ‖², which cannot fall below 0 by rounding.
    """
    return (p.factor - p.inverse.mT).square().sum((-2, -1)) / 4


def mean_term(p: RelativeGaussian) -> Tensor:
    """¼ μᵀ(I/r + Σ⁻¹)μ = ¼ (‖z‖² + ‖W⁻¹z‖²), the part of the Jeffreys divergence that is 0 for μ = 0."""
    solved = (p.inverse @ p.mean[..., None]).squeeze(-1)
    return (p.mean.square().sum(-1) + solved.square().sum(-1)) / 4


def kl(p: RelativeGaussian) -> Tensor:
    """KL(p‖q) = ½ [tr Σ/r + μᵀμ/r − n + n ln r − ln det Σ], in nats."""
    square = p.factor.square().sum((-2, -1)) + p.mean.square().sum(-1)
    log_determinant = 2 * p.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return ((square - p.mean.shape[-1] - log_determinant) / 2).clamp(min=0)


def js(p: RelativeGaussian) -> Tensor:
    """The Jensen-Shannon divergence ½ KL(p‖m) + ½ KL(q‖m) with m = ½(p + q), in [0, ln 2] nats.

    Gaussians have no closed form, so ∫ m(x) [ln 2 − H(s(x))] dx is averaged over a fixed sample of m, one
    half from p and one from q. s = p/(p + q) is the logistic function of ln p/q, and H(s) the entropy of
    a coin with bias s. The integrand lies in [0, ln 2], so the mean does too. docs/dps.md has its error.
    """
    from_q = standard_normal(p.mean.shape[-1], SAMPLES, p.mean.device)
    centre = p.mean[..., None, :]
    from_p = centre + from_q @ p.factor.mT
    back = (from_q - centre) @ p.inverse.mT
    norm = from_q.square().sum(-1)
    gain = torch.cat((from_p.square().sum(-1) - norm, norm - back.square().sum(-1)), -1) / 2
    log_determinant = p.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
    ratio = (gain - log_determinant).abs().clamp(max=700.0)
    entropy = torch.exp(-ratio).log1p() + ratio * torch.sigmoid(-ratio)
    return (_LN2 - entropy).mean(-1).clamp(0.0, _LN2)


EQUATIONS: Final[Mapping[str, Callable[[RelativeGaussian], Tensor]]] = {
    "jeffreys": jeffreys,
    "js": js,
    "kl": kl,
}


# A dictionary, because Dynamo ignores functools.cache and would trace the sampling.
_samples: Final[dict[tuple[int, int, torch.device], Tensor]] = {}


def standard_normal(size: int, samples: int, device: torch.device) -> Tensor:
    """(samples, size) float64 from N(0, I): scrambled Sobol points with a fixed seed, the same everywhere.

    Made on the CPU and kept per device, so that only the first call copies: make it before capturing a
    graph. Nobody may write to it. Leaves torch's global random state alone.
    """
    key = (size, samples, device)
    if key not in _samples:
        sobol = torch.quasirandom.SobolEngine(  # type: ignore[no-untyped-call]  # torch left it untyped
            size, scramble=True, seed=_SAMPLE_SEED
        )
        uniform = sobol.draw(samples, dtype=torch.float64) + _HALF_SOBOL_STEP
        _samples[key] = torch.special.ndtri(uniform.clamp(max=1.0 - _HALF_SOBOL_STEP)).to(device)
    return _samples[key]
