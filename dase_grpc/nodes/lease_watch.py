"""What a replay node's log says about its leases: who fell silent, who is back, and when nobody is left."""

import logging

from dase_grpc.progress import several
from dase_grpc.replay.buffer.run import SharedRun

log = logging.getLogger("dase")


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
