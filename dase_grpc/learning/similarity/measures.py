"""Measures: functions that weigh external transitions, and the `Context` that they are given.

Each returns one weight ≥ 0 for each external row, (E,), and NaN where it cannot tell: that becomes 0, and its
batch counts as degenerate. With D the deviations a − π(s) of rows, float64, in normalised action units.
Equations, reasons and what each is for: docs/dps.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.similarity.divergences import (
    RelativeGaussian,
    jeffreys,
    relative_gaussian,
)
from dase_grpc.learning.similarity.measure import measure, measure_rows
from dase_grpc.learning.similarity.moments import moments
from dase_grpc.learning.similarity.weigher import pooled_terms

Q = Callable[[Tensor, Tensor], Tensor]
Policy = Callable[[Tensor], Tensor]


class Rows:
    """Rows of one batch, N of them; each column is copied when it is first asked for.

    Args:
        index: (N,) int64, which rows of the batch.
        policy: π, asked for `policy_action`.
    """

    def __init__(self, batch: Batch, index: Tensor, policy: Policy) -> None:
        self._batch = batch
        self._index = index
        self._policy = policy

    def __len__(self) -> int:
        return len(self._index)

    @cached_property
    def observation(self) -> Tensor:
        """Observations s as the environment gave them, (N, m) float32."""
        return self._of(self._batch.observation)

    @cached_property
    def action(self) -> Tensor:
        """Actions a that were taken, noise and all, (N, n) float32 in [-1, 1]."""
        return self._of(self._batch.action)

    @cached_property
    def policy_action(self) -> Tensor:
        """π(s), what the agent would do now, (N, n) float32 in [-1, 1]."""
        return self._policy(self.observation)

    @cached_property
    def deviation(self) -> Tensor:
        """D = a − π(s), (N, n) float64."""
        return self.action.double() - self.policy_action.double()

    @cached_property
    def reward(self) -> Tensor:
        """Rewards, of n-step returns their sum, (N,) float32."""
        return self._of(self._batch.reward)

    @cached_property
    def agent_id(self) -> Tensor:
        """Who collected them, (N,) int32."""
        return self._of(self._batch.agent_id)

    @cached_property
    def policy_version(self) -> Tensor:
        """The updates that their collector's policy had had, (N,) int32."""
        return self._of(self._batch.policy_version)

    def _of(self, column: Tensor) -> Tensor:
        return column.index_select(0, self._index)


@dataclass(frozen=True)
class Context:
    """A batch as one agent sees it before its update; without gradients, on the agent's device.

    Attributes:
        external: the rows that others collected, at least one: what is to be weighed.
        own: the agent's own rows, which weigh 1; there may be none.
        own_id: the agent.
        agents: K, the agents that share the buffer.
        version: the updates that its policy has had.
        q: Q(s, a) of (N, m) observations and (N, n) actions as the actor's loss has it (Q1 for TD3), in the
            environment's rewards, (N,).
        options: section `dps` of the configuration.
    """

    external: Rows
    own: Rows
    own_id: int
    agents: int
    version: int
    q: Q
    options: DpsConfig


Measure = Callable[[Context], Tensor]


def similarity(context: Context) -> Tensor:
    """λ = exp(−ρ) as the options of section `dps` describe it, but for `memory`: the default measure."""
    options, deviation = context.options, context.external.deviation
    if options.scope == "transition":
        return measure_rows(deviation, options).similarity
    if options.is_paper and deviation.device.type == "cpu":
        terms = pooled_terms(deviation.numpy(), options.reference_variance)
        return torch.full((len(deviation),), np.exp(-sum(terms)), dtype=torch.float64)
    ids = context.external.agent_id
    by_agent = options.scope == "agent"
    member = ids == torch.arange(context.agents, device=ids.device)[:, None] if by_agent else _all(deviation)
    groups = measure(deviation, member, options).similarity
    return (member * groups[:, None]).sum(0)


def relative(context: Context) -> Tensor:
    """exp(−ρ), ρ the Jeffreys divergence between the Gaussians of the external and of the agent's own D.

    ρ = ¼ [tr Σ_E Σ_I⁻¹ + tr Σ_I Σ_E⁻¹ − 2n + Δᵀ(Σ_E⁻¹ + Σ_I⁻¹)Δ], Δ = μ_E − μ_I; over n with `normalise`.
    NaN where either side has at most n + 1 rows or no definite covariance.
    """
    external, own = context.external.deviation, context.own.deviation
    size = external.shape[1]
    if min(len(external), len(own)) <= size + 1:
        return _unknown(external)
    reference = _gaussian(own)
    mean, cov, _ = moments(external, _all(external))
    inverse = reference.inverse
    shift = (inverse @ (mean - reference.mean)[..., None]).squeeze(-1)
    estimate = relative_gaussian(shift, inverse @ cov @ inverse.mT, 1.0)
    rho = jeffreys(estimate) / (size if context.options.normalise else 1)
    known = reference.definite & estimate.definite & rho.isfinite()
    return torch.where(known, (-rho).exp(), torch.nan).expand(len(external))


def relative_rows(context: Context) -> Tensor:
    """exp(−½ max(0, dᵀ S⁻¹ d / n − 1)) of each external d, S = DᵀD / N of the agent's own rows.

    So the agent's own rows have dᵀ S⁻¹ d / n = 1 on average, whatever n and the units. NaN where it has at
    most n + 1 rows or S is not definite.
    """
    external, own = context.external.deviation, context.own.deviation
    size = external.shape[1]
    if len(own) <= size + 1:
        return _unknown(external)
    reference = relative_gaussian(torch.zeros_like(own[0]), own.mT @ own / len(own), 1.0)
    excess = (external @ reference.inverse.mT).square().sum(-1) / size - 1
    return torch.where(reference.definite, (-excess.clamp(min=0) / 2).exp(), torch.nan)


def advantage(context: Context) -> Tensor:
    """exp(min(0, A/s)), A = Q(s, a) − Q(s, π(s)) of each external row, s the root mean square of own A.

    NaN without own rows, and of an A that is NaN; where s is 0, 1 for A ≥ 0 and 0 below.
    """
    if not len(context.own):
        return _unknown(context.external.action)
    scale = _advantages(context, context.own).square().mean().sqrt()
    found = _advantages(context, context.external)
    return torch.where(found >= 0, 1.0, (found / scale).exp())


def _advantages(context: Context, rows: Rows) -> Tensor:
    taken = context.q(rows.observation, rows.action)
    return (taken - context.q(rows.observation, rows.policy_action)).double()


def _gaussian(deviation: Tensor) -> RelativeGaussian:
    mean, cov, _ = moments(deviation, _all(deviation))
    return relative_gaussian(mean, cov, 1.0)


def _all(rows: Tensor) -> Tensor:
    """(1, N): all rows are one group."""
    return torch.ones(1, len(rows), dtype=torch.bool, device=rows.device)


def _unknown(rows: Tensor) -> Tensor:
    return torch.full((len(rows),), torch.nan, dtype=torch.float64, device=rows.device)
