"""The connections of a node, one for each shard; which of them it can do without."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dase_grpc.process.tasks import first_cause
from dase_grpc.replay.client.connection import Connection, Outage


class Shards:
    """The connections of one node, in the order of the shards; at least one.

    One of several may be away for as long as another serves, and until there is nothing left to do but to
    let it have the rows that are kept for it, once the node is `ending`. Threads: as Connection.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections = tuple(connections)
        self.ending = False
        self._kept: Sequence[Callable[[], int]] = [int] * len(self.connections)
        for index, each in enumerate(self.connections):
            each.needed = partial(self._is_needed, index)

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
        """See Connection."""
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
        """See Connection."""
        return sum(each.losses for each in self.connections)

    @property
    def buffer_size(self) -> int:
        """See Connection."""
        return sum(each.buffer_size for each in self.connections)

    def on_restart(self, call: Callable[[], None]) -> None:
        """See Connection."""
        for each in self.connections:
            each.on_restart(call)

    def note_stopping(self, *, stopping: bool) -> None:
        """Says whether the node is to end, so that shards are waited for only briefly."""
        for each in self.connections:
            each.stopping = stopping

    async def heartbeats(self, say: Callable[[], Any]) -> None:
        """Those of all connections; see Connection."""
        with first_cause():
            async with asyncio.TaskGroup() as tasks:
                for each in self.connections:
                    tasks.create_task(each.heartbeats(say))

    def _is_needed(self, index: int) -> bool:
        others = [each for each in self.connections if each is not self.connections[index]]
        if all(each.outage is not None for each in others):
            return True
        return self.ending and self._kept[index]() > 0
