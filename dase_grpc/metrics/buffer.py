"""The replay role's Prometheus metrics: what it counts of its buffer, read when scraped."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dase_grpc.metrics.calls import (
    WAIT_SECONDS,
    DoorState,
    Durations,
    counter,
    door_metrics,
    gauge,
    histogram,
)
from dase_grpc.progress import MAX_PAIRED_AGENTS

NOT_FINITE: Final = "not_finite"

REPLAY_REQUEST: Final = (
    "a call, an Insert chunk from its arrival to its commit, or a Sample batch from drawing it to handing it "
    "to gRPC"
)
"""What is timed of a replay's calls."""


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
    door: DoorState = field(default_factory=DoorState)
    sample_wait: Durations = field(default_factory=lambda: Durations(WAIT_SECONDS))


class ReplayCollector(Collector):
    """Reads the replay's own counters when scraped, so that inserting and sampling pay nothing."""

    def __init__(self, read: Callable[[], ReplayCounts]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """One family per metric of the replay role."""
        now = self._read()
        yield from _buffer(now)
        yield from _traffic(now)
        yield from _members(now)


def _buffer(now: ReplayCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "dase_replay_buffer_capacity_transitions", "Transitions the buffer can hold.", now.capacity
    )
    yield GaugeMetricFamily("dase_replay_buffer_bytes", "Bytes of the transitions present.", now.buffer_bytes)
    yield gauge("dase_replay_buffer_transitions", "Transitions present.", "agent_id", now.size_by_agent)
    yield gauge(
        "dase_replay_last_sync_timestamp_seconds",
        "When the disk last had everything that was committed, in seconds since 1970; nothing in memory.",
        (),
        {} if now.last_sync is None else {(): now.last_sync},
    )


def _traffic(now: ReplayCounts) -> Iterator[Metric]:
    yield counter("dase_replay_inserted_transitions", "Transitions stored.", "agent_id", now.inserted)
    yield counter(
        "dase_replay_evicted_transitions",
        "Transitions that made room for newer ones.",
        "agent_id",
        dict.fromkeys(now.inserted, 0) | dict(now.evicted),
    )
    none_yet = {(agent, NOT_FINITE): 0 for agent in now.inserted}  # else Prometheus misses the first ones
    refused = dict(sorted((none_yet | dict(now.refused)).items()))
    yield counter("dase_replay_rejected_transitions", "Transitions refused.", ("agent_id", "reason"), refused)
    yield counter(
        "dase_replay_sampled_transitions",
        f"Transitions sent in batches, for agents below {MAX_PAIRED_AGENTS}.",
        ("agent_id", "source_agent_id"),
        now.sampled,
    )
    yield histogram(
        "dase_replay_sample_wait_seconds",
        "How long a batch that was asked for waited until there were enough transitions.",
        (),
        {(): now.sample_wait},
    )


def _members(now: ReplayCounts) -> Iterator[Metric]:
    yield gauge("dase_replay_active_streams", "Streams that are open.", "rpc", now.open_streams)
    yield gauge(
        "dase_replay_policy_version",
        "Training iterations that the latest published policy has had.",
        "agent_id",
        now.policy_versions,
    )
    yield gauge(
        "dase_replay_leases",
        "Agent ids by the state of their latest lease: live, left (given back), expired.",
        "state",
        now.leases,
    )
    yield counter(
        "dase_replay_leases_granted",
        "Leases that an agent id has had; more than one means that its node was replaced.",
        "agent_id",
        now.leases_granted,
    )
    yield from door_metrics("replay", now.door)
