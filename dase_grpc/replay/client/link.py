"""Links: the rows that a compute thread stores and the batches it takes, on streams to all shards."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from dase_grpc.process.tasks import first_cause
from dase_grpc.progress import several
from dase_grpc.replay.buffer.sampling import UNIFORM, Sampling
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.collected import CollectedSteps
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.handoff import Handoff, Wait, Waited, WaitReason
from dase_grpc.replay.client.insert import WINDOW_ROWS, Inserter, Outbox
from dase_grpc.replay.client.priorities import Prioritised
from dase_grpc.replay.client.sample import BatchQueue, OneFetcher
from dase_grpc.replay.client.sharded_sample import ShardedFetcher
from dase_grpc.replay.client.shards import Shards
from dase_grpc.schema import Array

QUEUED_ROWS: Final = 4_096
"""Rows that may wait for an Insert stream before `store` blocks."""

GATHERED_ROWS: Final = 256
"""As many rows go out at once."""

KEPT_BYTES: Final = 64 * 2**20
"""What the rows that wait, and those that are not acknowledged, may take each; wide rows are fewer."""


class RowLink:
    """A node's sink over the network.

    `store` belongs to the compute thread and blocks; everything else belongs to the event loop that made
    the link. Rows go out when there are `GATHERED_ROWS` or a stream has waited for `Times.gather_s`, and as
    soon as one takes them where updates wait for them: `paced`.

    Shards take turns, chunk by chunk; one that is away, or that has a whole window of rows to acknowledge,
    is passed over. A row that a shard was given stays with it: it is kept until that shard has
    acknowledged it, and sent to it again where need be, so each is stored exactly once.
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
        self._timing = shards.first.timing
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
        self.stored = 0
        self._no_more = False
        self._no_room = Waited(self._timing)

    def store(self, row: Array) -> None:
        """Queues one transition; blocks while the streams are far behind."""
        self.stored += 1  # before it can be acknowledged
        if self._rows.full:
            self._no_room.begin()
        added = self._rows.added
        try:
            self._rows.put(row)
        except KeyboardInterrupt:  # while it waited, as a rule: the caller knows that this row is not stored
            self.stored -= self._rows.added == added
            raise
        finally:
            self._no_room.end()

    @property
    def acknowledged(self) -> int:
        """Transitions whose commit is acknowledged."""
        return sum(lane.outbox.acknowledged for lane in self._lanes)

    @property
    def unacknowledged(self) -> int:
        """Transitions `stored` whose commit is not acknowledged."""
        return self.stored - self.acknowledged

    @property
    def wait(self) -> Wait | None:
        """What the compute thread has been without for long, if it has."""
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
        self._no_more = True
        self._shards.note_ending()
        self._moved.set()

    async def insert_rows(self) -> None:
        """Sends queued rows; returns after `no_more_rows`, when the last is acknowledged."""
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
        lane.inserter = inserter
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
                async with asyncio.timeout(self._timing.gather_s):
                    await self._until_there_are(self._enough)
            if len(self._rows):
                return
            await self._until_there_are(1)

    async def _until_there_are(self, rows: int) -> None:
        self._wanted = rows
        while len(self._rows) < rows and not self._no_more:
            self._moved.clear()
            await self._moved.wait()

    def _tell(self) -> None:
        """Wakes the event loop for as many rows as it waits for: each time costs the compute thread time."""
        if len(self._rows) >= self._wanted:
            self._loop.call_soon_threadsafe(self._moved.set)

    def _away(self, waited: Waited) -> Wait | None:
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
        return self._no_more and len(self._lanes) > 1 and not len(self._rows) and not len(lane.outbox)


@dataclass
class _Lane:
    """One shard, and the rows that are its to store."""

    connection: Connection
    outbox: Outbox
    inserter: Inserter | None = None

    @property
    def waiting(self) -> str | None:
        """What the service holds rows back for, if it does."""
        return None if self.inserter is None else self.inserter.waiting

    def forgotten_writers(self, target: StreamTarget) -> int | None:
        """What was heard last of the writers that a buffer has forgotten; None of one that is new here."""
        if self.inserter is None or self.inserter.buffer_id != target.member.buffer_id:
            return None
        return self.inserter.forgotten_writers

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


class ReplayLink(RowLink):
    """A learner's sink and source over the network.

    `next` belongs to the compute thread and blocks, as `store` does. No batch is drawn before the first
    one is asked for, and at most `prefetch` are drawn ahead of their use (sample.py). While the replay is
    away, or came back with too little to draw from, `next` gives no batch, so that the learner explores on,
    for as long as the queue of `store` has room. After `hold_batches` no batch is drawn either before the
    next is asked for. With `explores_first` it gives none while the buffer holds too little for a first one,
    either. With `collected` the agent's actors explore: batches come at the pace of their steps, and `next`
    waits for them in any case. `rng` splits batches over shards. With `in_place` a learner on the replay's
    machine reads rows from its ring (ring_reader.py).

    Attributes:
        prioritised: how the last batch that `next` gave was drawn, if by priorities; the compute thread's.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        batch_size: int,
        prefetch: int,
        writer_id: str,
        sampling: Sampling = UNIFORM,
        rng: np.random.Generator | None = None,
        collected: CollectedSteps | None = None,
        explores_first: bool = False,
        in_place: bool = False,
        count_acknowledged: Callable[[int], None] = lambda rows: None,
    ) -> None:
        super().__init__(shards, writer_id=writer_id, count_acknowledged=count_acknowledged)
        self._batches = BatchQueue(prefetch, one_by_one=collected is not None, timing=self._timing)
        self._collected = collected
        self._explores_first = explores_first
        if collected is not None:
            collected.on_wait = self._batches.ask
        self._fetcher: OneFetcher | ShardedFetcher
        if len(shards.connections) == 1:
            pacing = None if collected is None else collected.pacing
            self._fetcher = OneFetcher(
                shards.first, self._batches, batch_size, sampling, pacing, in_place=in_place
            )
        else:
            self._fetcher = ShardedFetcher(
                shards,
                self._batches,
                batch_size=batch_size,
                sampling=sampling,
                rng=rng or np.random.default_rng(),
                in_place=in_place,
            )
        self._no_batch = Waited(self._timing)
        self.prioritised: Prioritised | None = None

    def next(self) -> tuple[Array, int] | None:
        """The next batch; blocks until it is there, or gives None if it is better to explore meanwhile."""
        self._no_batch.begin()
        batch = self._batches.next(unless=self._explore_on)
        if batch is not None or self._batches.held:
            self._no_batch.end()
        if batch is None:
            return None
        rows, buffer_size, self.prioritised = batch
        return rows, buffer_size

    def begin_anew(self) -> None:
        """`hold_batches`, and counts the steps of the agent's actors from now on."""
        self.hold_batches()
        if self._collected is not None:
            self._collected.begin_anew(self._batches.taken)

    @property
    def prefetched(self) -> int:
        """Batches that are here and not used yet."""
        return len(self._batches)

    @property
    def reads_in_place(self) -> bool:
        """Whether rows are read from the replay's own ring, on this machine, and not from the stream."""
        return self._fetcher.reads_in_place

    @property
    def overwritten(self) -> int:
        """How many draws found rows overwritten when they were read in place, and were made again."""
        return self._fetcher.overwritten

    @property
    def starved(self) -> bool:
        """Whether the compute thread waits for what its actors are to collect."""
        return self._collected is not None and (self._collected.waiting or self._no_batch.since is not None)

    @property
    def wait(self) -> Wait | None:
        """See RowLink."""
        waited = self._no_batch
        if self._collected is not None and self._collected.missing.long:
            waited = self._collected.missing
        if self._no_room.long or not waited.long:
            return super().wait
        if (away := self._away(waited)) is not None:
            return away
        if (waiting := self._fetcher.waiting) is not None:
            reason = WaitReason.WARM_UP if self._collected is None else WaitReason.STEPS
            return Wait(waited, reason, waiting, exploring=self._explore_on())
        return Wait(waited, WaitReason.BATCH, "waiting for the replay service to send a batch")

    def hold_batches(self) -> None:
        """Lets a wait for a batch end without one; on new streams none is drawn before the next `next`."""
        self._batches.hold()

    def stop_batches(self) -> None:
        """Ends the compute thread's waits for batches, and for what its actors collect."""
        self._batches.close()
        if self._collected is not None:
            self._collected.close()

    def close(self) -> None:
        """See RowLink."""
        self.stop_batches()
        super().close()

    async def fetch_batches(self) -> None:
        """Keeps batches drawn ahead, until cancelled; after `stop_batches` until one more has come."""
        await self._fetcher.run()

    def _explore_on(self) -> bool:
        """Whether the compute thread, which finds no batch, had better explore than wait for one."""
        if self._batches.held:
            return True
        if self._rows.full or self._collected is not None:
            return False
        shrunk = self._explores_first or self._batches.delivered or self._shards.losses
        short = self._fetcher.waiting is not None
        return bool(shrunk and short) or self._shards.away is not None
