"""The policy server's Prometheus metrics: what it counts of its batches, read when scraped."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dase_grpc.metrics.calls import (
    REQUEST_SECONDS,
    DoorState,
    Durations,
    counter,
    door_metrics,
    gauge,
    histogram,
)

ROLE: Final = "inference"


@dataclass
class BatchCounts:
    """What a batcher counts; its event loop writes.

    waited: how long requests waited until the batch that they are in was computed; took: how long that took.
    """

    rows: int = 0
    batches: int = 0
    queued_rows: int = 0
    waited: Durations = field(default_factory=lambda: Durations(REQUEST_SECONDS))
    took: Durations = field(default_factory=lambda: Durations(REQUEST_SECONDS))


class InferenceCollector(Collector):
    """Reads what a policy server and its door count when scraped."""

    def __init__(self, counts: BatchCounts, door: Callable[[], DoorState]) -> None:
        self._counts, self._door = counts, door

    def collect(self) -> Iterable[Metric]:
        """One family per metric."""
        now, own = self._counts, f"dase_{ROLE}"
        yield counter(f"{own}_observations", "Observations that were answered.", (), {(): now.rows})
        text = "Batches that the policy has computed; observations per batch are the mean size."
        yield counter(f"{own}_batches", text, (), {(): now.batches})
        yield gauge(f"{own}_queued_observations", "Observations that wait.", (), {(): now.queued_rows})
        text = "How long a request waited until its batch was begun."
        yield histogram(f"{own}_wait_seconds", text, (), {(): now.waited})
        text = "How long the policy took for a batch."
        yield histogram(f"{own}_batch_duration_seconds", text, (), {(): now.took})
        yield from door_metrics(ROLE, self._door())
