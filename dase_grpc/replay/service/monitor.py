"""The monitor of a replay node: what it shows Prometheus, and what its log says of leases."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client import CollectorRegistry

from dase_grpc.metrics.buffer import REPLAY_REQUEST, ReplayCollector, ReplayCounts
from dase_grpc.metrics.calls import Calls, CallsCollector, DoorState
from dase_grpc.metrics.endpoint import loop_lag, make_registry
from dase_grpc.progress import several
from dase_grpc.replay.buffer.run import SharedRun

LEASE_STATES: Final = ("live", "left", "expired")

log = logging.getLogger("dase")


class ReplayMonitor:
    """The registry of one replay node, and what its parts tell it; all methods of `services` are shown.

    Scraped by a thread of its own, which takes copies of what the event loop counts.
    """

    def __init__(
        self,
        run: SharedRun,
        services: tuple[ServiceDescriptor, ...],
        *,
        open_streams: Callable[[], Mapping[str, int]] = dict,
        door_state: Callable[[], DoorState] = DoorState,
    ) -> None:
        self.calls = Calls(method.name for service in services for method in service.methods)
        self.registry: CollectorRegistry = make_registry()
        self.loop_lag = loop_lag(self.registry)
        self.open_streams = open_streams
        self.door_state = door_state
        self._run = run
        self._last_sync: float | None = None
        self.registry.register(ReplayCollector(self.counts))
        self.registry.register(CallsCollector(self.calls, role="replay", request=REPLAY_REQUEST))

    def synced(self, since: float) -> None:
        """Notes that the disk has all that was committed at `since`, in seconds since 1970."""
        self._last_sync = since

    def counts(self) -> ReplayCounts:
        """A copy of the run's counters, safe to take from another thread."""
        run = self._run
        leases, now = run.leases.all(), time.monotonic()
        states = Counter(lease.state(now) for lease in leases)
        counts = ReplayCounts(
            open_streams=self.open_streams(),
            door=self.door_state(),
            leases={state: states[state] for state in LEASE_STATES},
            leases_granted={lease.agent_id: lease.epoch for lease in leases},
            last_sync=self._last_sync,
            sample_wait=self.calls.sample_wait,
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
            evicted=store.ring.evicted_by_agent,
            policy_versions=run.policies.versions,
        )


class LeaseWatch:
    """Follows the leases of a run from look to look; what it says goes to the log."""

    def __init__(self, run: SharedRun) -> None:
        self._run = run
        self._live: set[tuple[int, int]] = set()
        self._silent: set[tuple[int, int]] = set()
        self._left_alone_by = {(lease.agent_id, lease.epoch) for lease in run.leases.all()}

    def look(self, now: float) -> None:
        """Says what has changed since the last look; `now` is the clock of the leases."""
        states = {(lease.agent_id, lease.epoch): lease.state(now) for lease in self._run.leases.all()}
        self._say_silent(states)
        self._live = {key for key, state in states.items() if state == "live"}
        self._say_alone(states)

    def _say_silent(self, states: dict[tuple[int, int], str]) -> None:
        for agent_id, epoch in sorted(self._live):
            if states.get((agent_id, epoch)) == "expired":
                log.warning(
                    "agent %d was silent for %g s: its lease has ended and its id is free",
                    agent_id,
                    self._run.leases.ttl_s,
                )
                self._silent.add((agent_id, epoch))
        for key in sorted(key for key in self._silent if states.get(key) != "expired"):
            self._silent.remove(key)
            if states.get(key) == "live":
                log.info("agent %d is heard again: its lease goes on", key[0])

    def _say_alone(self, states: dict[tuple[int, int], str]) -> None:
        """Says once that nobody is left, also of agents that came and went between two looks."""
        if self._live:
            self._left_alone_by = set()
        elif self._left_alone_by != set(states):
            self._left_alone_by = set(states)
            log.info(
                "no agent is left; the buffer holds %s, and whoever joins finds them until this "
                "node is stopped",
                several(len(self._run.store.ring) if self._run.opened else 0, "transition"),
            )
