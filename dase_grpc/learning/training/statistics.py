"""Statistics between two lines of a learner's metrics: sums on the device, read seldom."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dase_grpc.learning.agents.memory import OWN, Memory
from dase_grpc.learning.similarity.measure import Similarity
from dase_grpc.learning.similarity.weigher import Weighing
from dase_grpc.metrics.nodes import LearnerMetrics


@dataclass
class Mean:
    """A running mean of finite numbers; None while there are none."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Takes a number in, unless it is not finite."""
        if value - value == 0:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        """The mean so far."""
        return self.total / self.count if self.count else None


@dataclass
class Window:
    """Everything counted since the last line of metrics."""

    started_at: float
    started_step: int
    started_updates: int
    episode_returns: Mean = field(default_factory=Mean)
    episodes: int = 0
    skipped: int = 0
    losses: dict[str, Mean] = field(default_factory=dict)
    similarity: dict[int, Mean] = field(default_factory=dict)
    terms: dict[str, Mean] = field(default_factory=dict)
    source_terms: dict[str, dict[int, Mean]] = field(default_factory=dict)
    external_share: Mean = field(default_factory=Mean)
    effective_batch: Mean = field(default_factory=Mean)
    policy_lag: Mean = field(default_factory=Mean)
    refused: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)


class DeviceTotals:
    """Sums over every weighed update, kept on the device so that no update waits for the host.

    Args:
        similarity, weighed, degenerate: where they are kept, float64, int64 and int64; of a stack (K,).
    """

    def __init__(self, similarity: Tensor, weighed: Tensor, degenerate: Tensor) -> None:
        self._similarity = similarity
        self._weighed = weighed
        self._degenerate = degenerate

    @classmethod
    def zero(cls, device: torch.device, *, memory: Memory = OWN) -> "DeviceTotals":
        """Those of one agent, before its first update."""
        room = partial(memory.zeros, shape=(), device=device)
        return cls(
            room("totals.similarity", dtype=torch.float64),
            room("totals.weighed", dtype=torch.int64),
            room("totals.degenerate", dtype=torch.int64),
        )

    @classmethod
    def stacked(cls, held: Mapping[str, Tensor]) -> "DeviceTotals":
        """Those of all agents of a stack; `held` is what its memory holds."""
        return cls(*(held[f"totals.{name}"] for name in ("similarity", "weighed", "degenerate")))

    def add(self, weighing: Weighing, *, live: Tensor | None = None) -> None:
        """Counts one weighed batch; of a stack, those for which `live` is true. Never waits for the host."""
        counts = 1 if live is None else live
        self._similarity += weighing.similarity * counts
        self._weighed += (weighing.external > 0) * counts
        self._degenerate += weighing.degenerate * counts

    def take(self) -> tuple[float | None, int]:
        """The mean λ over batches with external rows, and how many were degenerate; starts afresh."""
        weighed, degenerate = int(self._weighed), int(self._degenerate)
        mean = float(self._similarity) / weighed if weighed else None
        for total in (self._similarity, self._weighed, self._degenerate):
            total.zero_()
        return mean, degenerate

    def tensors(self) -> dict[str, Tensor]:
        """The sums themselves, by name; whoever writes into them sets them."""
        return {
            "similarity": self._similarity,
            "weighed": self._weighed,
            "degenerate": self._degenerate,
        }


@dataclass(frozen=True)
class Diagnosis:
    """One update looked at closely; read from the device once.

    similarity is by collecting agent, without those it could not be measured for, and weighs nothing;
    similarity_weight is the λ that weighed. terms are the summands of the divergence by name, source_terms
    the same by name and collecting agent. external_share is Σ_ext w / Σ w and effective_batch Σ w / max w
    of the weights of the loss. Where the batch had no external rows, the mappings are empty and the weight
    is None.
    """

    losses: Mapping[str, float]
    similarity: Mapping[int, float]
    terms: Mapping[str, float]
    external_share: float
    effective_batch: float
    similarity_weight: float | None = None
    source_terms: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        losses: Mapping[str, Tensor],
        weighing: Weighing | None,
        sources: Similarity | None,
        *,
        batch_size: int,
    ) -> "Diagnosis":
        """Copies the numbers to the host: this waits for the device."""
        read = {name: float(value) for name, value in losses.items()}
        if weighing is None or sources is None:
            return cls(read, {}, {}, 0.0, float(batch_size))
        measured = ((sources.count > 0) & ~sources.degenerate).tolist()

        def by_source(values: Tensor) -> dict[int, float]:
            return {agent: value for agent, value in enumerate(values.tolist()) if measured[agent]}

        return cls(
            read,
            by_source(sources.similarity),
            {"covariance": float(weighing.covariance_term), "mean": float(weighing.mean_term)},
            float(weighing.external_share),
            float(weighing.effective_batch),
            float(weighing.similarity),
            {"covariance": by_source(sources.covariance_term), "mean": by_source(sources.mean_term)},
        )


def fold(window: Window, seen: Diagnosis) -> None:
    """Takes a diagnosis into a window's means."""
    for name, value in seen.losses.items():
        window.losses.setdefault(name, Mean()).add(value)
    for agent, value in seen.similarity.items():
        window.similarity.setdefault(agent, Mean()).add(value)
    for name, by_source in seen.source_terms.items():
        means = window.source_terms.setdefault(name, {})
        for agent, value in by_source.items():
            means.setdefault(agent, Mean()).add(value)
    for name, value in seen.terms.items():
        window.terms.setdefault(name, Mean()).add(value)
    window.external_share.add(seen.external_share)
    window.effective_batch.add(seen.effective_batch)


def show(metrics: LearnerMetrics, seen: Diagnosis) -> None:
    """Sets the gauges to a diagnosis; what was not measured keeps its last value."""
    for name, value in seen.losses.items():
        metrics.loss(name, value)
    for source, value in seen.similarity.items():
        metrics.similarity(source, value)
    for term, nats in seen.terms.items():
        metrics.divergence(term, nats)
    for term, by_source in seen.source_terms.items():
        for source, nats in by_source.items():
            metrics.source_divergence(source, term, nats)
    metrics.external_share.set(seen.external_share)
    metrics.effective_batch.set(seen.effective_batch)
    if seen.similarity_weight is not None:
        metrics.pooled_weight.set(seen.similarity_weight)


def record(
    window: Window, *, step: int, updates: int, now: float, wall_seconds: float, totals: DeviceTotals
) -> dict[str, Any]:
    """One line of metrics.jsonl; None stands for what was not measured."""
    seconds = max(now - window.started_at, 1e-9)
    weight, degenerate = totals.take()

    def mean(means: Mapping[str, Mean], name: str) -> float | None:
        return means[name].value if name in means else None

    return {
        "step": step,
        "wall_seconds": wall_seconds,
        "updates": updates,
        "updates_per_second": (updates - window.started_updates) / seconds,
        "steps_per_second": (step - window.started_step) / seconds,
        "episode_return": window.episode_returns.value,
        "episodes": window.episodes,
        "critic_loss": mean(window.losses, "critic_loss"),
        "actor_loss": mean(window.losses, "actor_loss"),
        "q_mean": mean(window.losses, "q_mean"),
        "skipped_updates": window.skipped,
        "degenerate_updates": degenerate,
        "refused": dict(window.refused),
        "env_restarts": dict(window.restarts),
        "similarity": _by_source(window.similarity),
        "similarity_weight": weight,
        "divergence_covariance": mean(window.terms, "covariance"),
        "divergence_mean": mean(window.terms, "mean"),
        "divergence_covariance_by_source": _by_source(window.source_terms.get("covariance", {})),
        "divergence_mean_by_source": _by_source(window.source_terms.get("mean", {})),
        "external_share": window.external_share.value,
        "effective_batch": window.effective_batch.value,
        "policy_lag": window.policy_lag.value,
    }


def _by_source(means: Mapping[int, Mean]) -> dict[str, float | None]:
    return {str(agent): mean.value for agent, mean in sorted(means.items())}


def finite(value: float | None) -> float | None:
    """The value, or None where JSON cannot hold it."""
    return value if value is not None and math.isfinite(value) else None
