"""A node's rows on their way to the replay: the compute thread stores them, an Insert stream carries them."""

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np

from dase_grpc.nodes.connection import Connection, Stream
from dase_grpc.nodes.handoff import Handoff
from dase_grpc.nodes.outbox import Outbox
from dase_grpc.nodes.waits import Wait, Waited, WaitReason
from dase_grpc.schema import Array
from dase_grpc.wire.replay_client import WINDOW_ROWS, Inserter, StreamTarget

QUEUED_ROWS: Final = 4_096
"""Rows that may wait for the Insert stream before `store` blocks."""

KEPT_BYTES: Final = 64 * 2**20
"""What the rows that wait, and those that are not acknowledged, may take each; wide rows are fewer."""


class RowLink:
    """A node's sink over the network.

    `store` belongs to the compute thread and blocks; everything else belongs to the event loop that made
    the link. Rows go out as soon as the stream takes them, so chunks grow with the rate. The stream begins
    again when it breaks (connection.py). Rows are kept until they are acknowledged and sent again where
    need be, so each is stored exactly once.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        writer_id: str,
        count_acknowledged: Callable[[int], None] = lambda rows: None,
    ) -> None:
        row_bytes = connection.target.schema.row_bytes
        self._connection = connection
        self._writer_id = writer_id
        self._window = kept_rows(WINDOW_ROWS, row_bytes)
        self._loop = asyncio.get_running_loop()
        self._rows_moved = asyncio.Event()
        self._rows: Handoff[Array] = Handoff(
            kept_rows(QUEUED_ROWS, row_bytes), on_change=self._signal(self._rows_moved)
        )
        self._outbox = Outbox(count=count_acknowledged)
        self._stored = 0
        self._no_room = Waited()
        self._no_more_rows = False

    def store(self, row: Array) -> None:
        """Queues one transition; blocks while the stream is far behind."""
        self._stored += 1
        if self._rows.full:
            self._no_room.begin()
        try:
            self._rows.put(row)
        finally:
            self._no_room.end()

    @property
    def unacknowledged(self) -> int:
        """Transitions that `store` was called with and whose commit is not acknowledged."""
        return self._stored - self._outbox.acknowledged

    @property
    def wait(self) -> Wait | None:
        """What the compute thread has been without since more than `SAY_AFTER_S`, if it has."""
        if not self._no_room.long:
            return None
        away = self._away(self._no_room)
        return away or Wait(
            self._no_room, WaitReason.COMMIT, "waiting for the replay service to commit transitions"
        )

    def close(self) -> None:
        """Ends every wait of the compute thread, for good."""
        self._rows.close()

    def no_more_rows(self) -> None:
        """Lets `insert_rows` end once all queued rows are acknowledged."""
        self._no_more_rows = True
        self._rows_moved.set()

    async def insert_rows(self) -> None:
        """Sends queued rows; returns after `no_more_rows`, when the last is acknowledged."""
        await self._connection.keep(Stream.INSERT, self._insert)

    async def _insert(self, target: StreamTarget) -> None:
        inserter = Inserter(
            target,
            writer_id=self._writer_id,
            window=self._window,
            on_acknowledged=self._outbox.acknowledge,
        )
        try:
            await inserter.open()
            self._connection.up(Stream.INSERT)
            self._resume(inserter.sent_seq, target)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(inserter.receive())
                for block in self._outbox.blocks():
                    await inserter.append(block)
                while await self._rows_are_there():
                    rows = np.stack(self._rows.take_all())
                    self._outbox.add(rows)
                    await inserter.append(rows)
                await inserter.finish()
        finally:
            inserter.cancel()

    async def _rows_are_there(self) -> bool:
        """Waits for rows to send; False when none will come any more."""
        while not len(self._rows):
            if self._no_more_rows:
                return False
            self._rows_moved.clear()
            if not len(self._rows):
                await self._rows_moved.wait()
        return True

    def _resume(self, committed_seq: int, target: StreamTarget) -> None:
        lost = self._outbox.resume(committed_seq, buffer_id=target.member.buffer_id)
        if lost:
            self._connection.lost(
                f"the replay service at {target.address} came back without the latest {lost} transitions of "
                f"this agent that it had acknowledged, as after a power loss; going on from what it has"
            )

    def _away(self, waited: Waited) -> Wait | None:
        """The wait, if it is for a replay that is away."""
        outage, address = self._connection.outage, self._connection.target.address
        if outage is None:
            return None
        exploring = not self._rows.full
        text = (
            f"waiting for the replay service at {address}, which {outage}; {self.unacknowledged} "
            f"transitions are kept for it, {'exploring on meanwhile' if exploring else 'no more fit'}"
        )
        return Wait(waited, WaitReason(outage.why.value), text, exploring=exploring)

    def _signal(self, event: asyncio.Event) -> Callable[[], None]:
        """Sets an event of this loop from any thread."""

        def signal() -> None:
            self._loop.call_soon_threadsafe(event.set)

        return signal


def kept_rows(rows: int, row_bytes: int) -> int:
    """How many rows may be kept: as many as asked for, or as `KEPT_BYTES` take."""
    return max(1, min(rows, KEPT_BYTES // row_bytes))
