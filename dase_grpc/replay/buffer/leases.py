"""Leases: who may act as which agent, with a time to live and an epoch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from dase_grpc.errors import AgentTakenError, MalformedError, StaleLeaseError
from dase_grpc.progress import FINISHED, Progress
from dase_grpc.replay.buffer.ring import MAX_AGENT_ID


@dataclass(frozen=True)
class Lease:
    """The right to act as one agent until `ttl_s` seconds pass without a heartbeat.

    Nodes may have the same name, but not the same id; an empty one is nobody's.
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


class LeaseTable:
    """The leases of all agents of a run; `now` is a monotonic clock's reading in seconds.

    Each new lease of an agent id has a higher epoch than the one before. A holder that was silent
    for longer than its time to live may still renew as long as nobody has taken its agent id.

    Args:
        ttl_s: how long a lease lives without a heartbeat.
        max_agents: agent ids are below this.
        restored: the leases of an earlier start, the latest of each agent id.
        keep: called with each lease that is made or given back before it counts.
    """

    def __init__(
        self,
        *,
        ttl_s: float,
        max_agents: int = MAX_AGENT_ID + 1,
        restored: Iterable[Lease] = (),
        keep: Callable[[Lease], None] | None = None,
    ) -> None:
        self.ttl_s = ttl_s
        self._max_agents = max_agents
        self._leases = {lease.agent_id: lease for lease in restored}
        self._keep = keep

    def join(self, node_name: str, wanted: int | None, now: float, *, node_id: str = "") -> Lease:
        """Leases the agent id asked for, or the lowest one that no live node holds.

        A node that holds a live lease already, of the id asked for or of any, is given that one again: it
        has not heard the answer.

        Raises:
            AgentTakenError: a live node holds the id, or all ids are taken.
            MalformedError: there is no such agent id.
        """
        mine = self._held_by(node_id, wanted, now)
        if mine is not None:
            self._leases[mine.agent_id] = again = replace(mine, renewed_at=now)
            return again
        agent_id = self._lowest_free(now) if wanted is None else wanted
        if not 0 <= agent_id < self._max_agents:
            raise MalformedError(f"agent id {agent_id} is outside 0..{self._max_agents - 1}")
        held = self._leases.get(agent_id)
        if held is not None and held.state(now) == "live":
            raise AgentTakenError(
                f"agent {agent_id} is held by the live node {held.node_name!r}; "
                f"choose another --agent, or wait up to {held.ttl_s:g} s if that node is gone"
            )
        epoch = 1 if held is None else held.epoch + 1
        lease = Lease(agent_id, epoch, node_name, renewed_at=now, ttl_s=self.ttl_s, node_id=node_id)
        self._change(lease)
        return lease

    def require(self, agent_id: int, epoch: int) -> Lease:
        """The lease with this epoch.

        Raises:
            StaleLeaseError: it was given back, given to another node, or never existed.
        """
        held = self._leases.get(agent_id)
        if held is None or held.epoch != epoch or held.left_because is not None:
            raise StaleLeaseError(
                f"the lease of agent {agent_id} with epoch {epoch} is not valid "
                f"({_what_holds(held)}); {_remedy(held)}"
            )
        return held

    def renew(self, agent_id: int, epoch: int, now: float, *, progress: Progress) -> None:
        """Extends a lease to `now` plus its time to live.

        Raises:
            StaleLeaseError: see `require`.
        """
        held = self.require(agent_id, epoch)
        self._leases[agent_id] = replace(held, renewed_at=now, progress=progress)

    def leave(self, agent_id: int, epoch: int, *, because: str) -> None:
        """Gives a lease back.

        Raises:
            StaleLeaseError: see `require`.
        """
        held = self.require(agent_id, epoch)
        self._change(replace(held, left_because=because))

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

    def _change(self, lease: Lease) -> None:
        if self._keep is not None:
            self._keep(lease)
        self._leases[lease.agent_id] = lease

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


def _remedy(lease: Lease | None) -> str:
    """What whoever states another lease than this one, the latest of the agent id, is to do."""
    if lease is None or lease.left_because is not None:
        return "join again"
    return "another node acts as the agent, so end, or join as another agent"


def _what_holds(lease: Lease | None) -> str:
    if lease is None:
        return "the service knows no lease of this agent"
    if lease.left_because is not None:
        return f"node {lease.node_name!r} gave epoch {lease.epoch} back: {lease.left_because}"
    return f"the service knows epoch {lease.epoch} of node {lease.node_name!r}"
