"""A learner's link to the replay: beside its rows (rows.py), the batches that the compute thread takes."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from dase_grpc.learning.ports import Halted
from dase_grpc.nodes.connection import Connection, Stream
from dase_grpc.nodes.handoff import Handoff
from dase_grpc.nodes.rows import RowLink
from dase_grpc.nodes.waits import Wait, Waited, WaitReason
from dase_grpc.schema import Array
from dase_grpc.wire.replay_client import Sampler, StreamTarget


class ReplayLink(RowLink):
    """The learner's sink and source over the network.

    `next` belongs to the compute thread and blocks, as `store` does. No batch is drawn before the first
    one is asked for, and at most `prefetch` are drawn ahead of their use; the Sample stream begins again
    when it breaks, too. While the replay is away, or came back with too little to draw from, `next` gives
    no batch, so that the learner explores on, for as long as the queue of `store` has room. After
    `hold_batches` no batch is drawn either before the next is asked for.
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
        super().__init__(connection, writer_id=writer_id, count_acknowledged=count_acknowledged)
        self._batch_size = batch_size
        self._prefetch = prefetch
        self._own_rows_only = own_rows_only
        self._batches_moved = asyncio.Event()
        self._batches: Handoff[tuple[Array, int]] = Handoff(
            prefetch, on_change=self._signal(self._batches_moved)
        )
        self._asked = asyncio.Event()
        self._sampler: Sampler | None = None
        self._delivered = 0
        self._no_batch = Waited()
        self._held = False

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
    def wait(self) -> Wait | None:
        """What the compute thread has been without since more than `SAY_AFTER_S`, if it has."""
        waited = self._no_batch
        if self._no_room.long or not waited.long:
            return super().wait
        if (away := self._away(waited)) is not None:
            return away
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
        super().close()
        self._batches.close()

    async def fetch_batches(self) -> None:
        """Keeps up to `prefetch` batches drawn ahead, from the first one asked for.

        Runs until cancelled; after `stop_batches` until one more batch has come.
        """
        await self._connection.keep(Stream.SAMPLE, self._fetch)

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
