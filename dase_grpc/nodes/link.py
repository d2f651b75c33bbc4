"""A learner's link to the replay: the compute thread stores rows and takes batches, streams carry them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np

from dase_grpc.learning.ports import Halted
from dase_grpc.nodes.connection import Connection, Stream
from dase_grpc.nodes.handoff import Handoff
from dase_grpc.nodes.outbox import Outbox
from dase_grpc.nodes.waits import Wait, Waited, WaitReason
from dase_grpc.schema import Array
from dase_grpc.wire.replay_client import WINDOW_ROWS, Inserter, Sampler, StreamTarget

QUEUED_ROWS: Final = 4_096
"""Rows that may wait for the Insert stream before `store` blocks."""

KEPT_BYTES: Final = 64 * 2**20
"""What the rows that wait, and those that are not acknowledged, may take each; wide rows are fewer."""


class ReplayLink:
    """The learner's sink and source over the network.

    `store` and `next` belong to the compute thread and block; everything else belongs to the event
    loop that made the link. Rows go out as soon as the stream takes them, so chunks grow with the
    rate. No batch is drawn before the first one is asked for, and at most `prefetch` are drawn
    ahead of their use.

    Both streams begin again when they break (connection.py). Rows are kept until they are acknowledged
    and sent again where need be, so each is stored exactly once. While the replay is away, or came back
    with too little to draw from, `next` gives no batch, so that the learner explores on, for as long as
    the queue of `store` has room. After `hold_batches` no batch is drawn either before the next is asked for.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        batch_size: int,
        prefetch: int,
        writer_id: str,
        own_rows_only: bool = False,
        count_acknowledged: Callable[[int], None] = lambda rows: None,
    ) -> None:
        row_bytes = connection.target.schema.row_bytes
        self._connection = connection
        self._batch_size = batch_size
        self._prefetch = prefetch
        self._writer_id = writer_id
        self._own_rows_only = own_rows_only
        self._window = kept_rows(WINDOW_ROWS, row_bytes)
        self._loop = asyncio.get_running_loop()
        self._rows_moved = asyncio.Event()
        self._batches_moved = asyncio.Event()
        self._rows: Handoff[Array] = Handoff(
            kept_rows(QUEUED_ROWS, row_bytes), on_change=self._signal(self._rows_moved)
        )
        self._batches: Handoff[tuple[Array, int]] = Handoff(
            prefetch, on_change=self._signal(self._batches_moved)
        )
        self._asked = asyncio.Event()
        self._outbox = Outbox(count=count_acknowledged)
        self._sampler: Sampler | None = None
        self._stored = 0
        self._delivered = 0
        self._no_batch = Waited()
        self._no_room = Waited()
        self._no_more_rows = False
        self._held = False

    def store(self, row: Array) -> None:
        """Queues one transition; blocks while the stream is far behind."""
        self._stored += 1
        if self._rows.full:
            self._no_room.begin()
        try:
            self._rows.put(row)
        finally:
            self._no_room.end()

    def next(self) -> tuple[Array, int] | None:
        """The next batch; blocks until it is there, or gives None if it is better to explore meanwhile."""
        self._held = False
        if not self._asked.is_set():
            self._loop.call_soon_threadsafe(self._asked.set)
        self._no_batch.begin()
        batch = self._batches.get(unless=self._explore_on)
        if batch is not None or self._held:
            self._no_batch.end()
        return batch

    @property
    def prefetched(self) -> int:
        """Batches that are here and not used yet."""
        return len(self._batches)

    @property
    def unacknowledged(self) -> int:
        """Transitions that `store` was called with and whose commit is not acknowledged."""
        return self._stored - self._outbox.acknowledged

    @property
    def wait(self) -> Wait | None:
        """What the compute thread has been without since more than `SAY_AFTER_S`, if it has."""
        waited = self._no_room if self._no_room.long else self._no_batch
        if not waited.long:
            return None
        outage, address = self._connection.outage, self._connection.target.address
        if outage is not None:
            exploring = not self._rows.full
            text = (
                f"waiting for the replay service at {address}, which {outage}; {self.unacknowledged} "
                f"transitions are kept for it, {'exploring on meanwhile' if exploring else 'no more fit'}"
            )
            return Wait(waited, WaitReason(outage.why.value), text, exploring=exploring)
        if waited is self._no_room:
            return Wait(waited, WaitReason.COMMIT, "waiting for the replay service to commit transitions")
        if self._sampler is not None and self._sampler.waiting is not None:
            return Wait(waited, WaitReason.WARM_UP, self._sampler.waiting, exploring=self._explore_on())
        return Wait(waited, WaitReason.BATCH, "waiting for the replay service to send a batch")

    def hold_batches(self) -> None:
        """Lets a wait for a batch end without one; draws none before `next` is called again.

        On the event loop; a Sample stream that is open already goes on.
        """
        self._asked.clear()
        self._held = True

    def stop_batches(self) -> None:
        """Ends the compute thread's waits for batches."""
        self._batches.close()

    def close(self) -> None:
        """Ends every wait of the compute thread, for good."""
        self._batches.close()
        self._rows.close()

    def no_more_rows(self) -> None:
        """Lets `insert_rows` end once all queued rows are acknowledged."""
        self._no_more_rows = True
        self._rows_moved.set()

    async def insert_rows(self) -> None:
        """Sends queued rows; returns after `no_more_rows`, when the last is acknowledged."""
        await self._connection.keep(Stream.INSERT, self._insert)

    async def fetch_batches(self) -> None:
        """Keeps up to `prefetch` batches drawn ahead, from the first one asked for.

        Runs until cancelled; after `stop_batches` until one more batch has come.
        """
        await self._connection.keep(Stream.SAMPLE, self._fetch)

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

    async def _fetch(self, target: StreamTarget) -> None:
        sampler = Sampler(target, batch_size=self._batch_size, own_rows_only=self._own_rows_only)
        self._sampler = sampler
        try:
            await sampler.open(credits=0)
            self._connection.up(Stream.SAMPLE)
            await self._asked.wait()
            async with asyncio.TaskGroup() as tasks:
                granting = tasks.create_task(self._grant(sampler))
                with suppress(Halted):
                    while True:
                        batch = await sampler.next()
                        self._delivered += 1
                        self._batches.put((batch.rows, batch.buffer_size))
                granting.cancel()
        finally:
            sampler.cancel()

    def _explore_on(self) -> bool:
        """Whether the compute thread, which finds no batch, had better explore than wait for one."""
        if self._held:
            return True
        if self._rows.full:
            return False
        shrunk = self._delivered or self._connection.losses
        short = self._sampler is not None and self._sampler.waiting is not None
        return bool(shrunk and short) or self._connection.away is not None

    def _signal(self, event: asyncio.Event) -> Callable[[], None]:
        """Sets an event of this loop from any thread."""

        def signal() -> None:
            self._loop.call_soon_threadsafe(event.set)

        return signal

    async def _grant(self, sampler: Sampler) -> None:
        granted = self._delivered
        while True:
            taken = self._delivered - len(self._batches)
            due = taken + self._prefetch - granted
            if due:
                await sampler.grant(due)
                granted += due
            self._batches_moved.clear()
            if self._delivered - len(self._batches) == taken:
                await self._batches_moved.wait()


def kept_rows(rows: int, row_bytes: int) -> int:
    """How many rows may be kept: as many as asked for, or as `KEPT_BYTES` take."""
    return max(1, min(rows, KEPT_BYTES // row_bytes))
