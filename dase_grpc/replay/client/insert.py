"""RowLink: a node's rows, stored by the compute thread, on their way to the replay in Insert streams."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from dase_grpc.process.tasks import first_cause
from dase_grpc.progress import several
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.handoff import Handoff
from dase_grpc.replay.client.inserter import WINDOW_ROWS, Inserter
from dase_grpc.replay.client.outbox import Outbox
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.client.waits import Wait, Waited, WaitReason
from dase_grpc.schema import Array

QUEUED_ROWS: Final = 4_096
"""Rows that may wait for an Insert stream before `store` blocks."""

GATHERED_ROWS: Final = 256
"""As many rows go out at once."""

GATHERED_S: Final = 0.05
"""How long fewer wait for more at most. A message for each row would cost both sides as much time as an
update of a small network; what nobody has acknowledged is kept, and a batch misses some steps of a
thousand."""

KEPT_BYTES: Final = 64 * 2**20
"""What the rows that wait, and those that are not acknowledged, may take each; wide rows are fewer."""


class RowLink:
    """A node's sink over the network.

    `store` belongs to the compute thread and blocks; everything else belongs to the event loop that made
    the link. Rows go out when there are `GATHERED_ROWS` or a stream has waited `GATHERED_S`, and as soon as
    one takes them where updates wait for them. Streams begin again when they break (connection.py).

    Shards take turns, chunk by chunk; one that is away, or that has a whole window of rows to acknowledge,
    is passed over. A row that a shard was given stays with it: it is kept until that shard has
    acknowledged it, and sent to it again where need be, so each is stored exactly once.

    Args:
        shards: the replay; all of it as the same agent.
        writer_id: names the writer at each shard.
        paced: the replay stores nothing before the agent's learner has said its pace; its updates wait for
            these rows.
        count_acknowledged: told how many rows are acknowledged, whenever some are.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        writer_id: str,
        paced: bool = False,
        count_acknowledged: Callable[[int], None] = lambda rows: None,
    ) -> None:
        row_bytes = shards.first.target.schema.row_bytes
        self._shards = shards
        self._writer_id = writer_id
        self._paced = paced
        self._window = max(1, kept_rows(WINDOW_ROWS, row_bytes) // len(shards.connections))
        self._lanes = [_Lane(each, Outbox(count=count_acknowledged)) for each in shards.connections]
        self._moved = asyncio.Event()
        self._turn = asyncio.Lock()  # whoever waits longest has it next, so shards take turns
        self._loop = asyncio.get_running_loop()
        queued = kept_rows(QUEUED_ROWS, row_bytes)
        self._wanted = 1  # as many queued rows wake the event loop
        self._enough = 1 if paced else min(GATHERED_ROWS, self._window, queued)
        self._rows: Handoff[Array] = Handoff(queued, on_change=self._tell)
        shards.keep_for([partial(len, lane.outbox) for lane in self._lanes])
        self._stored = 0
        self._no_more = False
        self._no_room = Waited()

    def store(self, row: Array) -> None:
        """Queues one transition; blocks while the streams are far behind."""
        self._stored += 1  # before it can be acknowledged
        if self._rows.full:
            self._no_room.begin()
        added = self._rows.added
        try:
            self._rows.put(row)
        except KeyboardInterrupt:  # while it waited, as a rule: the caller knows that this row is not stored
            self._stored -= self._rows.added == added
            raise
        finally:
            self._no_room.end()

    @property
    def stored(self) -> int:
        """Transitions that `store` was called with."""
        return self._stored

    @property
    def acknowledged(self) -> int:
        """Transitions whose commit is acknowledged."""
        return sum(lane.outbox.acknowledged for lane in self._lanes)

    @property
    def unacknowledged(self) -> int:
        """Transitions that `store` was called with and whose commit is not acknowledged."""
        return self._stored - self.acknowledged

    @property
    def wait(self) -> Wait | None:
        """What the compute thread has been without since more than `SAY_AFTER_S`, if it has."""
        if not self._no_room.long:
            return None
        if (away := self._away(self._no_room)) is not None:
            return away
        if (held_back := self.held_back) is not None:
            return Wait(self._no_room, WaitReason.PACE, held_back)
        return Wait(self._no_room, WaitReason.COMMIT, "waiting for the replay service to commit transitions")

    @property
    def held_back(self) -> str | None:
        """What the replay waits for before it stores more, in a sentence; None if it stores."""
        return next((lane.waiting for lane in self._lanes if lane.waiting is not None), None)

    def close(self) -> None:
        """Ends every wait of the compute thread, for good."""
        self._rows.close()

    def no_more_rows(self) -> None:
        """Lets `insert_rows` end once all queued rows are acknowledged."""
        self._no_more = self._shards.ending = True
        self._moved.set()

    async def insert_rows(self) -> None:
        """Sends queued rows; returns after `no_more_rows`, when the last is acknowledged.

        Raises:
            RefusalError: see Connection.keep.
        """
        with first_cause():
            async with asyncio.TaskGroup() as tasks:
                for lane in self._lanes:
                    tasks.create_task(lane.connection.keep(Stream.INSERT, partial(self._insert, lane)))

    async def _insert(self, lane: "_Lane", target: StreamTarget) -> None:
        if self._is_done(lane):
            return
        inserter = Inserter(
            target,
            writer_id=self._writer_id,
            window=self._window,
            on_acknowledged=lane.outbox.acknowledge,
            paced=self._paced,
            forgotten_writers=lane.forgotten_writers(target),
        )
        lane.inserters[:] = [inserter]
        try:
            await inserter.open()
            lane.connection.up(Stream.INSERT)
            lane.resume(inserter.sent_seq, target)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(inserter.receive())
                for block in lane.outbox.blocks():
                    await inserter.append(block)
                while (rows := await self._take_turn(lane)) is not None:
                    await inserter.append(rows)
                await inserter.finish()
        finally:
            inserter.cancel()

    async def _take_turn(self, lane: "_Lane") -> Array | None:
        """Moves what is queued to a lane when it is its turn, and returns it; None when no more will come."""
        async with self._turn:
            await self._gather()
            if not len(self._rows):
                return None
            rows = np.stack(self._rows.take(self._window))
            lane.outbox.add(rows)
        return rows

    async def _gather(self) -> None:
        """Returns when there are enough rows, or some after a wait for more; at once if no more will come."""
        while not self._no_more:
            with suppress(TimeoutError):
                async with asyncio.timeout(GATHERED_S):
                    await self._until_there_are(self._enough)
            if len(self._rows):
                return
            await self._until_there_are(1)

    async def _until_there_are(self, rows: int) -> None:
        """Returns when this many rows are queued, or no more will come."""
        self._wanted = rows
        while len(self._rows) < rows and not self._no_more:
            self._moved.clear()
            await self._moved.wait()

    def _tell(self) -> None:
        """Wakes the event loop for as many rows as it waits for: each time costs the compute thread time."""
        if len(self._rows) >= self._wanted:
            self._loop.call_soon_threadsafe(self._moved.set)

    def _away(self, waited: Waited) -> Wait | None:
        """The wait, if it is for a replay that is away."""
        outage = self._shards.outage
        if outage is None:
            return None
        exploring = not self._rows.full
        text = (
            f"waiting for the replay service at {self._shards.where}, which {outage}; "
            f"{several(self.unacknowledged, 'transition is', 'transitions are')} kept for it, "
            f"{'exploring on meanwhile' if exploring else 'no more fit'}"
        )
        return Wait(waited, WaitReason(outage.why.value), text, exploring=exploring)

    def _is_done(self, lane: "_Lane") -> bool:
        """Whether one shard of several need not even be reached any more."""
        return self._no_more and len(self._lanes) > 1 and not len(self._rows) and not len(lane.outbox)


@dataclass(frozen=True)
class _Lane:
    """One shard, and the rows that are its to store."""

    connection: Connection
    outbox: Outbox
    inserters: list[Inserter] = field(default_factory=list)

    @property
    def waiting(self) -> str | None:
        """What the service holds rows back for, if it does."""
        return self.inserters[0].waiting if self.inserters else None

    def forgotten_writers(self, target: StreamTarget) -> int | None:
        """What was heard last of the writers that a buffer has forgotten; None of one that is new here."""
        if not self.inserters or self.inserters[0].buffer_id != target.member.buffer_id:
            return None
        return self.inserters[0].forgotten_writers

    def resume(self, committed_seq: int, target: StreamTarget) -> None:
        """Begins a stream to a service that has committed everything up to a number."""
        lost = self.outbox.resume(committed_seq, buffer_id=target.member.buffer_id)
        if lost:
            self.connection.lost(
                f"the replay service at {target.address} came back without the latest {lost} transitions of "
                f"this agent that it had acknowledged, as after a power loss; going on from what it has"
            )


def kept_rows(rows: int, row_bytes: int) -> int:
    """How many rows may be kept: as many as asked for, or as `KEPT_BYTES` take."""
    return max(1, min(rows, KEPT_BYTES // row_bytes))
