"""The Prometheus metrics of learners, actors and evaluators."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dase_grpc.metrics.endpoint import loop_lag
from dase_grpc.progress import MAX_PAIRED_AGENTS

SKIP_REASONS: Final = (
    "no_batch",
    "no_weight",
    "critic_not_finite",
    "actor_not_finite",
    "distillation_not_finite",
)
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

REFUSAL_REASONS: Final = ("observation", "reward")
RESTART_REASONS: Final = ("step", "reset", "evaluation")

_EVALUATION_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)
_LOSSES: Final = "Times that the replay came back without transitions it had."
_RECONNECTS: Final = "Streams that were answered again after they had broken, by the status they broke with."


class _OfAgents:
    """Metrics of one registry that are labelled by agents."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def _gauges(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, ["agent_id", *labels], registry=self._registry)

    def _counters(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["agent_id", *labels], registry=self._registry)


class DistillationMetrics(_OfAgents):
    """What a learner that distils its peer's policy adds; has no series until it has shown something."""

    def __init__(self, registry: CollectorRegistry, agent_id: int) -> None:
        super().__init__(registry)
        self._agent = str(agent_id)
        self._latest = {key: self._gauges(*named) for key, named in _GAUGES.items()}
        self._totals = {key: self._counters(*named) for key, named in _COUNTS.items()}

    def show(self, statistics: Mapping[str, float | int | None]) -> None:
        """Takes in what was measured since the last call, under the names that metrics.jsonl has."""
        for key, gauge in self._latest.items():
            if (value := statistics[key]) is not None:
                gauge.labels(self._agent).set(value)
        for key, counter in self._totals.items():
            counter.labels(self._agent).inc(statistics[key] or 0)


class ExplorerMetrics(_OfAgents):
    """What exploring shows, bound to an agent id; role says whose streams and waits are counted.

    Counters by reason begin at 0 for each reason there is: Prometheus does not see the step from nothing
    to one.
    """

    role: ClassVar[str]

    def __init__(self, registry: CollectorRegistry, agent_id: int) -> None:
        super().__init__(registry)
        self._id, self._agent = agent_id, str(agent_id)
        self.loop_lag = loop_lag(registry)
        self.env_steps = self._counter("dase_explorer_env_steps", "Environment steps.")
        self.episodes = self._counter("dase_explorer_episodes", "Episodes ended.")
        self.episode_return = self._gauge("dase_explorer_episode_return", "Return of the latest episode.")
        self.policy_lag = self._gauge(
            "dase_explorer_policy_lag_updates",
            "Training iterations by which the exploring policy is behind; 0 where the learner explores.",
        )
        self.unacknowledged = self._gauge(
            "dase_explorer_unacknowledged_transitions", "Transitions whose commit is not acknowledged."
        )
        self.acknowledged = self._counter(
            "dase_explorer_acknowledged_transitions", "Transitions whose commit the replay has acknowledged."
        )
        self.finished = self._gauge(
            "dase_explorer_finished",
            "1 once the node has nothing left to do and waits to be stopped (--stay), else 0.",
        )
        self._refused = self._by_reason(
            "dase_explorer_refused_transitions",
            "Transitions not sent because a value was not finite.",
            REFUSAL_REASONS,
        )
        self._restarts = self._by_reason(
            "dase_explorer_env_restarts",
            "Environments made anew because they raised, by what did: step, reset, evaluation.",
            RESTART_REASONS,
        )
        self._declare_outages()

    def _declare_outages(self) -> None:
        self.losses = self._counter(f"dase_{self.role}_replay_losses", _LOSSES)
        name = f"dase_{self.role}_reconnects"
        self._reconnects = self._counters(name, _RECONNECTS, "stream", "grpc_code")
        self._waiting_seconds = self._by_reason(
            f"dase_{self.role}_waiting_seconds",
            "Time spent in waits that lasted longer than 5 s, by what was waited for.",
        )

    def expect(self, *, streams: Iterable[str], waits: Iterable[str]) -> None:
        """Begins at 0 what can happen to a node with a network: broken streams, and waits by reason."""
        for stream in streams:
            self._reconnects.labels(self._agent, stream, "UNAVAILABLE")
        for reason in waits:
            self._waiting_seconds.labels(self._agent, reason)

    def reconnected(self, stream: str, grpc_code: str) -> None:
        """Counts a stream that was answered again, by the name of the status it had broken with."""
        self._reconnects.labels(self._agent, stream, grpc_code).inc()

    def waited(self, reason: str, seconds: float) -> None:
        """Adds to the time spent waiting."""
        self._waiting_seconds.labels(self._agent, reason).inc(seconds)

    def refused(self, reason: str) -> None:
        """Counts a transition that was not sent."""
        self._refused.labels(self._agent, reason).inc()

    def restarted(self, reason: str) -> None:
        """Counts an environment that was made anew."""
        self._restarts.labels(self._agent, reason).inc()

    def _counter(self, name: str, text: str) -> Counter:
        return self._counters(name, text).labels(self._agent)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._gauges(name, text).labels(self._agent)

    def _by_reason(self, name: str, text: str, reasons: Iterable[str] = ()) -> Counter:
        counter = self._counters(name, text, "reason")
        for reason in reasons:
            counter.labels(self._agent, reason)
        return counter


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
        self._declare_sampling()
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
        self._skipped = self._by_reason("dase_learner_skipped_updates", "Updates skipped.", SKIP_REASONS)
        self._loss = self._gauges("dase_learner_loss", "Latest loss.", "loss")
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
        self._checkpointed = self._gauges(
            "dase_learner_checkpoint_last_success_timestamp_seconds",
            "When the latest checkpoint was on the disk, in seconds since 1970.",
        )

    def _declare_sampling(self) -> None:
        self.own_share = self._gauge(
            "dase_sample_own_share_ratio", "Share of a batch that is the agent's own transitions."
        )
        self.in_place = self._gauge(
            "dase_sample_in_place",
            "1 while rows are read from the replay's ring on this machine, 0 while they come as a stream.",
        )
        self.overwritten = self._gauge(
            "dase_sample_overwritten_batches",
            "Batches drawn again because rows had been overwritten when they were read in place.",
        )
        self.largest_priority = self._gauge(
            "dase_sample_priority_largest_mass", "The agent's largest mass so far; only with priorities."
        )
        self.mean_priority = self._gauge(
            "dase_sample_priority_mean_mass",
            "The mean mass of the transitions in the buffer; only with priorities.",
        )
        self.priorities_ignored = self._gauge(
            "dase_sample_priorities_ignored",
            "Priorities that changed nothing since they began; only with priorities.",
        )

    def _declare_similarity(self) -> None:
        self._measure = self._gauges(
            "dase_similarity_measure_info",
            "Constant 1, labelled by what weighs the transitions of other agents (dps.measure).",
            "measure",
        )
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
        self._measured = self._gauges(
            "dase_similarity_last_update_timestamp_seconds",
            "When the similarity of another agent was last measured, in seconds since 1970.",
        )
        self._similarity = self._gauges(
            "dase_similarity_weight_ratio",
            "Similarity of each agent's transitions by themselves; with dps.scope pooled a diagnostic only.",
            "source_agent_id",
        )
        self._divergence = self._gauges(
            "dase_similarity_divergence_nats",
            "Divergence of the external transitions' policies, by term.",
            "term",
        )
        self._source_divergence = self._gauges(
            "dase_similarity_source_divergence_nats",
            "Divergence of each agent's transitions by themselves, by term.",
            "source_agent_id",
            "term",
        )

    def measured_by(self, measure: str) -> None:
        """Shows what weighs the transitions of other agents."""
        self._measure.labels(self._agent, measure).set(1)

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


class ActorMetrics(ExplorerMetrics):
    """The actor role's metrics."""

    role = "actor"

    def __init__(self, registry: CollectorRegistry, agent_id: int) -> None:
        super().__init__(registry, agent_id)
        self.envs = self._gauge("dase_actor_environments", "Environments that this actor steps.")


class EvaluationMetrics(_OfAgents):
    """What evaluations show; an agent has no series before its first."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        text = "Mean return of the latest evaluation."
        self._return = self._gauges("dase_evaluation_return_mean", text)
        self._seconds = Histogram(
            "dase_evaluation_duration_seconds",
            "Duration of an evaluation.",
            ["agent_id"],
            buckets=_EVALUATION_SECONDS,
            registry=registry,
        )

    def evaluated(self, agent_id: int, return_mean: float, *, seconds: float) -> None:
        """Shows an evaluation that has ended."""
        self._return.labels(str(agent_id)).set(return_mean)
        self._seconds.labels(str(agent_id)).observe(seconds)


class EvaluatorMetrics(EvaluationMetrics):
    """The evaluator role's metrics; counters of all `agents` begin at 0. For any thread."""

    def __init__(self, registry: CollectorRegistry, agents: Iterable[int]) -> None:
        super().__init__(registry)
        self.loop_lag = loop_lag(registry)
        self._skipped = self._counters(
            "dase_evaluation_skipped",
            "Evaluations that were due and not made, because a newer policy was there first.",
        )
        self._restarts = self._counters(
            "dase_evaluation_env_restarts", "Environments of evaluations made anew because they raised."
        )
        for agent_id in agents:
            self._skipped.labels(str(agent_id))
            self._restarts.labels(str(agent_id))
        self.losses = Counter("dase_evaluator_replay_losses", _LOSSES, registry=registry)
        self._reconnects = Counter(
            "dase_evaluator_reconnects", _RECONNECTS, ["stream", "grpc_code"], registry=registry
        )

    def expect(self, streams: Iterable[str]) -> None:
        """Begins at 0 what can happen to the streams."""
        for stream in streams:
            self._reconnects.labels(stream, "UNAVAILABLE")

    def reconnected(self, stream: str, grpc_code: str) -> None:
        """Counts a stream that was answered again, by the name of the status it had broken with."""
        self._reconnects.labels(stream, grpc_code).inc()

    def skipped(self, agent_id: int, count: int) -> None:
        """Counts evaluations that will not be made."""
        self._skipped.labels(str(agent_id)).inc(count)

    def restarted(self, agent_id: int, count: int) -> None:
        """Counts environments of an agent's evaluation that were made anew."""
        self._restarts.labels(str(agent_id)).inc(count)


StreamMetrics = ExplorerMetrics | EvaluatorMetrics
"""What a connection counts in: streams that break, and losses of the replay."""
