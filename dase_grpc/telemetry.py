"""Prometheus metrics of every role, and the endpoint that serves them.

Names carry base units; no series is labelled by run, host or episode.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dase_grpc.errors import AddressError
from dase_grpc.forking import closed_in_forks

MAX_PAIRED_AGENTS: Final = 64
_SECONDS: Final = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 1.0, 4.0)


def make_registry() -> CollectorRegistry:
    """A registry of its own, with the build information of this process."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library's signature
    registry = CollectorRegistry()
    Gauge(
        "dase_build_info", "Constant 1, labelled by version.", ["version", "python"], registry=registry
    ).labels(version("dase-grpc"), platform.python_version()).set(1)
    return registry


@contextmanager
def metrics_endpoint(registry: CollectorRegistry, host: str, port: int) -> Iterator[int | None]:
    """Serves /metrics while the block runs; yields the port, or None when `port` is 0 (off).

    Raises:
        AddressError: the port is in use.
    """
    if port == 0:
        yield None
        return
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise AddressError(
            f"cannot serve metrics on {host}:{port} ({error.strerror}); "
            f"choose another metrics port, or 0 for none"
        ) from error
    closed_in_forks(server.socket)
    try:
        yield port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(frozen=True)
class ReplayCounts:
    """What the replay node counts, copied at one moment; pairs are (sampling, collecting) agent."""

    capacity: int = 0
    buffer_bytes: int = 0
    size_by_agent: Mapping[int, int] = field(default_factory=dict)
    inserted: Mapping[int, int] = field(default_factory=dict)
    refused: Mapping[tuple[int, str], int] = field(default_factory=dict)
    sampled: Mapping[tuple[int, int], int] = field(default_factory=dict)
    evicted: Mapping[int, int] = field(default_factory=dict)
    policy_versions: Mapping[int, int] = field(default_factory=dict)
    open_streams: Mapping[str, int] = field(default_factory=dict)
    denied: Mapping[str, int] = field(default_factory=dict)


class ReplayCollector(Collector):
    """Reads the replay's own counters when scraped, so that inserting and sampling pay nothing."""

    def __init__(self, read: Callable[[], ReplayCounts]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """One family per metric of the replay role."""
        now = self._read()
        yield GaugeMetricFamily(
            "dase_replay_buffer_capacity_transitions", "Transitions the buffer can hold.", now.capacity
        )
        yield GaugeMetricFamily(
            "dase_replay_buffer_bytes", "Bytes of the transitions present.", now.buffer_bytes
        )
        size = GaugeMetricFamily(
            "dase_replay_buffer_transitions", "Transitions present.", labels=["agent_id"]
        )
        inserted = CounterMetricFamily(
            "dase_replay_inserted_transitions", "Transitions stored.", labels=["agent_id"]
        )
        evicted = CounterMetricFamily(
            "dase_replay_evicted_transitions",
            "Transitions that made room for newer ones.",
            labels=["agent_id"],
        )
        refused = CounterMetricFamily(
            "dase_replay_rejected_transitions", "Transitions refused.", labels=["agent_id", "reason"]
        )
        sampled = CounterMetricFamily(
            "dase_replay_sampled_transitions",
            "Transitions sent in batches.",
            labels=["agent_id", "source_agent_id"],
        )
        policies = GaugeMetricFamily(
            "dase_replay_policy_version",
            "Training iterations that the latest published policy has had.",
            labels=["agent_id"],
        )
        streams = GaugeMetricFamily("dase_replay_active_streams", "Streams that are open.", labels=["rpc"])
        denied = CounterMetricFamily(
            "dase_replay_denied_calls",
            "Calls refused for want of credentials or permission; connections that brought none (handshake).",
            labels=["reason"],
        )
        for reason, count in now.denied.items():
            denied.add_metric([reason], count)
        for rpc, count in now.open_streams.items():
            streams.add_metric([rpc], count)
        for agent, policy_version in now.policy_versions.items():
            policies.add_metric([str(agent)], policy_version)
        for agent, count in now.size_by_agent.items():
            size.add_metric([str(agent)], count)
        for agent, count in now.inserted.items():
            inserted.add_metric([str(agent)], count)
        for agent, count in now.evicted.items():
            evicted.add_metric([str(agent)], count)
        for (agent, reason), count in now.refused.items():
            refused.add_metric([str(agent), reason], count)
        for (agent, source), count in now.sampled.items():
            if max(agent, source) < MAX_PAIRED_AGENTS:
                sampled.add_metric([str(agent), str(source)], count)
        yield from (size, inserted, evicted, refused, sampled, policies, streams, denied)


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


class LearnerMetrics:
    """The learner role's metrics, each bound to its agent id."""

    def __init__(self, registry: CollectorRegistry, agent_id: int) -> None:
        agent = str(agent_id)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["agent_id"], registry=registry).labels(agent)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["agent_id"], registry=registry).labels(agent)

        self._agent = agent
        self.distillation = DistillationMetrics(registry, agent_id)
        self.env_steps = counter("dase_explorer_env_steps", "Environment steps.")
        self.episodes = counter("dase_explorer_episodes", "Episodes ended.")
        self.episode_return = gauge("dase_explorer_episode_return", "Return of the latest episode.")
        self.unacknowledged = gauge(
            "dase_explorer_unacknowledged_transitions", "Transitions whose commit is not acknowledged."
        )
        self.acknowledged = counter(
            "dase_explorer_acknowledged_transitions",
            "Transitions whose commit the replay has acknowledged.",
        )
        self.updates = counter("dase_learner_updates", "Training iterations.")
        self.evaluation_return = gauge("dase_evaluation_return_mean", "Mean return of the latest evaluation.")
        self.evaluation_seconds = Histogram(
            "dase_evaluation_duration_seconds",
            "Duration of an evaluation.",
            ["agent_id"],
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=registry,
        ).labels(agent)
        self.external_share = gauge(
            "dase_similarity_external_share_ratio",
            "Share of the loss weights that external transitions have.",
        )
        self.effective_batch = gauge(
            "dase_similarity_effective_batch_transitions",
            "Sum of a batch's loss weights over the largest of them.",
        )
        self.pooled_weight = gauge(
            "dase_similarity_pooled_weight_ratio",
            "Similarity weight of the external transitions of a batch in the loss, the mean where it varies.",
        )
        self._update_seconds = Histogram(
            "dase_learner_update_duration_seconds",
            "Duration of a training iteration by stage: waiting for the batch, and updating.",
            ["agent_id", "stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.sample_seconds = self._update_seconds.labels(agent, "sample")
        self.update_seconds = self._update_seconds.labels(agent, "update")
        self._skipped = Counter(
            "dase_learner_skipped_updates", "Updates skipped.", ["agent_id", "reason"], registry=registry
        )
        self._loss = Gauge("dase_learner_loss", "Latest loss.", ["agent_id", "loss"], registry=registry)
        self._refused = Counter(
            "dase_explorer_refused_transitions",
            "Transitions not sent because a value was not finite.",
            ["agent_id", "reason"],
            registry=registry,
        )
        self._restarts = Counter(
            "dase_explorer_env_restarts",
            "Environments made anew because they raised, by what did: step, reset, evaluation.",
            ["agent_id", "reason"],
            registry=registry,
        )
        self._declare_similarity(registry)
        self._declare_outages(registry)

    def _declare_similarity(self, registry: CollectorRegistry) -> None:
        self._similarity = Gauge(
            "dase_similarity_weight_ratio",
            "Similarity of each agent's transitions by themselves; with dps.scope pooled a diagnostic only.",
            ["agent_id", "source_agent_id"],
            registry=registry,
        )
        self._divergence = Gauge(
            "dase_similarity_divergence_nats",
            "Divergence of the external transitions' policies, by term.",
            ["agent_id", "term"],
            registry=registry,
        )
        self._source_divergence = Gauge(
            "dase_similarity_source_divergence_nats",
            "Divergence of each agent's transitions by themselves, by term.",
            ["agent_id", "source_agent_id", "term"],
            registry=registry,
        )

    def _declare_outages(self, registry: CollectorRegistry) -> None:
        self._reconnects = Counter(
            "dase_learner_reconnects",
            "Streams that were answered again after they had broken.",
            ["agent_id", "stream"],
            registry=registry,
        )
        self._waiting_seconds = Counter(
            "dase_learner_waiting_seconds",
            "Time spent in waits for the replay that lasted longer than 5 s, by what was waited for.",
            ["agent_id", "reason"],
            registry=registry,
        )
        self.losses = Counter(
            "dase_learner_replay_losses",
            "Times that the replay came back without transitions it had.",
            ["agent_id"],
            registry=registry,
        ).labels(self._agent)

    def reconnected(self, stream: str) -> None:
        """Counts a stream that was answered again."""
        self._reconnects.labels(self._agent, stream).inc()

    def waited(self, reason: str, seconds: float) -> None:
        """Adds to the time spent waiting."""
        self._waiting_seconds.labels(self._agent, reason).inc(seconds)

    def skipped(self, reason: str, count: int = 1) -> None:
        """Counts updates that were skipped."""
        self._skipped.labels(self._agent, reason).inc(count)

    def refused(self, reason: str) -> None:
        """Counts a transition that was not sent."""
        self._refused.labels(self._agent, reason).inc()

    def restarted(self, reason: str) -> None:
        """Counts an environment that was made anew."""
        self._restarts.labels(self._agent, reason).inc()

    def loss(self, name: str, value: float) -> None:
        """Shows a loss."""
        self._loss.labels(self._agent, name).set(value)

    def similarity(self, source: int, weight: float) -> None:
        """Shows the similarity of one agent's transitions, for pairs among the first 64 agents."""
        if max(int(self._agent), source) < MAX_PAIRED_AGENTS:
            self._similarity.labels(self._agent, str(source)).set(weight)

    def divergence(self, term: str, nats: float) -> None:
        """Shows one term of the divergence."""
        self._divergence.labels(self._agent, term).set(nats)

    def source_divergence(self, source: int, term: str, nats: float) -> None:
        """Shows one term of ρ of one agent's transitions, for pairs among the first 64 agents."""
        if max(int(self._agent), source) < MAX_PAIRED_AGENTS:
            self._source_divergence.labels(self._agent, str(source), term).set(nats)
