"""The shards of a replay as one node is connected to them; a replay in one piece is its only shard."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.process.tasks import first_cause
from dase_grpc.progress import Progress
from dase_grpc.replay.client.channels import Lines, require_let_in
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.connection import Connection, Outage
from dase_grpc.replay.client.patience import NODE_NAME
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.messages import Membership


class Shards:
    """The connections of one node, in the order of the shards; at least one.

    One shard of several may be away for as long as another serves, and until there is nothing left to do
    but to let it have the rows that are kept for it.

    Lives on the event loop, but for `outage`, `away`, `losses` and `where`, which any thread may read.

    Attributes:
        ending: no more rows will come.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections = tuple(connections)
        self.ending = False
        self._kept: Sequence[Callable[[], int]] = [int] * len(self.connections)
        for index, each in enumerate(self.connections):
            each.needed = partial(self._is_needed, index)

    @classmethod
    def one(cls, connection: Connection) -> Self:
        """A replay in one piece."""
        return cls([connection])

    @property
    def first(self) -> Connection:
        """The shard that decides about agent ids and keeps the policies."""
        return self.connections[0]

    @property
    def where(self) -> str:
        """The addresses, for sentences."""
        return ",".join(each.target.address for each in self.connections)

    @property
    def outage(self) -> Outage | None:
        """The outage under way, if no shard serves; since when none does."""
        outages = [each.outage for each in self.connections]
        known = [outage for outage in outages if outage is not None]
        return max(known, key=lambda outage: outage.since) if len(known) == len(outages) else None

    @property
    def away(self) -> Outage | None:
        """The outage under way, if it has lasted for longer than `AWAY_AFTER_S`."""
        return self.outage if all(each.away is not None for each in self.connections) else None

    @property
    def complete(self) -> bool:
        """Whether every shard serves that is needed."""
        return all(each.outage is None or not each.needed() for each in self.connections)

    def keep_for(self, kept: Sequence[Callable[[], int]]) -> None:
        """Says how many rows are kept for each shard."""
        self._kept = kept

    @property
    def losses(self) -> int:
        """How often a shard came back without transitions it had."""
        return sum(each.losses for each in self.connections)

    @property
    def buffer_size(self) -> int:
        """Transitions that the shards held when they were last heard of."""
        return sum(each.buffer_size for each in self.connections)

    def on_restart(self, call: Callable[[], None]) -> None:
        """Has `call` called whenever a shard turns out to have been started again. See Connection."""
        for each in self.connections:
            each.on_restart(call)

    def note_stopping(self, *, stopping: bool) -> None:
        """Says whether the node is to end, so that shards are waited for only briefly."""
        for each in self.connections:
            each.stopping = stopping

    async def heartbeats(self, progress: Callable[[], Progress], *, every_s: float) -> None:
        """Renews the lease at every shard and reports progress until cancelled.

        Raises:
            RefusalError: see Connection.keep.
        """
        with first_cause():
            async with asyncio.TaskGroup() as tasks:
                for each in self.connections:
                    tasks.create_task(each.heartbeats(progress, every_s=every_s))

    def _is_needed(self, index: int) -> bool:
        """Whether a shard that is away must come back."""
        others = [each for each in self.connections if each is not self.connections[index]]
        if all(each.outage is not None for each in others):
            return True
        return self.ending and self._kept[index]() > 0


@dataclass(frozen=True)
class Joined:
    """A node that has joined each shard: as who, and where, in the order of the shards."""

    targets: tuple[StreamTarget, ...]
    addresses: tuple[Address, ...]

    @property
    def member(self) -> Membership:
        """What the node is: as the first shard has it, with what all shards hold together."""
        members = [target.member for target in self.targets]
        return replace(
            members[0],
            capacity=sum(member.capacity for member in members),
            buffer_size=sum(member.buffer_size for member in members),
        )


def connected(
    joined: Joined,
    lines: Lines,
    *,
    timeout_s: float,
    accept: Callable[[Membership], None],
    metrics: LearnerMetrics | None,
) -> Shards:
    """The connections of a learner that has joined; see Connection.

    `accept` is told of a membership what all shards hold together.
    """
    count = len(joined.targets)

    def accept_part(member: Membership) -> None:
        accept(replace(member, capacity=member.capacity * count))

    return Shards(
        [
            Connection(
                target,
                node_name=NODE_NAME,
                timeout_s=timeout_s,
                accept=accept_part,
                metrics=metrics,
                look_why_away=partial(require_let_in, address, lines.credentials),
            )
            for target, address in zip(joined.targets, joined.addresses, strict=True)
        ]
    )
