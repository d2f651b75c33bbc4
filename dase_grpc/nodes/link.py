"""A learner's link to the replay: the compute thread stores rows and takes batches, streams carry them."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np

from dase_grpc.learning.ports import Halted
from dase_grpc.nodes.handoff import Handoff
from dase_grpc.schema import Array
from dase_grpc.wire.replay_client import Inserter, Sampler, StreamTarget

QUEUED_ROWS: Final = 4_096
"""Rows that may wait for the Insert stream before `store` blocks."""

SAY_AFTER_S: Final = 5.0
"""A wait for a batch that lasts longer is said in the log, once."""

log = logging.getLogger("dase")


class ReplayLink:
    """The learner's sink and source over the network.

    `store` and `next` belong to the compute thread and block; everything else belongs to the event
    loop that made the link. Rows go out as soon as the stream takes them, so chunks grow with the
    rate. No batch is drawn before the first one is asked for, and at most `prefetch` are drawn
    ahead of their use.
    """

    def __init__(
        self,
        target: StreamTarget,
        *,
        batch_size: int,
        prefetch: int,
        writer_id: str,
        own_rows_only: bool = False,
    ) -> None:
        self._rows_moved = asyncio.Event()
        self._batches_moved = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._rows: Handoff[Array] = Handoff(QUEUED_ROWS, on_change=self._signal(self._rows_moved))
        self._batches: Handoff[tuple[Array, int]] = Handoff(
            prefetch, on_change=self._signal(self._batches_moved)
        )
        self._prefetch = prefetch
        self._asked = asyncio.Event()
        self._stored = 0
        self._delivered = 0
        self._waiting_since: float | None = None
        self._no_more_rows = False
        self._inserter = Inserter(target, writer_id=writer_id)
        self._sampler = Sampler(target, batch_size=batch_size, own_rows_only=own_rows_only)

    def store(self, row: Array) -> None:
        """Queues one transition; blocks while the stream is far behind."""
        self._stored += 1
        self._rows.put(row)

    def next(self) -> tuple[Array, int]:
        """The next batch; blocks until it is there."""
        if not self._asked.is_set():
            self._loop.call_soon_threadsafe(self._asked.set)
        self._waiting_since = time.monotonic()
        try:
            return self._batches.get()
        finally:
            self._waiting_since = None

    @property
    def unacknowledged(self) -> int:
        """Transitions that `store` was called with and whose commit is not acknowledged."""
        return self._stored - self._inserter.acknowledged_rows

    @property
    def waiting(self) -> str | None:
        """What the compute thread has been waiting for since more than `SAY_AFTER_S`, if it has."""
        since = self._waiting_since
        if since is None or time.monotonic() - since < SAY_AFTER_S:
            return None
        return self._sampler.waiting or "waiting for the replay service to send a batch"

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
        await self._inserter.open()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._inserter.receive())
            while True:
                self._rows_moved.clear()
                rows = self._rows.take_all()
                if rows:
                    await self._inserter.append(np.stack(rows))
                elif self._no_more_rows:
                    break
                else:
                    await self._rows_moved.wait()
            await self._inserter.finish()

    async def fetch_batches(self) -> None:
        """Keeps up to `prefetch` batches drawn ahead, from the first one asked for.

        Runs until cancelled; after `stop_batches` until one more batch has come.
        """
        await self._sampler.open(credits=0)
        await self._asked.wait()
        async with asyncio.TaskGroup() as tasks:
            granting = tasks.create_task(self._grant())
            with suppress(Halted):
                while True:
                    batch = await self._sampler.next()
                    self._delivered += 1
                    self._batches.put((batch.rows, batch.buffer_size))
            granting.cancel()

    async def say_waits(self) -> None:
        """Logs each long wait for a batch, once, with its reason; runs until cancelled."""
        said = False
        while True:
            reason = self.waiting
            if reason is not None and not said:
                log.info("%s", reason)
            said = reason is not None
            await asyncio.sleep(1.0)

    def _signal(self, event: asyncio.Event) -> Callable[[], None]:
        """Sets an event of this loop from any thread."""

        def signal() -> None:
            self._loop.call_soon_threadsafe(event.set)

        return signal

    async def _grant(self) -> None:
        granted = 0
        while True:
            taken = self._delivered - len(self._batches)
            due = taken + self._prefetch - granted
            if due:
                await self._sampler.grant(due)
                granted += due
            self._batches_moved.clear()
            if self._delivered - len(self._batches) == taken:
                await self._batches_moved.wait()
