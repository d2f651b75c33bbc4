"""SimilarityWeigher: weights of a learner's batches by DPS, and how similar each peer is."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.memory import OWN, Memory
from dase_grpc.learning.agents.registry import Agent
from dase_grpc.learning.similarity.divergences import PIVOT_ROUNDING
from dase_grpc.learning.similarity.measure import (
    Similarity,
    by_row,
    judge,
    means,
    measure,
    measure_rows,
    row_weights,
)
from dase_grpc.learning.similarity.moments import RunningMoments, sound

_OF_OWN: Final = {"similarity": 1.0, "rho": 0.0, "covariance_term": 0.0, "mean_term": 0.0}
_TINY: Final = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Weighing(Similarity):
    """The weights of one batch, and what its external rows, as one group, say; never NaN.

    Each value has one dimension less than a Similarity of groups: a scalar, of a stack (K,). With scope
    `pooled` all external rows share it. With the others it is a mean over the external rows, `similarity`
    over all, ρ and its terms over those that could be measured; `degenerate` says whether there are others.

    Attributes:
        weight: (B,) float32, of a stack (K, B), exactly 1 for internal rows and λ for external ones.
    """

    weight: Tensor

    @classmethod
    def of(cls, weight: Tensor, external: Similarity) -> "Weighing":
        """The weights, and the one group of all external rows."""
        return cls(**{name: value[..., 0] for name, value in vars(external).items()}, weight=weight)

    @property
    def external(self) -> Tensor:
        """The number of external rows, an int64 scalar."""
        return self.count

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


class Weigher(ABC):
    """What weighs the batches of one agent, or of the K of a stack, whose batches have K in front.

    Attributes:
        options: section `dps` of the configuration.
    """

    options: DpsConfig

    @property
    def records(self) -> bool:
        """Whether `weigh` may be recorded with an update: it runs nothing on the host."""
        return False

    def rows_to_judge(self, batch: Batch) -> Tensor | None:
        """The (E,) int64 indices of the external rows, if `weigh` takes their actions alone."""
        return None

    @abstractmethod
    def weigh(
        self, batch: Batch, policy_actions: Tensor, *, rows: Tensor | None = None, live: Tensor | None = None
    ) -> Weighing:
        """The weights for one update; policy_actions is this agent's π(s) on the batch's device.

        They are (B, n), or (E, n) where `rows` are given, what `rows_to_judge` gave. Of a stack, batches of
        agents for whom `live` is false, (K,) bool, are not to be weighed.
        """

    @abstractmethod
    def by_source(self, batch: Batch, policy_actions: Tensor) -> Similarity:
        """How similar each collecting agent is by its own rows of the batch that was weighed last, (K,).

        Skip an agent with count 0, without rows. The weigher's own id has similarity 1, ρ 0 and both terms 0.
        """

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep, the tensors themselves: nothing before the first `weigh`."""
        return {}

    def make_room(self, saved: Mapping[str, Tensor], device: torch.device) -> None:  # noqa: B027  # most keep nothing
        """Lets `tensors` be those that `saved` can be copied into."""

    def untouched(self) -> dict[str, Tensor]:
        """What goes into `tensors` that are there already, of a checkpoint from before the first `weigh`."""
        return {}


class SimilarityWeigher(Weigher):
    """DPS with fixed options for one agent, or for the K of a stack, whose batches have K in front.

    Without `dps.memory` it holds no state, and any thread may call it. With it, each `weigh` takes a batch
    into the running moments, so it is called once per update and one thread owns the weigher.

    Args:
        own_id: the agent whose rows are internal; for a stack (K, 1) int32, and `masked` then.
        agents: K, the number of agents that share the buffer.
        masked: whether the reference twin weighs, with masks, even where `pooled_terms` is a shorter way: by
            the default options on a CPU.
        memory: what gives out the running moments; `running` are those of a stack, which are there already.
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
        self._by_pooled = options.is_paper and not masked
        self._memory = memory
        self._running = running

    @property
    def records(self) -> bool:
        """See Weigher."""
        return True

    def rows_to_judge(self, batch: Batch) -> Tensor | None:
        """See Weigher; on a CPU only."""
        return external_rows(batch, self._own_id)

    def weigh(
        self, batch: Batch, policy_actions: Tensor, *, rows: Tensor | None = None, live: Tensor | None = None
    ) -> Weighing:
        """See Weigher.

        With scope `agent`, external rows of agents outside 0..K-1 weigh 0 and count as degenerate. With
        `dps.memory`, the batch becomes part of the running moments first; of a stack, that of each agent for
        whom `live` is true. Never synchronises with the host if that is another device.
        """
        if self._by_pooled and batch.action.device.type == "cpu":
            return self._weigh_pooled(batch, policy_actions.detach(), rows)
        if rows is not None:  # nothing looks at the internal rows' deviations
            policy_actions = torch.zeros_like(batch.action).index_copy(0, rows, policy_actions)
        external = batch.agent_id != self._own_id
        deviation = _difference(batch, policy_actions)
        if self.options.scope == "transition":
            return _summary(external, measure_rows(deviation, self.options))
        pool = external[..., None, :]
        if self.options.memory:
            sources = self._sources(batch) & pool
            member = torch.cat((sources, pool), -2)
            self._running_of(deviation).take(deviation, member, live=live)
            groups = self._remembered(deviation, member)
            chosen = slice(self._agents) if self.options.scope == "agent" else slice(self._agents, None)
            groups = each_tensor(groups, lambda values: values[..., chosen])
        else:
            sources = self._sources(batch) & pool if self.options.scope == "agent" else pool
            groups = measure(deviation, sources, self.options)
        if self.options.scope == "agent":
            return _summary(external, by_row(groups, sources))
        return Weighing.of(row_weights(external, groups.similarity), groups)

    def _weigh_pooled(self, batch: Batch, policy_actions: Tensor, rows: Tensor | None) -> Weighing:
        """`weigh` by `pooled_terms`: rows are gathered instead of masked, and nothing waits for a device."""
        if rows is None:
            rows = self.rows_to_judge(batch)
            assert rows is not None
            policy_actions = policy_actions.index_select(0, rows)
        actions = batch.action.detach().index_select(0, rows)
        with np.errstate(all="ignore"):
            deviation = np.subtract(actions.numpy(), policy_actions.numpy(), dtype=np.float64)
        covariance_term, mean_term = pooled_terms(deviation, self.options.reference_variance)
        rho = covariance_term + mean_term
        similarity = math.exp(-rho)
        weight = np.ones(len(batch.agent_id), np.float32)
        weight[rows.numpy()] = similarity
        # out of NumPy, for torch.tensor takes twice as long
        scalars = torch.from_numpy(np.array((similarity, rho, covariance_term, mean_term))).unbind()
        return Weighing(
            weight=torch.from_numpy(weight),
            similarity=scalars[0],
            rho=scalars[1],
            covariance_term=scalars[2],
            mean_term=scalars[3],
            count=torch.from_numpy(np.array(len(rows))),
            degenerate=torch.from_numpy(np.array(len(rows) > 0 and math.isinf(rho))),
        )

    def by_source(self, batch: Batch, policy_actions: Tensor) -> Similarity:
        """See Weigher.

        With scope `agent` these are the similarities that weigh; with `transition` they are the means over
        each agent's rows, and with `pooled` a diagnostic that weighs nothing. With `dps.memory` they come
        from the running moments, which only `weigh` changes. Rows of agents outside 0..K-1 belong to
        nobody here. Never synchronises with the host.
        """
        member = self._sources(batch)
        deviation = _difference(batch, policy_actions)
        if self.options.scope == "transition":
            found = means(measure_rows(deviation, self.options), member)
        elif self.options.memory:
            found = self._remembered(deviation, member)
        else:
            found = measure(deviation, member, self.options)
        return of_own(found, torch.arange(self._agents, device=member.device) == self._own_id)

    def tensors(self) -> dict[str, Tensor]:
        """See Weigher."""
        return {} if self._running is None else self._running.tensors()

    def make_room(self, saved: Mapping[str, Tensor], device: torch.device) -> None:
        """See Weigher."""
        if saved:
            self.remember(saved["mean"].shape[1], device, groups=len(saved["weight"]))

    def untouched(self) -> dict[str, Tensor]:
        """See Weigher: moments of no rows, where a recorded update has them from its beginning."""
        return {name: torch.zeros_like(tensor) for name, tensor in self.tensors().items()}

    def remember(self, size: int, device: torch.device, *, groups: int | None = None) -> None:
        """Makes the running moments of deviations in R^size now, where there are to be any."""
        if self.options.memory and self._running is None:
            self._running = RunningMoments.empty(
                self._agents + 1 if groups is None else groups,  # each agent, then all external rows
                size,
                half_life=self.options.memory,
                device=device,
                memory=self._memory,
            )

    def _sources(self, batch: Batch) -> Tensor:
        """(K, B) bool: which rows each agent collected."""
        agents = torch.arange(self._agents, device=batch.agent_id.device)
        return batch.agent_id[..., None, :] == agents[:, None]

    def _running_of(self, deviation: Tensor) -> RunningMoments:
        self.remember(deviation.shape[-1], deviation.device)
        assert self._running is not None
        return self._running

    def _remembered(self, deviation: Tensor, member: Tensor) -> Similarity:
        """The similarity of the first groups by their running moments."""
        groups = member.shape[-2]
        mean, cov, rows = self._running_of(deviation).moments()
        rows = torch.where(sound(deviation, member), rows[..., :groups], 0.0)
        mean, cov = mean[..., :groups, :], cov[..., :groups, :, :]
        return judge(mean, cov, rows=rows, count=member.sum(-1), options=self.options)


def external_rows(batch: Batch, own_id: int | Tensor) -> Tensor | None:
    """The (E,) int64 indices of the rows that others collected; on a CPU only."""
    if batch.agent_id.device.type != "cpu":
        return None
    return torch.from_numpy((batch.agent_id.numpy() != own_id).nonzero()[0])


def of_own(found: Similarity, own: Tensor) -> Similarity:
    """The similarities of collecting agents with those of the weigher's own id, where `own` is true."""
    filled = {name: getattr(found, name).masked_fill(own, value) for name, value in _OF_OWN.items()}
    return replace(found, **filled, degenerate=found.degenerate & ~own)


def _difference(batch: Batch, policy_actions: Tensor) -> Tensor:
    return batch.action.detach().double() - policy_actions.detach().double()


def _summary(external: Tensor, rows: Similarity) -> Weighing:
    """The weights out of each row's similarity, and its means over the external rows."""
    return Weighing.of(row_weights(external, rows.similarity), means(rows, external[..., None, :]))


def pooled_terms(deviation: npt.NDArray[np.float64], reference_variance: float) -> tuple[float, float]:
    """The covariance's and the mean's summand of ρ for (e, n) rows that share one λ; infinite if unknown.

    What `measure`, the reference twin, finds for a group of these rows, up to the order of float64 sums.
    """
    count, size = deviation.shape
    unknown = math.inf, math.inf
    if count <= size + 1:
        return unknown
    with np.errstate(all="ignore"):  # what is not finite makes the result infinite
        mean = deviation.sum(0) / count
        centred = deviation - mean
        left = centred.sum(0) / count  # as in moments.scatter
        mean += left
        centred -= left
        scaled = centred.T @ centred
        scaled /= (count - 1) * reference_variance
        try:
            factor = np.linalg.cholesky(scaled)
        except np.linalg.LinAlgError:
            return unknown
        if not (np.square(factor.diagonal()) > PIVOT_ROUNDING * size * scaled.diagonal()).all():
            return unknown
        inverse = np.linalg.inv(factor)
        shift = mean / math.sqrt(reference_variance)
        solved = inverse @ shift
        found = np.square(factor - inverse.T).sum() / 4, (shift @ shift + solved @ solved) / 4
    covariance_term, mean_term = (float(each) if math.isfinite(each) else math.inf for each in found)
    return covariance_term, mean_term


T = TypeVar("T", bound=Similarity)


def each_tensor(found: T, change: Callable[[Tensor], Tensor]) -> T:
    """The same with each of its tensors changed."""
    return type(found)(*(change(getattr(found, field.name)) for field in fields(found)))


def weighed(agent: Agent, weigher: Weigher, batch: Batch) -> tuple[Weighing, Tensor | None]:
    """The weights, and π(s) of the batch if `update` goes on from it, else asked of external rows only."""
    rows = None if agent.uses_actions else weigher.rows_to_judge(batch)
    if rows is None:
        actions = agent.policy_actions(batch.observation)
        return weigher.weigh(batch, actions), actions
    actions = agent.policy_actions(batch.observation.index_select(0, rows))
    return weigher.weigh(batch, actions, rows=rows), None
