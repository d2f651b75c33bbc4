"""BatchQueue: a learner's batches; an event loop fetches them, the compute thread takes them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from dase_grpc.errors import Halted
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.handoff import Handoff
from dase_grpc.replay.client.sampler import Pacing, Sampler
from dase_grpc.schema import Array


class BatchQueue:
    """Batches that are here, and how many may be on their way.

    `next` belongs to the compute thread and blocks; everything else belongs to the event loop that made
    the queue. None is asked for before the first `next`, and at most `prefetch` ahead of their use.

    With `one_by_one` each that is taken is told at once, else a portion is.

    Attributes:
        portion: how many are worth a message: half of what may be ahead, or one.
        asked: set once the compute thread has asked for a batch, until `hold`.
        moved: set when batches arrived or were taken, and there is room for a portion.
        delivered: batches that arrived so far.
        held: the compute thread had better not wait, until it asks again.
    """

    def __init__(self, prefetch: int, *, one_by_one: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self.asked = asyncio.Event()
        self.moved = asyncio.Event()
        self.delivered = 0
        self.held = False
        self.portion = 1 if one_by_one else max(1, prefetch // 2)
        self._prefetch = prefetch
        self._batches: Handoff[tuple[Array, int]] = Handoff(prefetch, on_change=self._tell)

    def __len__(self) -> int:
        """Batches that are here and not used yet."""
        return len(self._batches)

    def next(self, *, unless: Callable[[], bool]) -> tuple[Array, int] | None:
        """The next batch; blocks until it is there, or gives None as soon as `unless` holds.

        Raises:
            Halted: the queue is closed.
        """
        self.held = False
        self.ask()
        return self._batches.get(unless=unless)

    def ask(self) -> None:
        """Has batches drawn from now on; on the compute thread."""
        if not self.asked.is_set():
            self._loop.call_soon_threadsafe(self.asked.set)

    def put(self, rows: Array, buffer_size: int) -> None:
        """Adds a batch; never blocks, for no more are asked for than there is room.

        Raises:
            Halted: the queue is closed.
        """
        self.delivered += 1
        self._batches.put((rows, buffer_size))

    @property
    def taken(self) -> int:
        """Batches that the compute thread has taken so far."""
        return self.delivered - len(self._batches)

    def due(self, granted: int) -> int:
        """How many batches to ask for, `granted` having been asked for so far."""
        return self.taken + self._prefetch - granted

    def hold(self) -> None:
        """Lets a wait for a batch end without one; none is asked for before `next` is called again."""
        self.asked.clear()
        self.held = True

    def close(self) -> None:
        """Ends the compute thread's waits, for good."""
        self._batches.close()

    def _tell(self) -> None:
        """Wakes the event loop where that is worth it: each time costs the compute thread time, too."""
        if len(self._batches) <= self._prefetch - self.portion:
            self._loop.call_soon_threadsafe(self.moved.set)


class BatchFetcher(Protocol):
    """Fills a BatchQueue from the replay, or from its shards."""

    @property
    def waiting(self) -> str | None:
        """What the service waits for before it sends a batch, in a sentence; None if nothing is missing."""
        ...

    async def run(self) -> None:
        """Keeps batches drawn ahead, from the first one asked for.

        Runs until cancelled; after the queue was closed until one more batch has come.
        """
        ...


class OneFetcher:
    """A BatchFetcher over one Sample stream, which begins again when it breaks (connection.py).

    Batches are asked for by the queue's portions, which may come in one message. With `pacing`, which is
    asked when a stream begins (collected.py), they come at an agent's pace; the queue is a `one_by_one` then,
    for the service waits to hear which are used.
    """

    def __init__(
        self,
        connection: Connection,
        queue: BatchQueue,
        *,
        batch_size: int,
        own_rows_only: bool,
        pacing: Callable[[int, int], Pacing] | None = None,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._pacing = pacing
        self._batch_size = batch_size
        self._own_rows_only = own_rows_only
        self._sampler: Sampler | None = None

    @property
    def waiting(self) -> str | None:
        """See BatchFetcher."""
        return None if self._sampler is None else self._sampler.waiting

    async def run(self) -> None:
        """See BatchFetcher."""
        await self._connection.keep(Stream.SAMPLE, self._fetch)

    async def _fetch(self, target: StreamTarget) -> None:
        sampler = Sampler(
            target,
            batch_size=self._batch_size,
            own_rows_only=self._own_rows_only,
            batches_per_frame=self._queue.portion,
        )
        self._sampler = sampler
        try:
            taken = self._queue.taken
            pacing = None if self._pacing is None else self._pacing(taken, self._queue.delivered - taken)
            await sampler.open(credits=0, pacing=pacing)
            self._connection.up(Stream.SAMPLE)
            await self._queue.asked.wait()
            async with asyncio.TaskGroup() as tasks:
                granting = tasks.create_task(self._grant(sampler, taken))
                with suppress(Halted):
                    while True:
                        batch = await sampler.next()
                        self._queue.put(batch.rows, batch.buffer_size)
                granting.cancel()
        finally:
            sampler.cancel()

    async def _grant(self, sampler: Sampler, told: int) -> None:
        queue = self._queue
        granted = queue.delivered
        while True:
            due = queue.due(granted)
            if due >= queue.portion:
                taken = queue.taken
                await sampler.grant(due, used=taken - told if self._pacing else 0)
                told = taken
                granted += due
            queue.moved.clear()
            if queue.due(granted) < queue.portion:
                await queue.moved.wait()
