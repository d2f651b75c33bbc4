"""Weighs a learner's batches by deterministic policy similarity, and says how similar each peer is."""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dase_grpc.learning.batch import Batch
from dase_grpc.learning.dps import DpsOptions, Similarity, deviations, measure, measure_rows, row_weights


@dataclass(frozen=True)
class Weighing:
    """The weights of one batch and what they came from; tensors on the batch's device, never NaN.

    With scope `pooled` all external rows share what the scalars say. With the others the scalars are
    means over the external rows, `similarity` over all, ρ and its terms over those that could be measured.

    Attributes:
        weight: (B,) float32, exactly 1 for internal rows and λ for external ones.
        similarity: λ, a float64 scalar; 0 without external rows, where it weighs nothing.
        rho: ρ in nats, a float64 scalar; infinite where λ is 0 by definition.
        covariance_term, mean_term: the two summands of the Jeffreys divergence, whatever the divergence
            is; float64 scalars, infinite where they cannot be measured.
        external: the number of external rows, an int64 scalar.
        degenerate: a bool scalar; there are external rows whose ρ could not be measured.
    """

    weight: Tensor
    similarity: Tensor
    rho: Tensor
    covariance_term: Tensor
    mean_term: Tensor
    external: Tensor
    degenerate: Tensor


class SimilarityWeigher:
    """DPS with fixed options for one agent. Holds no state, so any thread may call it.

    Args:
        options: what is measured; section `dps` of the configuration.
        own_id: the agent whose rows are internal.
        agents: K, the number of agents that share the buffer.
    """

    def __init__(self, options: DpsOptions, *, own_id: int, agents: int) -> None:
        self._options = options
        self._own_id = own_id
        self._agents = agents

    def weigh(self, batch: Batch, policy_actions: Tensor) -> Weighing:
        """The weights for one update; policy_actions is (B, n), this agent's π(s) on the batch's device.

        With scope `agent`, external rows of agents outside 0..K-1 weigh 0 and count as degenerate.
        Never synchronises with the host.
        """
        external = batch.agent_id != self._own_id
        deviation = deviations(batch.action, policy_actions)
        if self._options.scope == "transition":
            return _summary(external, measure_rows(deviation, self._options))
        if self._options.scope == "agent":
            member = (batch.agent_id == self._ids(batch)[:, None]) & external
            return _summary(external, _by_row(measure(deviation, member, self._options), member))
        pooled = measure(deviation, external[None], self._options)
        return Weighing(
            weight=row_weights(external, pooled.similarity),
            similarity=pooled.similarity[0],
            rho=pooled.rho[0],
            covariance_term=pooled.covariance_term[0],
            mean_term=pooled.mean_term[0],
            external=pooled.count[0],
            degenerate=pooled.degenerate[0],
        )

    def by_source(self, batch: Batch, policy_actions: Tensor) -> Similarity:
        """How similar each collecting agent is by its own rows, (K,).

        With scope `agent` these are the similarities that weigh; with `transition` they are the means over
        each agent's rows, and with `pooled` a diagnostic that weighs nothing.
        An agent without rows in the batch has count 0 and similarity 0: skip it. The weigher's own id
        has similarity 1, ρ 0 and both terms 0, and counts its rows.
        Rows of agents outside 0..K-1 belong to nobody here. Never synchronises with the host.
        """
        agents = self._ids(batch)
        member = batch.agent_id == agents[:, None]
        deviation = deviations(batch.action, policy_actions)
        if self._options.scope == "transition":
            found = _means(member, measure_rows(deviation, self._options))
        else:
            found = measure(deviation, member, self._options)
        own = agents == self._own_id
        return replace(
            found,
            similarity=found.similarity.masked_fill(own, 1.0),
            rho=found.rho.masked_fill(own, 0.0),
            covariance_term=found.covariance_term.masked_fill(own, 0.0),
            mean_term=found.mean_term.masked_fill(own, 0.0),
            degenerate=found.degenerate & ~own,
        )

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep, the tensors themselves; whoever writes into them sets them."""
        return {}

    def _ids(self, batch: Batch) -> Tensor:
        return torch.arange(self._agents, device=batch.agent_id.device)


def _by_row(groups: Similarity, member: Tensor) -> Similarity:
    """Gives each row what its one group has; a row without a group is degenerate."""
    known = member.any(0)

    def spread(value: Tensor, missing: float) -> Tensor:
        return torch.where(known, torch.where(member, value[:, None], 0.0).sum(0), missing)

    return Similarity(
        similarity=spread(groups.similarity, 0.0),
        rho=spread(groups.rho, math.inf),
        covariance_term=spread(groups.covariance_term, math.inf),
        mean_term=spread(groups.mean_term, math.inf),
        count=known.long(),
        degenerate=(member & groups.degenerate[:, None]).any(0) | ~known,
    )


def _summary(external: Tensor, rows: Similarity) -> Weighing:
    """The weights out of each row's similarity, and its means over the external rows."""
    mean = _means(external[None], rows)
    return Weighing(
        weight=row_weights(external, rows.similarity),
        similarity=mean.similarity[0],
        rho=mean.rho[0],
        covariance_term=mean.covariance_term[0],
        mean_term=mean.mean_term[0],
        external=mean.count[0],
        degenerate=mean.degenerate[0],
    )


def _means(member: Tensor, rows: Similarity) -> Similarity:
    """Means of (b,) rows over each of (G, b) groups; of ρ and its terms over the finite ones."""
    finite = partial(_finite_mean, member)
    count = member.sum(-1)
    return Similarity(
        similarity=torch.where(member, rows.similarity, 0.0).sum(-1) / count.clamp(min=1),
        rho=finite(rows.rho),
        covariance_term=finite(rows.covariance_term),
        mean_term=finite(rows.mean_term),
        count=count,
        degenerate=(member & rows.degenerate).any(-1),
    )


def _finite_mean(member: Tensor, value: Tensor) -> Tensor:
    measured = member & value.isfinite()
    count = measured.sum(-1)
    total = torch.where(measured, value, 0.0).sum(-1)
    return torch.where(count > 0, total / count.clamp(min=1), math.inf)
