"""Deterministic policy similarity (DPS): how much the transitions of other agents count, as pure functions.

With D = A_E − π(S_E), the external rows' actions minus what the current policy would do, both in
[-1, 1]: ρ = divergence(N(mean D, cov D), N(0, rI)) and λ = exp(−ρ). Everything is float64 with masks
instead of index lists: no shape depends on data and nothing waits for the device.
Source: Saglam et al. 2022, arXiv 2207.13453; choices and traps: docs/dps.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt
import torch
from pydantic import ValidationError
from torch import Tensor

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.config.resolve import sentence
from dase_grpc.errors import ConfigError
from dase_grpc.learning.similarity.divergences import (
    EQUATIONS,
    RelativeGaussian,
    covariance_term,
    mean_term,
    relative_gaussian,
    shifted_reference,
)
from dase_grpc.learning.similarity.moments import floored, moments, shrunk

Values = Tensor | npt.ArrayLike

PAPER: Final = DpsConfig()
"""The defaults, which are the paper's."""

REFERENCE_VARIANCE: Final = PAPER.reference_variance

_FIXED: Final[Mapping[str, float]] = {"none": 0.0, "isolated": math.inf}
_SMALL_JS: Final = 0.25
"""The Jensen-Shannon divergence of two near Gaussians as a share of the Jeffreys divergence (and of KL)."""


def similarity_weights(
    actions: Values,
    policy_actions: Values,
    agent_ids: Values,
    own_id: int,
    *,
    reference_variance: float = REFERENCE_VARIANCE,
    divergence: str = PAPER.divergence,
    scope: str = PAPER.scope,
    floor: bool = PAPER.floor,
    shrinkage: float = PAPER.shrinkage,
    debias: bool = PAPER.debias,
    normalise: bool = PAPER.normalise,
) -> Tensor:
    """The weight of each transition: 1 for rows of `own_id`, λ = exp(−ρ) for all others.

    actions and policy_actions are (b, n) in [-1, 1], agent_ids is (b,); tensors, arrays or lists of any
    dtype. Returns (b,) float32 without gradient, on the device of `actions`. λ is 0 where it cannot be
    measured: at most n + 1 rows share it, or their covariance is not positive definite. The options are
    those of section `dps`; scope `agent` compares ids pairwise and takes O(b² n) memory.

    Raises:
        ConfigError: an option that is unknown or out of range.
        ValueError: the shapes do not fit together.
    """
    given = {"divergence": divergence, "scope": scope, "floor": floor, "shrinkage": shrinkage}
    options = _options(reference_variance=reference_variance, debias=debias, normalise=normalise, **given)
    deviation = deviations(actions, policy_actions)
    ids = torch.as_tensor(agent_ids, device=deviation.device)
    if ids.shape != deviation.shape[:1]:
        raise ValueError(f"{len(deviation)} rows need as many agent ids, not shape {tuple(ids.shape)}")
    external = ids != own_id
    if scope == "transition":
        measured = measure_rows(deviation, options)
    elif scope == "agent":
        measured = measure(deviation, external & (ids == ids[:, None]), options)
    else:
        measured = measure(deviation, external[None], options)
    return row_weights(external, measured.similarity)


def divergence(mean: Values, cov: Values, reference_variance: float, kind: str) -> Tensor:
    """ρ between N(mean, cov) and N(0, reference_variance I) in nats, a float64 scalar.

    mean is (n,) and cov (n, n); leading dimensions, if any, are kept. ρ is infinite where cov is not
    positive definite (except for `none`, which looks at nothing) and where it overflows float64.

    Raises:
        ConfigError: an unknown divergence, or a variance that is not positive.
    """
    _options(divergence=kind, reference_variance=reference_variance)
    centre = _float64(mean)
    if kind in _FIXED:
        return torch.full(centre.shape[:-1], _FIXED[kind], dtype=torch.float64, device=centre.device)
    estimate = relative_gaussian(centre, _float64(cov), reference_variance)
    return _or_infinite(EQUATIONS[kind](estimate), estimate.definite)


def _options(**values: Any) -> DpsConfig:
    try:
        return DpsConfig(**values)
    except ValidationError as error:
        raise ConfigError(sentence(error, known=())) from None


def deviations(actions: Values, policy_actions: Values) -> Tensor:
    """D = A − π(S), (b, n) float64 on the device of `actions`, without gradient.

    Raises:
        ValueError: the two are not both (b, n).
    """
    taken = _float64(actions)
    wanted = _float64(policy_actions, taken.device)
    if taken.ndim != 2 or taken.shape != wanted.shape:
        shapes = f"{tuple(taken.shape)} and {tuple(wanted.shape)}"
        raise ValueError(f"actions and policy actions must both be (b, n), not {shapes}")
    return taken - wanted


def row_weights(external: Tensor, similarity: Tensor) -> Tensor:
    """(b,) float32: `similarity`, (b,) or (1,), where `external`, exactly 1 elsewhere."""
    return torch.where(external, similarity.float(), 1.0)


@dataclass(frozen=True)
class Similarity:
    """The similarity of G groups of rows, each a (G,) tensor, of a stack (K, G); no value is ever NaN.

    Attributes:
        similarity: λ in [0, 1], float64; 0 for a group without rows.
        rho: ρ in nats, float64; infinite where λ is 0 by definition.
        covariance_term, mean_term: the summands of the Jeffreys divergence, whatever the divergence is and
            before `debias` and `normalise`, so that runs can be compared; infinite where unknown.
        count: rows in the group, int64.
        degenerate: the group has rows, but ρ could not be measured from them and λ was set to 0.
    """

    similarity: Tensor
    rho: Tensor
    covariance_term: Tensor
    mean_term: Tensor
    count: Tensor
    degenerate: Tensor


def measure(deviation: Tensor, member: Tensor, options: DpsConfig) -> Similarity:
    """The similarity of G groups at once, from (b, n) deviations and (G, b) membership.

    Rows outside a group never touch its result, not even if they are NaN. Leading dimensions are kept.
    """
    mean, cov, count = moments(deviation, member)
    return judge(mean, cov, rows=count, count=count, options=options)


def judge(mean: Tensor, cov: Tensor, *, rows: Tensor, count: Tensor, options: DpsConfig) -> Similarity:
    """The similarity of G groups from moments that rest on `rows` rows each, of which `count` are at hand.

    mean is (G, n), cov (G, n, n), both float64; rows is (G,), not necessarily whole, count (G,) int64.
    """
    if options.shrinkage > 0:
        cov = shrunk(cov, options.reference_variance, options.shrinkage)
    if options.floor:
        cov = floored(cov, options.reference_variance)
    estimate = relative_gaussian(mean, cov, options.reference_variance)
    enough = 0 if options.regularised else estimate.size + 1
    usable = estimate.definite & (rows > enough) & (count > 0)
    return _judge(estimate, usable, rows, count, options)


def measure_rows(deviation: Tensor, options: DpsConfig) -> Similarity:
    """The similarity of each of (b, n) deviations d by itself: b groups of one row, N(d, rI)."""
    estimate = shifted_reference(deviation, options.reference_variance)
    count = torch.ones_like(estimate.definite, dtype=torch.int64)
    return _judge(estimate, estimate.definite, count, count, options)


def _judge(
    estimate: RelativeGaussian, usable: Tensor, rows: Tensor, count: Tensor, options: DpsConfig
) -> Similarity:
    kind = options.divergence
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
        if options.debias:
            rho = (rho - expected_rho(rows, estimate.size, options)).clamp(min=0)
        if options.normalise:
            rho = rho / estimate.size
    return Similarity((-rho).exp(), rho, covariance_part, mean_part, count, degenerate)


def expected_rho(rows: Tensor, size: int, options: DpsConfig) -> Tensor:
    """What ρ is on average if the deviations follow the reference, to first order; (G,) float64.

    n(n + 3)/(4N) for moments of N rows, n/2 for a single row under the reference's covariance; a quarter
    of it for the Jensen-Shannon divergence.
    """
    number = rows.clamp(min=1).double()
    expected = size / (2 * number) if options.scope == "transition" else size * (size + 3) / (4 * number)
    return expected * _SMALL_JS if options.divergence == "js" else expected


def by_row(groups: Similarity, member: Tensor) -> Similarity:
    """Gives each of b rows what its one of G groups has; a row without a group is degenerate."""
    known = member.any(-2)

    def spread(value: Tensor, missing: float) -> Tensor:
        return torch.where(known, torch.where(member, value[..., None], 0.0).sum(-2), missing)

    return Similarity(
        similarity=spread(groups.similarity, 0.0),
        rho=spread(groups.rho, math.inf),
        covariance_term=spread(groups.covariance_term, math.inf),
        mean_term=spread(groups.mean_term, math.inf),
        count=known.long(),
        degenerate=(member & groups.degenerate[..., None]).any(-2) | ~known,
    )


def means(rows: Similarity, member: Tensor) -> Similarity:
    """Means of (b,) rows over each of (G, b) groups; of ρ and its terms over the finite ones."""
    count = member.sum(-1)

    def finite(value: Tensor) -> Tensor:
        measured = member & value[..., None, :].isfinite()
        total = torch.where(measured, value[..., None, :], 0.0).sum(-1)
        number = measured.sum(-1)
        return torch.where(number > 0, total / number.clamp(min=1), math.inf)

    return Similarity(
        similarity=torch.where(member, rows.similarity[..., None, :], 0.0).sum(-1) / count.clamp(min=1),
        rho=finite(rows.rho),
        covariance_term=finite(rows.covariance_term),
        mean_term=finite(rows.mean_term),
        count=count,
        degenerate=(member & rows.degenerate[..., None, :]).any(-1),
    )


def _float64(values: Values, device: torch.device | None = None) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, device=device).detach()


def _or_infinite(value: Tensor, usable: Tensor) -> Tensor:
    return torch.where(usable & value.isfinite(), value, math.inf)
