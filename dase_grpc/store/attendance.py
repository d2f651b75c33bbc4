"""Who works for a run without a lease: actors and evaluators, by what they say again and again."""

from dataclasses import dataclass
from typing import Final

from dase_grpc.attendance import Attendance, Attendant
from dase_grpc.errors import OverloadedError

MAX_ATTENDANTS: Final = 4_096


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

    def __init__(self, *, ttl_s: float, max_nodes: int = MAX_ATTENDANTS) -> None:
        self.ttl_s = ttl_s
        self._max_nodes = max_nodes
        self._seen: dict[str, Seen] = {}

    def note(self, node: Attendant, attendance: Attendance, now: float) -> bool:
        """Notes what a node says; returns whether it is new here.

        Raises:
            OverloadedError: there are too many.
        """
        new = node.node_id not in self._seen
        if new and len(self._seen) >= self._max_nodes:
            self._forget_silent(now)
            if len(self._seen) >= self._max_nodes:
                raise OverloadedError(
                    f"{self._max_nodes} actors and evaluators attend already, and no more are taken"
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
        self._forget_silent(now)
        return sorted(self._seen.values(), key=_order)

    def _forget_silent(self, now: float) -> None:
        self._seen = {key: seen for key, seen in self._seen.items() if now - seen.at <= self.ttl_s}


def _order(seen: Seen) -> tuple[str, int, str, str]:
    node = seen.node
    return node.role, -1 if node.agent_id is None else node.agent_id, node.node_name, node.node_id
