"""Weighs a learner's batches by deterministic policy similarity, and says how similar each peer is."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dase_grpc.learning.batch import Batch
from dase_grpc.learning.dps import Similarity, check_options, deviations, measure, row_weights


@dataclass(frozen=True)
class Weighing:
    """The weights of one batch and what they came from; tensors on the batch's device, never NaN.

    Attributes:
        weight: (B,) float32, exactly 1 for internal rows and λ for external ones.
        similarity: λ, a float64 scalar; 0 without external rows, where it weighs nothing.
        rho: ρ in nats, a float64 scalar; infinite where λ is 0 by definition.
        covariance_term, mean_term: the two summands of the Jeffreys divergence, whatever the divergence
            is; float64 scalars, infinite where they cannot be measured.
        external: the number of external rows, an int64 scalar.
        degenerate: a bool scalar; there are external rows, but ρ could not be measured from them.
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
        divergence, scope, reference_variance: section `dps` of the configuration.
        own_id: the agent whose rows are internal.
        agents: K, the number of agents that share the buffer.

    Raises:
        ConfigError: an unknown divergence or scope, or a variance that is not positive.
    """

    def __init__(
        self, *, divergence: str, scope: str, reference_variance: float, own_id: int, agents: int
    ) -> None:
        check_options(divergence, scope=scope, reference_variance=reference_variance)
        self._divergence = divergence
        self._reference_variance = reference_variance
        self._own_id = own_id
        self._agents = agents

    def weigh(self, batch: Batch, policy_actions: Tensor) -> Weighing:
        """The weights for one update; policy_actions is (B, n), this agent's π(s) on the batch's device.

        Never synchronises with the host.
        """
        external = batch.agent_id != self._own_id
        pooled = self._measure(batch, policy_actions, member=external[None])
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
        """How similar each collecting agent is by its own rows, (K,); a diagnostic that weighs nothing.

        An agent without rows in the batch has count 0 and similarity 0: skip it. The weigher's own id
        has similarity 1, ρ 0 and both terms 0, and counts its rows.
        Rows of agents outside 0..K-1 belong to nobody here. Never synchronises with the host.
        """
        agents = torch.arange(self._agents, device=batch.agent_id.device)
        found = self._measure(batch, policy_actions, member=batch.agent_id == agents[:, None])
        own = agents == self._own_id
        return replace(
            found,
            similarity=found.similarity.masked_fill(own, 1.0),
            rho=found.rho.masked_fill(own, 0.0),
            covariance_term=found.covariance_term.masked_fill(own, 0.0),
            mean_term=found.mean_term.masked_fill(own, 0.0),
            degenerate=found.degenerate & ~own,
        )

    def _measure(self, batch: Batch, policy_actions: Tensor, *, member: Tensor) -> Similarity:
        deviation = deviations(batch.action, policy_actions)
        return measure(deviation, member, reference_variance=self._reference_variance, kind=self._divergence)
