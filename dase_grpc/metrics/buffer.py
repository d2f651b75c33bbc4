"""The replay role's Prometheus metrics."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dase_grpc.metrics.calls import Calls, Durations
from dase_grpc.metrics.endpoint import MAX_PAIRED_AGENTS

NOT_FINITE: Final = "not_finite"


@dataclass(frozen=True)
class ReplayCounts:
    """What the replay node counts, copied at one moment; pairs are (sampling, collecting) agent.

    leases_granted is by agent, leases by state; last_sync is in seconds since 1970, None in memory.
    """

    capacity: int = 0
    buffer_bytes: int = 0
    size_by_agent: Mapping[int, int] = field(default_factory=dict)
    inserted: Mapping[int, int] = field(default_factory=dict)
    refused: Mapping[tuple[int, str], int] = field(default_factory=dict)
    sampled: Mapping[tuple[int, int], int] = field(default_factory=dict)
    evicted: Mapping[int, int] = field(default_factory=dict)
    policy_versions: Mapping[int, int] = field(default_factory=dict)
    open_streams: Mapping[str, int] = field(default_factory=dict)
    leases: Mapping[str, int] = field(default_factory=dict)
    leases_granted: Mapping[int, int] = field(default_factory=dict)
    last_sync: float | None = None
    denied: Mapping[str, int] = field(default_factory=dict)


class ReplayCollector(Collector):
    """Reads the replay's own counters when scraped, so that inserting and sampling pay nothing."""

    def __init__(self, read: Callable[[], ReplayCounts]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """One family per metric of the replay role."""
        now = self._read()
        yield from _buffer(now)
        yield from _traffic(now)
        yield _gauge("dase_replay_active_streams", "Streams that are open.", "rpc", now.open_streams)
        yield _gauge(
            "dase_replay_policy_version",
            "Training iterations that the latest published policy has had.",
            "agent_id",
            now.policy_versions,
        )
        yield _gauge(
            "dase_replay_leases",
            "Agent ids by the state of their latest lease: live, left (given back), expired.",
            "state",
            now.leases,
        )
        yield _counter(
            "dase_replay_leases_granted",
            "Leases that an agent id has had; more than one means that its node was replaced.",
            "agent_id",
            now.leases_granted,
        )
        yield _counter(
            "dase_replay_denied_calls",
            "Calls refused for want of credentials or permission; connections that brought none (handshake).",
            "reason",
            now.denied,
        )


class CallsCollector(Collector):
    """Reads what a service's calls have been when scraped."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def collect(self) -> Iterable[Metric]:
        """One family per metric of the calls."""
        calls = self._calls
        handled = CounterMetricFamily(
            "grpc_server_handled",
            "Calls that have ended, by the status they ended with.",
            labels=["grpc_method", "grpc_type", "grpc_code"],
        )
        for key, count in sorted(dict(calls.handled).items()):
            handled.add_metric(key, count)
        yield handled
        yield _counter(
            "dase_replay_received_bytes", "Bytes of the messages received.", "rpc", dict(calls.received_bytes)
        )
        yield _counter("dase_replay_sent_bytes", "Bytes of the messages sent.", "rpc", dict(calls.sent_bytes))
        took = HistogramMetricFamily(
            "dase_replay_request_duration_seconds",
            "Time to serve a request: a call, an Insert chunk from its arrival to its commit, or a Sample "
            "batch from drawing it to handing it to gRPC.",
            labels=["rpc"],
        )
        for rpc, durations in sorted(calls.timed.items()):
            took.add_metric([rpc], *_buckets(durations))
        yield took
        waited = HistogramMetricFamily(
            "dase_replay_sample_wait_seconds",
            "How long a batch that was asked for waited until there were enough transitions.",
            labels=[],
        )
        waited.add_metric([], *_buckets(calls.sample_wait))
        yield waited


def _buffer(now: ReplayCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "dase_replay_buffer_capacity_transitions", "Transitions the buffer can hold.", now.capacity
    )
    yield GaugeMetricFamily("dase_replay_buffer_bytes", "Bytes of the transitions present.", now.buffer_bytes)
    yield _gauge("dase_replay_buffer_transitions", "Transitions present.", "agent_id", now.size_by_agent)
    synced = GaugeMetricFamily(
        "dase_replay_last_sync_timestamp_seconds",
        "When the disk last had everything that was committed, in seconds since 1970; nothing in memory.",
        labels=[],
    )
    if now.last_sync is not None:
        synced.add_metric([], now.last_sync)
    yield synced


def _traffic(now: ReplayCounts) -> Iterator[Metric]:
    yield _counter("dase_replay_inserted_transitions", "Transitions stored.", "agent_id", now.inserted)
    yield _counter(
        "dase_replay_evicted_transitions",
        "Transitions that made room for newer ones.",
        "agent_id",
        dict.fromkeys(now.inserted, 0) | dict(now.evicted),
    )
    refused = CounterMetricFamily(
        "dase_replay_rejected_transitions", "Transitions refused.", labels=["agent_id", "reason"]
    )
    none_yet = {(agent, NOT_FINITE): 0 for agent in now.inserted}  # else Prometheus misses the first ones
    for (agent, reason), count in sorted((none_yet | dict(now.refused)).items()):
        refused.add_metric([str(agent), reason], count)
    yield refused
    sampled = CounterMetricFamily(
        "dase_replay_sampled_transitions",
        f"Transitions sent in batches, for agents below {MAX_PAIRED_AGENTS}.",
        labels=["agent_id", "source_agent_id"],
    )
    for (agent, source), count in now.sampled.items():
        if max(agent, source) < MAX_PAIRED_AGENTS:
            sampled.add_metric([str(agent), str(source)], count)
    yield sampled


def _gauge(name: str, text: str, label: str, values: Mapping[int, int] | Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family


def _counter(name: str, text: str, label: str, values: Mapping[int, int] | Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family


def _buckets(durations: Durations) -> tuple[list[tuple[str, float]], float]:
    """What Prometheus' text shows: for each bound how many were at most that long; and the sum."""
    counts, sum_s = durations.read()
    bounds = [*map(str, durations.bounds), "+Inf"]
    return list(zip(bounds, accumulate(counts), strict=True)), sum_s
