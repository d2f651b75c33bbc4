"""The Prometheus metrics of whoever evaluates policies: the evaluator role, or each learner."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dase_grpc.metrics.endpoint import loop_lag

_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)


class EvaluationMetrics:
    """What evaluations show; an agent has no series before its first."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._return = Gauge(
            "dase_evaluation_return_mean",
            "Mean return of the latest evaluation.",
            ["agent_id"],
            registry=registry,
        )
        self._seconds = Histogram(
            "dase_evaluation_duration_seconds",
            "Duration of an evaluation.",
            ["agent_id"],
            buckets=_SECONDS,
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
        self._skipped = Counter(
            "dase_evaluation_skipped",
            "Evaluations that were due and not made, because a newer policy was there first.",
            ["agent_id"],
            registry=registry,
        )
        for agent_id in agents:
            self._skipped.labels(str(agent_id))
        self.losses = Counter(
            "dase_evaluator_replay_losses",
            "Times that the replay came back without transitions it had.",
            registry=registry,
        )
        self._reconnects = Counter(
            "dase_evaluator_reconnects",
            "Streams that were answered again after they had broken, by the status they broke with.",
            ["stream", "grpc_code"],
            registry=registry,
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
