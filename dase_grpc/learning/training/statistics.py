"""Statistics between two lines of a learner's metrics: sums on the device, read seldom."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from dase_grpc.learning.agents.memory import OWN, Memory
from dase_grpc.learning.similarity.measure import Similarity
from dase_grpc.learning.similarity.weigher import Weighing
from dase_grpc.metrics.nodes import LearnerMetrics

K = TypeVar("K")


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


_NOTHING: Final = Mean()
_TERMS: Final = ("covariance", "mean")


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
    own_share: Mean = field(default_factory=Mean)
    effective_sample_size: Mean = field(default_factory=Mean)
    policy_lag: Mean = field(default_factory=Mean)
    largest_priority: float | None = None
    mean_priority: float | None = None
    priorities_ignored: int | None = None
    refused: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)

    def begin_anew(self, now: float, step: int, updates: int) -> None:
        """Forgets what was counted."""
        vars(self).update(vars(Window(now, step, updates)))


_TOTALS: Final = {
    "totals.similarity": torch.float64,
    "totals.weighed": torch.int64,
    "totals.degenerate": torch.int64,
}


class DeviceTotals:
    """Sums over every weighed update, kept on the device so that no update waits for the host.

    Args:
        held: where they are kept, by the names of `_TOTALS`; of a stack (K,) each.
    """

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        self._held = {name.removeprefix("totals."): held[name] for name in _TOTALS}

    @classmethod
    def zero(cls, device: torch.device, *, memory: Memory = OWN) -> "DeviceTotals":
        """Those of one agent, before its first update."""
        room = partial(memory.zeros, shape=(), device=device)
        return cls({name: room(name, dtype=dtype) for name, dtype in _TOTALS.items()})

    def add(self, weighing: Weighing, *, live: Tensor | None = None) -> None:
        """Counts one weighed batch; of a stack, those for which `live` is true. Never waits for the host."""
        new = (
            ("similarity", weighing.similarity),
            ("weighed", weighing.external > 0),
            ("degenerate", weighing.degenerate),
        )
        for name, value in new:
            self._held[name] += value if live is None else value * live

    def take(self) -> tuple[float | None, int]:
        """The mean λ over batches with external rows, and how many were degenerate; starts afresh."""
        weighed, degenerate = int(self._held["weighed"]), int(self._held["degenerate"])
        mean = float(self._held["similarity"]) / weighed if weighed else None
        for total in self._held.values():
            total.zero_()
        return mean, degenerate

    def tensors(self) -> dict[str, Tensor]:
        """The sums themselves, by name; whoever writes into them sets them."""
        return self._held


@dataclass(frozen=True)
class Diagnosis:
    """One update looked at closely; read from the device once.

    similarity is by collecting agent, without those it could not be measured for, and weighs nothing;
    similarity_weight is the λ that weighed. terms are the summands of the divergence by name, source_terms
    by name and collecting agent. Without external rows the mappings are empty and the weight is None.
    updates_per_second is None where no time has passed.
    """

    losses: Mapping[str, float]
    similarity: Mapping[int, float]
    terms: Mapping[str, float]
    external_share: float
    effective_batch: float
    similarity_weight: float | None = None
    source_terms: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    updates_per_second: float | None = None

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

    def add(means: dict[K, Mean], values: Mapping[K, float]) -> None:
        for key, value in values.items():
            means.setdefault(key, Mean()).add(value)

    add(window.losses, seen.losses)
    add(window.similarity, seen.similarity)
    add(window.terms, seen.terms)
    for name, by_source in seen.source_terms.items():
        add(window.source_terms.setdefault(name, {}), by_source)
    window.external_share.add(seen.external_share)
    window.effective_batch.add(seen.effective_batch)


def show(metrics: LearnerMetrics, seen: Diagnosis) -> None:
    """Sets the gauges to a diagnosis; what was not measured keeps its last value."""
    for name, value in seen.losses.items():
        metrics.loss(name, value)
    for source, value in seen.similarity.items():
        metrics.similarity(source, value)
    for term, nats in _known(seen.terms):
        metrics.divergence(term, nats)
    for term, by_source in seen.source_terms.items():
        for source, nats in _known(by_source):
            metrics.source_divergence(source, term, nats)
    metrics.external_share.set(seen.external_share)
    metrics.effective_batch.set(seen.effective_batch)
    if seen.similarity_weight is not None:
        metrics.pooled_weight.set(seen.similarity_weight)


def _known(terms: Mapping[K, float]) -> Iterator[tuple[K, float]]:
    """Those that were measured; others are infinite, as all are where another measure weighs."""
    return ((key, nats) for key, nats in terms.items() if math.isfinite(nats))


def record(
    window: Window, *, step: int, updates: int, now: float, wall_seconds: float, totals: DeviceTotals
) -> dict[str, Any]:
    """One line of metrics.jsonl; None stands for what was not measured."""
    seconds = max(now - window.started_at, 1e-9)
    weight, degenerate = totals.take()
    losses, terms, by_source = window.losses, window.terms, window.source_terms
    return {
        "step": step,
        "wall_seconds": wall_seconds,
        "updates": updates,
        "updates_per_second": (updates - window.started_updates) / seconds,
        "steps_per_second": (step - window.started_step) / seconds,
        "episode_return": window.episode_returns.value,
        "episodes": window.episodes,
        **{name: losses.get(name, _NOTHING).value for name in ("critic_loss", "actor_loss", "q_mean")},
        "skipped_updates": window.skipped,
        "degenerate_updates": degenerate,
        "refused": dict(window.refused),
        "env_restarts": dict(window.restarts),
        "similarity": _by_source(window.similarity),
        "similarity_weight": weight,
        **{f"divergence_{name}": terms.get(name, _NOTHING).value for name in _TERMS},
        **{f"divergence_{name}_by_source": _by_source(by_source.get(name, {})) for name in _TERMS},
        "external_share": window.external_share.value,
        "effective_batch": window.effective_batch.value,
        "effective_sample_size": window.effective_sample_size.value,
        "own_share": window.own_share.value,
        "largest_priority": window.largest_priority,
        "mean_priority": window.mean_priority,
        "priorities_ignored": window.priorities_ignored,
        "policy_lag": window.policy_lag.value,
    }


def _by_source(means: Mapping[int, Mean]) -> dict[str, float | None]:
    return {str(agent): mean.value for agent, mean in sorted(means.items())}


def finite(value: float | None) -> float | None:
    """The value, or None where JSON cannot hold it."""
    return value if value is not None and math.isfinite(value) else None
