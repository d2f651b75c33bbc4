"""Leases: who may act as which agent, with a time to live and an epoch; and who attends without one."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from typing import Final

from dase_grpc.errors import AgentTakenError, MalformedError, OverloadedError, StaleLeaseError
from dase_grpc.progress import FINISHED, MAX_AGENT_ID, Attendance, Attendant, Progress

ATTENDING_ROLES: Final = ("actor", "evaluator")
"""Of nodes that hold no lease."""

MAX_ATTENDANTS: Final = 4_096
MAX_AGENT_ATTENDANTS: Final = 512
"""Actors of one agent, so that none keeps those of others out."""


@dataclass(frozen=True)
class Lease:
    """The right to act as one agent until `ttl_s` seconds pass without a heartbeat.

    Nodes may have the same name, but not the same id; an empty id is nobody's.
    """

    agent_id: int
    epoch: int
    node_name: str
    renewed_at: float
    ttl_s: float
    progress: Progress = field(default_factory=Progress)
    left_because: str | None = None
    node_id: str = ""

    def state(self, now: float) -> str:
        """`live`, `left` or `expired`."""
        if self.left_because is not None:
            return "left"
        return "live" if now - self.renewed_at <= self.ttl_s else "expired"

    def is_of(self, node_id: str) -> bool:
        """Whether it is this node's, whose id is a secret: a wrong one takes as long to compare."""
        return bool(node_id) and compare_digest(self.node_id.encode(), node_id.encode())


class LeaseTable:
    """The leases of all agents of a run; `now` is a monotonic clock's reading in seconds.

    Each new lease of an agent id has a higher epoch than the one before. A holder that was silent
    for longer than its time to live may still renew as long as nobody has taken its agent id.

    Args:
        restored: the leases of an earlier start, the latest of each agent id.
        keep: called with each lease that is made or given back before it counts.
    """

    def __init__(
        self,
        *,
        ttl_s: float,
        max_agents: int = MAX_AGENT_ID + 1,
        restored: Iterable[Lease] = (),
        keep: Callable[[Lease], None] = lambda lease: None,
    ) -> None:
        self.ttl_s = ttl_s
        self._max_agents = max_agents
        self._leases = {lease.agent_id: lease for lease in restored}
        self._keep = keep

    def __len__(self) -> int:
        """Agent ids that have had a lease."""
        return len(self._leases)

    def join(
        self, node_name: str, wanted: int | None, now: float, *, node_id: str = "", ended: str = ""
    ) -> Lease:
        """Leases the agent id asked for, or the lowest one that no live node holds.

        A node that holds a live lease already, of the id asked for or of any, is given that one again: it
        has not heard the answer. `ended` is the id of a node whose process the caller has seen end: the
        lease of the id asked for need not run out if it is that node's; of any other node's it says nothing.
        An AgentTakenError where a live node holds the id, or all are taken.
        """
        mine = self._held_by(node_id, wanted, now)
        if mine is not None:
            self._leases[mine.agent_id] = again = replace(mine, renewed_at=now)
            return again
        agent_id = self._lowest_free(now) if wanted is None else wanted
        if not 0 <= agent_id < self._max_agents:
            raise MalformedError(f"agent id {agent_id} is outside 0..{self._max_agents - 1}")
        held = self._leases.get(agent_id)
        if held is not None and held.state(now) == "live" and not held.is_of(ended):
            raise AgentTakenError(
                f"agent {agent_id} is held by the live node {held.node_name!r}; "
                f"choose another --agent, or wait up to {held.ttl_s:g} s if that node is gone"
            )
        epoch = 1 if held is None else held.epoch + 1
        lease = Lease(agent_id, epoch, node_name, renewed_at=now, ttl_s=self.ttl_s, node_id=node_id)
        return self._change(lease)

    def require(self, agent_id: int, epoch: int) -> Lease:
        """The lease with this epoch; a StaleLeaseError where it was given back or away, or never was."""
        held = self._leases.get(agent_id)
        if held is None or held.epoch != epoch or held.left_because is not None:
            raise StaleLeaseError(
                f"the lease of agent {agent_id} with epoch {epoch} is not valid {_what_holds(held)}"
            )
        return held

    def renew(self, agent_id: int, epoch: int, now: float, *, progress: Progress) -> None:
        """Extends a lease that is valid, see `require`, to `now` plus its time to live."""
        self._leases[agent_id] = replace(self.require(agent_id, epoch), renewed_at=now, progress=progress)

    def leave(self, agent_id: int, epoch: int, *, because: str) -> None:
        """Gives a lease back that is valid, see `require`."""
        self._change(replace(self.require(agent_id, epoch), left_because=because))

    def held(self, agent_id: int) -> Lease | None:
        """The latest lease of an agent id, unless it was given back; its holder may have fallen silent."""
        lease = self._leases.get(agent_id)
        return lease if lease is not None and lease.left_because is None else None

    def finished(self, agent_id: int) -> bool:
        """Whether the latest holder of an agent id did all its steps and then gave it back."""
        lease = self._leases.get(agent_id)
        return lease is not None and lease.left_because is not None and lease.progress.state == FINISHED

    def all(self) -> list[Lease]:
        """The latest lease of each agent id, by agent id."""
        return [self._leases[agent_id] for agent_id in sorted(self._leases)]

    def _change(self, lease: Lease) -> Lease:
        self._keep(lease)
        self._leases[lease.agent_id] = lease
        return lease

    def _held_by(self, node_id: str, wanted: int | None, now: float) -> Lease | None:
        """The live lease of a node, of the agent id it wants."""
        held = (lease for lease in self._leases.values() if node_id and lease.node_id == node_id)
        return next(
            (each for each in held if wanted in {None, each.agent_id} and each.state(now) == "live"), None
        )

    def _lowest_free(self, now: float) -> int:
        for agent_id in range(self._max_agents):
            if agent_id not in self._leases or self._leases[agent_id].state(now) != "live":
                return agent_id
        raise AgentTakenError(f"all {self._max_agents} agent ids are held by live nodes")


def _what_holds(lease: Lease | None) -> str:
    """The latest lease of an agent id, and what whoever states another one is to do."""
    if lease is None:
        return "(the service knows no lease of this agent); join again"
    if lease.left_because is not None:
        return f"(node {lease.node_name!r} gave epoch {lease.epoch} back: {lease.left_because}); join again"
    return (
        f"(the service knows epoch {lease.epoch} of node {lease.node_name!r}); another node acts as the "
        f"agent, so end, or join as another agent"
    )


@dataclass(frozen=True)
class Presence:
    """A node without a lease, what it said last, and when (monotonic seconds)."""

    node: Attendant
    attendance: Attendance
    at: float


@dataclass(kw_only=True, eq=False)
class AttendanceBook:
    """The nodes without a lease that have been heard of within `ttl_s`. No right follows from being in it."""

    ttl_s: float
    max_nodes: int = MAX_ATTENDANTS
    max_of_agent: int = MAX_AGENT_ATTENDANTS
    _seen: dict[str, Presence] = field(default_factory=dict, init=False)
    _of_agent: Counter[tuple[str, int | None]] = field(default_factory=Counter, init=False)  # role, agent

    def __len__(self) -> int:
        """Nodes that were heard of and not forgotten since."""
        return len(self._seen)

    def note(self, node: Attendant, attendance: Attendance, now: float) -> bool:
        """Notes what a node says; returns whether it is new here. Too many are an OverloadedError."""
        new = node.node_id not in self._seen
        if new and self._is_full(node.agent_id):
            self.forget_silent(now)
            if self._is_full(node.agent_id):
                raise OverloadedError(
                    f"as many actors and evaluators attend already as are taken, {self.max_nodes}, and of "
                    f"one agent {self.max_of_agent}; stop some of them"
                )
        self.leave(node.node_id)
        self._seen[node.node_id] = Presence(node, attendance, now)
        self._of_agent[node.role, node.agent_id] += 1
        return new

    def leave(self, node_id: str) -> None:
        """Forgets a node, if it is here."""
        seen = self._seen.pop(node_id, None)
        if seen is not None:
            self._of_agent[seen.node.role, seen.node.agent_id] -= 1

    def has_actor(self, agent_id: int) -> bool:
        """Whether an actor of this agent has been heard of and not been forgotten since; O(1)."""
        return self._of_agent["actor", agent_id] > 0

    def all(self, now: float) -> list[Presence]:
        """The nodes that are not silent, by role, agent and name."""
        self.forget_silent(now)
        return sorted(self._seen.values(), key=_order)

    def forget_silent(self, now: float) -> None:
        """Forgets who has said nothing for longer than `ttl_s`; to be called now and then."""
        for node_id in [key for key, seen in self._seen.items() if now - seen.at > self.ttl_s]:
            self.leave(node_id)

    def _is_full(self, agent_id: int | None) -> bool:
        if len(self._seen) >= self.max_nodes:
            return True
        of_agent = sum(self._of_agent[role, agent_id] for role in ATTENDING_ROLES)
        return agent_id is not None and of_agent >= self.max_of_agent


def _order(seen: Presence) -> tuple[str, int, str, str]:
    node = seen.node
    return node.role, -1 if node.agent_id is None else node.agent_id, node.node_name, node.node_id
