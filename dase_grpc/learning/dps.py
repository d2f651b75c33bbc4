"""Deterministic policy similarity (DPS): how much the transitions of other agents count, as pure functions.

With D = A_E − π(S_E), the external rows' actions minus what the current policy would do, both in
[-1, 1]: ρ = divergence(N(mean D, cov D), N(0, rI)) and λ = exp(−ρ). Everything is float64 with masks
instead of index lists: no shape depends on data and nothing waits for the device.
Source: Saglam et al. 2022, arXiv 2207.13453; choices and traps: docs/dps.md.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, get_args

import numpy.typing as npt
import torch
from torch import Tensor

from dase_grpc.config import DIVERGENCES, Scope
from dase_grpc.errors import ConfigError

Values = Tensor | npt.ArrayLike

SCOPES: Final[tuple[str, ...]] = get_args(Scope)
REFERENCE_VARIANCE: Final = 0.1
SAMPLES: Final = 2048

_LN2: Final = math.log(2.0)
_SAMPLE_SEED: Final = 20_220_713
_HALF_SOBOL_STEP: Final = 2.0**-31
# A Cholesky pivot is the variance of one dimension given those before it; as a share of that dimension's
# variance it is known to some rounding errors per dimension and no better.
_PIVOT_ROUNDING: Final = 64 * torch.finfo(torch.float64).eps
_FIXED: Final[Mapping[str, float]] = {"none": 0.0, "isolated": math.inf}


def similarity_weights(
    actions: Values,
    policy_actions: Values,
    agent_ids: Values,
    own_id: int,
    *,
    reference_variance: float = REFERENCE_VARIANCE,
    divergence: str = "jeffreys",
    scope: str = "pooled",
) -> Tensor:
    """The weight of each transition: 1 for rows of `own_id`, λ = exp(−ρ) for all others.

    actions and policy_actions are (b, n) in [-1, 1], agent_ids is (b,); tensors, arrays or lists of any
    dtype. Returns (b,) float32 without gradient, on the device of `actions`. λ is 0 where it cannot be
    measured: at most n + 1 external rows, or a covariance that is not positive definite.

    Raises:
        ConfigError: an unknown divergence or scope, or a variance that is not positive.
        ValueError: the shapes do not fit together.
    """
    check_options(divergence, scope=scope, reference_variance=reference_variance)
    deviation = deviations(actions, policy_actions)
    ids = torch.as_tensor(agent_ids, device=deviation.device)
    if ids.shape != deviation.shape[:1]:
        raise ValueError(f"{len(deviation)} rows need as many agent ids, not shape {tuple(ids.shape)}")
    external = ids != own_id
    measured = measure(deviation, external[None], reference_variance=reference_variance, kind=divergence)
    return row_weights(external, measured.similarity)


def divergence(mean: Values, cov: Values, reference_variance: float, kind: str) -> Tensor:
    """ρ between N(mean, cov) and N(0, reference_variance I) in nats, a float64 scalar.

    mean is (n,) and cov (n, n); leading dimensions, if any, are kept. ρ is infinite where cov is not
    positive definite (except for `none`, which looks at nothing) and where it overflows float64.

    Raises:
        ConfigError: an unknown divergence, or a variance that is not positive.
    """
    check_options(kind, scope="pooled", reference_variance=reference_variance)
    centre = _float64(mean)
    if kind in _FIXED:
        return torch.full(centre.shape[:-1], _FIXED[kind], dtype=torch.float64, device=centre.device)
    estimate = relative_gaussian(centre, _float64(cov), reference_variance)
    return _or_infinite(EQUATIONS[kind](estimate), estimate.definite)


def check_options(kind: str, *, scope: str, reference_variance: float) -> None:
    """Refuses what no function here computes.

    Raises:
        ConfigError: one sentence naming the option, its value and what is allowed.
    """
    if kind not in DIVERGENCES:
        raise ConfigError(f"divergence {kind!r} is unknown; use one of {', '.join(DIVERGENCES)}")
    if scope not in SCOPES:
        raise ConfigError(f"scope {scope!r} is unknown; use one of {', '.join(SCOPES)}")
    if not 0.0 < reference_variance < math.inf:
        raise ConfigError(f"reference variance {reference_variance} must be positive and finite")


def deviations(actions: Values, policy_actions: Values) -> Tensor:
    """D = A − π(S), (b, n) float64 on the device of `actions`, without gradient.

    Raises:
        ValueError: the two are not both (b, n).
    """
    taken = _float64(actions)
    wanted = _float64(policy_actions, taken.device)
    if taken.ndim != 2 or taken.shape != wanted.shape:
        raise ValueError(
            f"actions and policy actions must both be (b, n), not {tuple(taken.shape)} "
            f"and {tuple(wanted.shape)}"
        )
    return taken - wanted


def row_weights(external: Tensor, similarity: Tensor) -> Tensor:
    """(b,) float32: `similarity` where `external`, exactly 1 elsewhere."""
    return torch.where(external, similarity.float(), 1.0)


# --- what is measured -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Similarity:
    """The similarity of G groups of rows, each a (G,) tensor; no value is ever NaN.

    Attributes:
        similarity: λ in [0, 1], float64; 0 for a group without rows.
        rho: ρ in nats, float64; infinite where λ is 0 by definition.
        covariance_term, mean_term: the two summands of the Jeffreys divergence, whatever the divergence
            is, so that runs can be compared; infinite where they cannot be measured.
        count: rows in the group, int64.
        degenerate: the group has rows, but ρ could not be measured from them and λ was set to 0.
    """

    similarity: Tensor
    rho: Tensor
    covariance_term: Tensor
    mean_term: Tensor
    count: Tensor
    degenerate: Tensor


def measure(deviation: Tensor, member: Tensor, *, reference_variance: float, kind: str) -> Similarity:
    """The similarity of G groups at once, from (b, n) deviations and (G, b) membership.

    Rows outside a group never touch its result, not even if they are NaN.
    """
    mean, cov, count = moments(deviation, member)
    estimate = relative_gaussian(mean, cov, reference_variance)
    usable = estimate.definite & (count > deviation.shape[1] + 1)
    covariance_part = _or_infinite(covariance_term(estimate), usable)
    mean_part = _or_infinite(mean_term(estimate), usable)
    present = count > 0
    if kind in _FIXED:
        rho = torch.where(present, _FIXED[kind], math.inf).double()
        degenerate = torch.zeros_like(present)
    else:
        known = kind == "jeffreys"
        rho = covariance_part + mean_part if known else _or_infinite(EQUATIONS[kind](estimate), usable)
        degenerate = present & rho.isinf()
    return Similarity((-rho).exp(), rho, covariance_part, mean_part, count, degenerate)


def moments(deviation: Tensor, member: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (G, n), covariance (G, n, n) with divisor count − 1, and count (G,) of each group's rows.

    deviation is (b, n) float64, member (G, b) bool. Divisors are at least 1. The mean is refined once, so
    that a dimension with one constant value has exactly no variance, whatever the order of the rows.
    """
    rows = member[..., None]
    count = member.sum(-1)
    size = count.clamp(min=1)[:, None, None]
    mean = torch.where(rows, deviation, 0.0).sum(-2, keepdim=True) / size
    mean = mean + torch.where(rows, deviation - mean, 0.0).sum(-2, keepdim=True) / size
    centred = torch.where(rows, deviation - mean, 0.0)
    cov = centred.mT @ centred / (size - 1).clamp(min=1)
    return mean.squeeze(-2), cov, count


# --- the divergences --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RelativeGaussian:
    """p = N(z, W Wᵀ): a Gaussian in units of √r, in which the reference q is N(0, I).

    z is (..., n), W and its inverse (..., n, n) lower triangular. Where `definite` is false W is the
    identity and stands for nothing.
    """

    mean: Tensor
    factor: Tensor
    inverse: Tensor
    definite: Tensor


def relative_gaussian(mean: Tensor, cov: Tensor, reference_variance: float) -> RelativeGaussian:
    """Divides mean by √r and factors cov/r; float64, any leading dimensions.

    Not definite: the factorisation fails, or a pivot is nothing but rounding errors.
    """
    scaled = cov / reference_variance
    factor, info = torch.linalg.cholesky_ex(scaled)
    pivot = factor.diagonal(dim1=-2, dim2=-1).square()
    rounding = scaled.diagonal(dim1=-2, dim2=-1) * (_PIVOT_ROUNDING * cov.shape[-1])
    definite = (info == 0) & (pivot > rounding).all(-1)
    identity = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
    factor = torch.where(definite[..., None, None], factor, identity)
    inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    return RelativeGaussian(mean / math.sqrt(reference_variance), factor, inverse, definite)


def jeffreys(p: RelativeGaussian) -> Tensor:
    """½ [KL(p‖q) + KL(q‖p)] = ¼ [tr Σ/r + r tr Σ⁻¹ − 2n] + ¼ μᵀ(I/r + Σ⁻¹)μ, in nats.

    The log-determinants of the two cancel, so none is computed.
    """
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
        _samples[key] = _draw_standard_normal(size, samples).to(device)
    return _samples[key]


def _draw_standard_normal(size: int, samples: int) -> Tensor:
    sobol = torch.quasirandom.SobolEngine(  # type: ignore[no-untyped-call]  # torch left it untyped
        size, scramble=True, seed=_SAMPLE_SEED
    )
    uniform = sobol.draw(samples, dtype=torch.float64) + _HALF_SOBOL_STEP
    normal: Tensor = torch.special.ndtri(uniform.clamp(max=1.0 - _HALF_SOBOL_STEP))
    return normal


def _float64(values: Values, device: torch.device | None = None) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, device=device).detach()


def _or_infinite(value: Tensor, usable: Tensor) -> Tensor:
    return torch.where(usable & value.isfinite(), value, math.inf)
