"""What a replay node shows Prometheus: the counters of its run, its calls, its disk and its event loop."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client import CollectorRegistry

from dase_grpc.metrics.buffer import CallsCollector, ReplayCollector, ReplayCounts
from dase_grpc.metrics.calls import Calls
from dase_grpc.metrics.endpoint import loop_lag, make_registry
from dase_grpc.replay.buffer.run import SharedRun

LEASE_STATES: Final = ("live", "left", "expired")


class ReplayMonitor:
    """The registry of one replay node, and what its parts tell it.

    Scraped by a thread of its own, which takes copies of what the event loop counts.

    Args:
        run: what the node holds.
        services: whose methods are shown before their first call.
        open_streams: streams that are open, by method.
        denied: calls that were refused for want of credentials or permission, by reason.
    """

    def __init__(
        self,
        run: SharedRun,
        services: tuple[ServiceDescriptor, ...],
        *,
        open_streams: Callable[[], Mapping[str, int]] = dict,
        denied: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.calls = Calls(method.name for service in services for method in service.methods)
        self.registry: CollectorRegistry = make_registry()
        self.loop_lag = loop_lag(self.registry)
        self.open_streams = open_streams
        self.denied = denied
        self._run = run
        self._last_sync: float | None = None
        self.registry.register(ReplayCollector(self.counts))
        self.registry.register(CallsCollector(self.calls))

    def synced(self) -> None:
        """Notes that the disk has all that was committed when this round of syncing began."""
        self._last_sync = time.time()

    def counts(self) -> ReplayCounts:
        """A copy of the run's counters, safe to take from another thread."""
        run = self._run
        leases, now = run.leases.all(), time.monotonic()
        states = Counter(lease.state(now) for lease in leases)
        counts = ReplayCounts(
            open_streams=self.open_streams(),
            denied=self.denied(),
            leases={state: states[state] for state in LEASE_STATES},
            leases_granted={lease.agent_id: lease.epoch for lease in leases},
            last_sync=self._last_sync,
        )
        if not run.opened:
            return counts
        store = run.store
        return replace(
            counts,
            capacity=store.ring.capacity,
            buffer_bytes=len(store.ring) * store.schema.row_bytes,
            size_by_agent=store.ring.size_by_agent,
            inserted=dict(store.traffic.inserted),
            refused=dict(store.traffic.refused),
            sampled=dict(store.traffic.sampled),
            evicted=store.traffic.evicted,
            policy_versions=run.policies.versions,
        )
