"""Attendants: actors and evaluators, which work for a run without a lease and say so again and again."""

from dataclasses import dataclass
from typing import Final

from dase_grpc.errors import OverloadedError
from dase_grpc.progress import Attendance, Attendant

MAX_ATTENDANTS: Final = 4_096
MAX_AGENT_ATTENDANTS: Final = 512
"""Actors of one agent, so that none keeps those of others out."""


@dataclass(frozen=True)
class Seen:
    """A node, what it said last, and when (monotonic seconds)."""

    node: Attendant
    attendance: Attendance
    at: float


class AttendanceBook:
    """The nodes that have been heard of within `ttl_s`; `now` is a monotonic clock's reading in seconds.

    It is for screens alone: no right follows from being in it.
    """

    def __init__(
        self, *, ttl_s: float, max_nodes: int = MAX_ATTENDANTS, max_of_agent: int = MAX_AGENT_ATTENDANTS
    ) -> None:
        self.ttl_s = ttl_s
        self._max_nodes = max_nodes
        self._max_of_agent = max_of_agent
        self._seen: dict[str, Seen] = {}

    def note(self, node: Attendant, attendance: Attendance, now: float) -> bool:
        """Notes what a node says; returns whether it is new here.

        Raises:
            OverloadedError: there are too many.
        """
        new = node.node_id not in self._seen
        if new and self._is_full(node.agent_id):
            self.forget_silent(now)
            if self._is_full(node.agent_id):
                raise OverloadedError(
                    f"as many actors and evaluators attend already as are taken, {self._max_nodes}, and of "
                    f"one agent {self._max_of_agent}; stop some of them"
                )
        self._seen[node.node_id] = Seen(node, attendance, now)
        return new

    def leave(self, node_id: str) -> None:
        """Forgets a node, if it is here."""
        self._seen.pop(node_id, None)

    def has_actor(self, agent_id: int) -> bool:
        """Whether an actor of this agent has been heard of and not been forgotten since."""
        return any(
            seen.node.role == "actor" and seen.node.agent_id == agent_id for seen in self._seen.values()
        )

    def all(self, now: float) -> list[Seen]:
        """The nodes that are not silent, by role, agent and name."""
        self.forget_silent(now)
        return sorted(self._seen.values(), key=_order)

    def forget_silent(self, now: float) -> None:
        """Forgets who has said nothing for longer than `ttl_s`; to be called now and then."""
        self._seen = {key: seen for key, seen in self._seen.items() if now - seen.at <= self.ttl_s}

    def _is_full(self, agent_id: int | None) -> bool:
        if len(self._seen) >= self._max_nodes:
            return True
        of_agent = sum(seen.node.agent_id == agent_id for seen in self._seen.values())
        return agent_id is not None and of_agent >= self._max_of_agent


def _order(seen: Seen) -> tuple[str, int, str, str]:
    node = seen.node
    return node.role, -1 if node.agent_id is None else node.agent_id, node.node_name, node.node_id
