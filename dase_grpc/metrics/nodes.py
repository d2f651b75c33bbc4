"""The learner role's Prometheus metrics."""

import time
from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dase_grpc.evaluator_metrics import EvaluationMetrics
from dase_grpc.explorer_metrics import ExplorerMetrics
from dase_grpc.metrics.endpoint import MAX_PAIRED_AGENTS

SKIP_REASONS: Final = ("no_batch", "no_weight", "critic_not_finite", "actor_not_finite")
STAGES: Final = ("sample", "update", "load", "weigh", "learn")

_SECONDS: Final = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 1.0, 4.0)
_GAUGES: Final = {
    "distilled_share": ("dase_distillation_states_ratio", "Share of a batch's states distilled on."),
    "confidence": ("dase_distillation_confidence_ratio", "Mean weight of a state distilled on."),
    "peer_lag": ("dase_distillation_peer_lag_updates", "Updates ahead of the peer's policy."),
}
_COUNTS: Final = {
    "undistilled_updates": ("dase_distillation_missed_updates", "Updates that knew no policy of the peer."),
    "refused_policies": ("dase_distillation_refused_policies", "Policies of the peer that were not finite."),
}


class DistillationMetrics:
    """What a learner that distils its peer's policy adds; has no series until it has shown something."""

    def __init__(self, registry: CollectorRegistry, agent_id: int) -> None:
        self._agent = str(agent_id)
        self._gauges = {
            key: Gauge(name, text, ["agent_id"], registry=registry) for key, (name, text) in _GAUGES.items()
        }
        self._counts = {
            key: Counter(name, text, ["agent_id"], registry=registry) for key, (name, text) in _COUNTS.items()
        }

    def show(self, statistics: Mapping[str, float | int | None]) -> None:
        """Takes in what was measured since the last call, under the names that metrics.jsonl has."""
        for key, gauge in self._gauges.items():
            if (value := statistics[key]) is not None:
                gauge.labels(self._agent).set(value)
        for key, counter in self._counts.items():
            counter.labels(self._agent).inc(statistics[key] or 0)


class LearnerMetrics(ExplorerMetrics):
    """The learner role's metrics, each bound to its agent id; `now` is in seconds since 1970."""

    role = "learner"

    def __init__(
        self, registry: CollectorRegistry, agent_id: int, *, now: Callable[[], float] = time.time
    ) -> None:
        super().__init__(registry, agent_id)
        self._now = now
        self.distillation = DistillationMetrics(registry, agent_id)
        self._evaluations = EvaluationMetrics(registry)
        self._declare_learning()
        self._declare_similarity()

    def _declare_learning(self) -> None:
        self.updates = self._counter("dase_learner_updates", "Training iterations.")
        seconds = Histogram(
            "dase_learner_update_duration_seconds",
            "Time of a training iteration by stage, by the host's clock: sample (waiting for the batch) and "
            "update (the rest); of one iteration in 50 also the parts of update: load, weigh and learn (with "
            "train.cuda_graph weigh is in learn).",
            ["agent_id", "stage"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.stage_seconds = {stage: seconds.labels(self._agent, stage) for stage in STAGES}
        self._skipped = self._counters(
            "dase_learner_skipped_updates", "Updates skipped.", reasons=SKIP_REASONS
        )
        self._loss = Gauge("dase_learner_loss", "Latest loss.", ["agent_id", "loss"], registry=self._registry)
        self.sample_age = self._gauge(
            "dase_learner_sample_age_updates",
            "Mean training iterations since the own transitions of a batch were collected.",
        )
        self.prefetched = self._gauge(
            "dase_learner_prefetched_batches", "Batches that are here and not used yet."
        )
        self.gpu_memory = self._gauge(
            "dase_learner_gpu_memory_bytes", "Bytes of the GPU that PyTorch has reserved; 0 on a CPU."
        )
        self._checkpointed = Gauge(
            "dase_learner_checkpoint_last_success_timestamp_seconds",
            "When the latest checkpoint was on the disk, in seconds since 1970.",
            ["agent_id"],
            registry=self._registry,
        )

    def _declare_similarity(self) -> None:
        self.external_share = self._gauge(
            "dase_similarity_external_share_ratio",
            "Share of the loss weights that external transitions have.",
        )
        self.effective_batch = self._gauge(
            "dase_similarity_effective_batch_transitions",
            "Sum of a batch's loss weights over the largest of them.",
        )
        self.pooled_weight = self._gauge(
            "dase_similarity_pooled_weight_ratio",
            "Similarity weight of the external transitions of a batch in the loss, the mean where it varies.",
        )
        self._measured = Gauge(
            "dase_similarity_last_update_timestamp_seconds",
            "When the similarity of another agent was last measured, in seconds since 1970.",
            ["agent_id"],
            registry=self._registry,
        )
        self._similarity = Gauge(
            "dase_similarity_weight_ratio",
            "Similarity of each agent's transitions by themselves; with dps.scope pooled a diagnostic only.",
            ["agent_id", "source_agent_id"],
            registry=self._registry,
        )
        self._divergence = Gauge(
            "dase_similarity_divergence_nats",
            "Divergence of the external transitions' policies, by term.",
            ["agent_id", "term"],
            registry=self._registry,
        )
        self._source_divergence = Gauge(
            "dase_similarity_source_divergence_nats",
            "Divergence of each agent's transitions by themselves, by term.",
            ["agent_id", "source_agent_id", "term"],
            registry=self._registry,
        )

    def skipped(self, reason: str, count: int = 1) -> None:
        """Counts updates that were skipped."""
        self._skipped.labels(self._agent, reason).inc(count)

    def evaluated(self, return_mean: float, *, seconds: float) -> None:
        """Shows an evaluation that has ended."""
        self._evaluations.evaluated(self._id, return_mean, seconds=seconds)

    def checkpointed(self) -> None:
        """Notes that a checkpoint is on the disk now."""
        self._checkpointed.labels(self._agent).set(self._now())

    def loss(self, name: str, value: float) -> None:
        """Shows a loss."""
        self._loss.labels(self._agent, name).set(value)

    def similarity(self, source: int, weight: float) -> None:
        """Shows the similarity of one agent's transitions, for pairs among the first 64 agents."""
        if source != self._id:
            self._measured.labels(self._agent).set(self._now())
        if max(self._id, source) < MAX_PAIRED_AGENTS:
            self._similarity.labels(self._agent, str(source)).set(weight)

    def divergence(self, term: str, nats: float) -> None:
        """Shows one term of the divergence."""
        self._divergence.labels(self._agent, term).set(nats)

    def source_divergence(self, source: int, term: str, nats: float) -> None:
        """Shows one term of ρ of one agent's transitions, for pairs among the first 64 agents."""
        if max(self._id, source) < MAX_PAIRED_AGENTS:
            self._source_divergence.labels(self._agent, str(source), term).set(nats)
