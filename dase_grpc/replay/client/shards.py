"""The connections of a node, one for each shard; which of them it can do without."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dase_grpc.process.tasks import first_cause
from dase_grpc.replay.client.connection import ALWAYS, Connection, Outage


class Shards:
    """The connections of one node, in the order of the shards; at least one.

    One of several may be away for as long as another serves, and until there is nothing left to do but to
    let it have the rows that are kept for it, once the node ends. Threads: as Connection.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections = tuple(connections)
        self._ending_since: float | None = None
        self._kept: Sequence[Callable[[], int]] = [int] * len(self.connections)
        for index, each in enumerate(self.connections):
            each.needed_since = partial(self._needed_since, index)

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
        outage = self.outage  # mostly none, and then nothing has to be asked
        if outage is None or any(each.away is None for each in self.connections):
            return None
        return outage

    @property
    def complete(self) -> bool:
        """Whether every shard serves that is needed."""
        return all(each.outage is None or each.needed_since() is None for each in self.connections)

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

    def note_stopping(self) -> None:
        """See Connection."""
        for each in self.connections:
            each.note_stopping()

    def note_ending(self) -> None:
        """Notes that from now on nothing is left to do but to let each shard have the rows kept for it."""
        self._ending_since = time.monotonic()

    async def heartbeats(self, say: Callable[[], Any]) -> None:
        """Those of all connections; see Connection."""
        with first_cause():
            async with asyncio.TaskGroup() as tasks:
                for each in self.connections:
                    tasks.create_task(each.heartbeats(say))

    def _needed_since(self, index: int) -> float | None:
        """See Connection: since no other shard serves, or since nothing is left to do but wait for it."""
        others = [each.unserved_since for each in self.connections if each is not self.connections[index]]
        away = [since for since in others if since is not None]
        reasons = [max(away, default=ALWAYS)] if len(away) == len(others) else []
        if self._ending_since is not None and self._kept[index]() > 0:
            reasons.append(self._ending_since)
        return min(reasons, default=None)
