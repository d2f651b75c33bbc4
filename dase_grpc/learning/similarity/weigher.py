"""SimilarityWeigher: weights of a learner's batches by DPS, and how similar each peer is."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.learning.agents.agent import Agent
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.memory import OWN, Memory
from dase_grpc.learning.similarity import pooled
from dase_grpc.learning.similarity.measure import (
    Similarity,
    difference,
    judge,
    measure,
    measure_rows,
    row_weights,
)
from dase_grpc.learning.similarity.moments import RunningMoments, sound

_TINY: Final = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Weighing:
    """The weights of one batch and what they came from; tensors on the batch's device, never NaN.

    Those of a stack's batches have K in front: weight is (K, B), and what is a scalar otherwise (K,).

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

    @property
    def external_share(self) -> Tensor:
        """Σ_ext w / Σ w, the share of the loss weight of external rows; a float64 scalar, 0 of nothing."""
        return self.external * self.similarity / self._total.clamp(min=_TINY)

    @property
    def effective_batch(self) -> Tensor:
        """Σ w / max w, the batch in rows of the largest weight; a float64 scalar, 0 of nothing."""
        return self._total / self.weight.amax(-1).double().clamp(min=_TINY)

    @property
    def _total(self) -> Tensor:
        return self.weight.sum(-1, dtype=torch.float64)


T = TypeVar("T", Weighing, Similarity)


class SimilarityWeigher:
    """DPS with fixed options for one agent, or for the K of a stack, whose batches have K in front.

    Without `dps.memory` it holds no state, and any thread may call it. With it, each `weigh` takes a batch
    into the running moments, so it is called once per update and one thread owns the weigher.

    Args:
        options: what is measured.
        own_id: the agent whose rows are internal; for a stack (K, 1) int32, and `masked` then.
        agents: K, the number of agents that share the buffer.
        masked: whether the reference twin weighs, with masks and as on a GPU, even where `pooled` could.
        memory: what gives out the running moments.
        running: those of a stack, which are there already.
    """

    def __init__(
        self,
        options: DpsConfig,
        *,
        own_id: int | Tensor,
        agents: int,
        masked: bool = False,
        memory: Memory = OWN,
        running: RunningMoments | None = None,
    ) -> None:
        self.options = options
        self._own_id = own_id
        self._agents = agents
        self._by_pooled = not masked and pooled.suffices(options)
        self._memory = memory
        self._running = running

    def rows_to_judge(self, batch: Batch) -> Tensor | None:
        """The (E,) int64 indices of the external rows, whose policy actions are all that `weigh` needs.

        None where the batch is not on a CPU: E is a shape that depends on data.
        """
        if batch.agent_id.device.type != "cpu":
            return None
        return torch.from_numpy((batch.agent_id.numpy() != self._own_id).nonzero()[0])

    def weigh(
        self,
        batch: Batch,
        policy_actions: Tensor,
        *,
        rows: Tensor | None = None,
        live: Tensor | None = None,
    ) -> Weighing:
        """The weights for one update; policy_actions is this agent's π(s) on the batch's device.

        They are (B, n), or (E, n) where `rows` are given, what `rows_to_judge` gave.
        With scope `agent`, external rows of agents outside 0..K-1 weigh 0 and count as degenerate.
        With `dps.memory`, the batch becomes part of the running moments first; of a stack, that of each agent
        for whom `live` is true, (K,) bool.
        Never synchronises with the host if that is another device.
        """
        if self._by_pooled and batch.action.device.type == "cpu":
            return self._weigh_pooled(batch, policy_actions.detach(), rows)
        if rows is not None:  # nothing looks at the internal rows' deviations
            policy_actions = torch.zeros_like(batch.action).index_copy(0, rows, policy_actions)
        external = batch.agent_id != self._own_id
        deviation = difference(batch.action, policy_actions)
        if self.options.scope == "transition":
            return _summary(external, measure_rows(deviation, self.options))
        by_agent = self.options.scope == "agent"
        if self.options.memory:
            member = self._sources(batch) & external[..., None, :]
            groups_and_all = torch.cat((member, external[..., None, :]), -2)
            self._running_of(deviation).take(deviation, groups_and_all, live=live)
            found = self._remembered(deviation, groups_and_all)
            chosen = slice(self._agents) if by_agent else slice(self._agents, None)
            groups = each_tensor(found, lambda values: values[..., chosen])
        else:
            member = self._sources(batch) & external[..., None, :] if by_agent else external[..., None, :]
            groups = measure(deviation, member, self.options)
        if by_agent:
            return _summary(external, _by_row(groups, member))
        return _weighing(row_weights(external, groups.similarity), groups)

    def _weigh_pooled(self, batch: Batch, policy_actions: Tensor, rows: Tensor | None) -> Weighing:
        """`weigh` by `pooled.terms`."""
        if rows is None:
            rows = self.rows_to_judge(batch)
            assert rows is not None
            policy_actions = policy_actions.index_select(0, rows)
        actions = batch.action.detach().index_select(0, rows)
        with np.errstate(all="ignore"):
            deviation = np.subtract(actions.numpy(), policy_actions.numpy(), dtype=np.float64)
        covariance_term, mean_term = pooled.terms(deviation, self.options.reference_variance)
        rho = covariance_term + mean_term
        similarity = math.exp(-rho)
        weight = np.ones(len(batch.agent_id), np.float32)
        weight[rows.numpy()] = similarity
        scalars = torch.tensor((similarity, rho, covariance_term, mean_term), dtype=torch.float64).unbind()
        return Weighing(
            weight=torch.from_numpy(weight),
            similarity=scalars[0],
            rho=scalars[1],
            covariance_term=scalars[2],
            mean_term=scalars[3],
            external=torch.tensor(len(rows)),
            degenerate=torch.tensor(len(rows) > 0 and math.isinf(rho)),
        )

    def by_source(self, batch: Batch, policy_actions: Tensor) -> Similarity:
        """How similar each collecting agent is by its own rows, (K,).

        With scope `agent` these are the similarities that weigh; with `transition` they are the means over
        each agent's rows, and with `pooled` a diagnostic that weighs nothing. With `dps.memory` they come
        from the running moments of each agent, which only `weigh` changes, and are those of its last call.
        An agent without rows in the batch has count 0 and similarity 0: skip it. The weigher's own id
        has similarity 1, ρ 0 and both terms 0, and counts its rows.
        Rows of agents outside 0..K-1 belong to nobody here. Never synchronises with the host.
        """
        member = self._sources(batch)
        deviation = difference(batch.action, policy_actions)
        if self.options.scope == "transition":
            found = _means(member, measure_rows(deviation, self.options))
        elif self.options.memory:
            found = self._remembered(deviation, member)
        else:
            found = measure(deviation, member, self.options)
        own = torch.arange(self._agents, device=member.device) == self._own_id
        return replace(
            found,
            similarity=found.similarity.masked_fill(own, 1.0),
            rho=found.rho.masked_fill(own, 0.0),
            covariance_term=found.covariance_term.masked_fill(own, 0.0),
            mean_term=found.mean_term.masked_fill(own, 0.0),
            degenerate=found.degenerate & ~own,
        )

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep, the tensors themselves: nothing before the first `weigh`."""
        return {} if self._running is None else self._running.tensors()

    def make_room(self, saved: Mapping[str, Tensor], device: torch.device) -> None:
        """Lets `tensors` be those that `saved` can be copied into."""
        if saved and self.options.memory and self._running is None:
            groups, size = saved["mean"].shape
            self._running = self._make_running(groups, size, device)

    def _sources(self, batch: Batch) -> Tensor:
        """(K, B) bool: which rows each agent collected."""
        agents = torch.arange(self._agents, device=batch.agent_id.device)
        return batch.agent_id[..., None, :] == agents[:, None]

    def remember(self, size: int, device: torch.device) -> None:
        """Makes the running moments of deviations in R^size now, where there are to be any."""
        if self.options.memory and self._running is None:
            self._running = self._make_running(self._agents + 1, size, device)

    def _running_of(self, deviation: Tensor) -> RunningMoments:
        self.remember(deviation.shape[-1], deviation.device)
        assert self._running is not None
        return self._running

    def _make_running(self, groups: int, size: int, device: torch.device) -> RunningMoments:
        half_life, memory = self.options.memory, self._memory
        return RunningMoments.empty(groups, size, half_life=half_life, device=device, memory=memory)

    def _remembered(self, deviation: Tensor, member: Tensor) -> Similarity:
        """The similarity of the first groups by their running moments: each agent, then all external rows."""
        groups = member.shape[-2]
        mean, cov, rows = self._running_of(deviation).moments()
        rows = torch.where(sound(deviation, member), rows[..., :groups], 0.0)
        mean, cov = mean[..., :groups, :], cov[..., :groups, :, :]
        return judge(mean, cov, rows=rows, count=member.sum(-1), options=self.options)


def each_tensor(found: T, change: Callable[[Tensor], Tensor]) -> T:
    """The same with each of its tensors changed."""
    return type(found)(*(change(getattr(found, field.name)) for field in fields(found)))


def _by_row(groups: Similarity, member: Tensor) -> Similarity:
    """Gives each row what its one group has; a row without a group is degenerate."""
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


def _summary(external: Tensor, rows: Similarity) -> Weighing:
    """The weights out of each row's similarity, and its means over the external rows."""
    return _weighing(row_weights(external, rows.similarity), _means(external[..., None, :], rows))


def _weighing(weight: Tensor, external: Similarity) -> Weighing:
    """The weights, and what the one group of all external rows says."""
    return Weighing(
        weight=weight,
        similarity=external.similarity[..., 0],
        rho=external.rho[..., 0],
        covariance_term=external.covariance_term[..., 0],
        mean_term=external.mean_term[..., 0],
        external=external.count[..., 0],
        degenerate=external.degenerate[..., 0],
    )


def _means(member: Tensor, rows: Similarity) -> Similarity:
    """Means of (b,) rows over each of (G, b) groups; of ρ and its terms over the finite ones."""
    finite = partial(_finite_mean, member)
    count = member.sum(-1)
    return Similarity(
        similarity=torch.where(member, rows.similarity[..., None, :], 0.0).sum(-1) / count.clamp(min=1),
        rho=finite(rows.rho),
        covariance_term=finite(rows.covariance_term),
        mean_term=finite(rows.mean_term),
        count=count,
        degenerate=(member & rows.degenerate[..., None, :]).any(-1),
    )


def _finite_mean(member: Tensor, value: Tensor) -> Tensor:
    value = value[..., None, :]
    measured = member & value.isfinite()
    count = measured.sum(-1)
    total = torch.where(measured, value, 0.0).sum(-1)
    return torch.where(count > 0, total / count.clamp(min=1), math.inf)


def weighed(agent: Agent, weigher: SimilarityWeigher, batch: Batch) -> tuple[Weighing, Tensor | None]:
    """The weights, and π(s) of the whole batch where the coming `update` goes on from it.

    Where it would not, the policy is asked about the external rows alone.
    """
    rows = None if agent.uses_actions else weigher.rows_to_judge(batch)
    if rows is None:
        actions = agent.policy_actions(batch.observation)
        return weigher.weigh(batch, actions), actions
    actions = agent.policy_actions(batch.observation.index_select(0, rows))
    return weigher.weigh(batch, actions, rows=rows), None
