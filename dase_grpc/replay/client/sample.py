"""Batches in from the replay: one Sample stream with bounded memory, and the queue that it fills ahead."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Self

import numpy as np

from dase_grpc.errors import DaseError, Halted
from dase_grpc.pace import Pace
from dase_grpc.replay.buffer.sampling import UNIFORM, Sampling
from dase_grpc.replay.client.cluster import UNARY_TIMEOUT_S, StreamTarget
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.handoff import USUAL, Handoff, Times
from dase_grpc.replay.client.priorities import Drawing, Prioritised, Told, prioritisation_message, taken
from dase_grpc.replay.client.ring_reader import Portion, RingReader, found_ring, portions
from dase_grpc.replay.client.streams import OneStream, opened_in_time
from dase_grpc.replay.wire.packed import NUMBER_BYTES, Frame, Waiting, joined
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.schema import Array


@dataclass(frozen=True)
class SampledBatch:
    """(B, width) packed rows, read-only, how many rows the buffer held, and of how many they were drawn.

    `drawing` says how, where that was by priorities. One that is `overwritten` was to be read in place, and
    has no rows.
    """

    rows: Array
    buffer_size: int
    drawn_from: int
    drawing: Drawing | None = None
    overwritten: bool = False


@dataclass(frozen=True)
class Pacing:
    """A pace, how many batches updates have taken since it began, and how many are here and will be."""

    pace: Pace
    used: int
    held: int

    def message(self) -> replay_pb2.Pace:
        """What a Sample stream states of it."""
        return replay_pb2.Pace(
            updates_per_step=self.pace.updates_per_step,
            step_error_buffer=self.pace.step_error_buffer,
            first_steps=self.pace.first_steps,
            collected_before=self.pace.collected_before,
            used=self.used,
            held=self.held,
        )


class Sampler(OneStream):
    """One Sample stream: batches arrive ahead of their use, at most as many as were granted.

    All methods raise the refusals of errors.py when the stream breaks, and DaseError when the service
    sends more than was granted or another size of batch. As many as `batches_per_frame` that were granted at
    once may come, and be drawn, together.

    With `in_place` the service is asked for its ring, and rows are read from there if it is on this machine.
    A batch whose rows had been overwritten then is said to be, and has to be asked for again.

    Attributes:
        waiting: what the service waits for, in a sentence; None if for nothing.
        ring: what rows are read from; None while they come over the stream.
    """

    def __init__(
        self,
        target: StreamTarget,
        *,
        batch_size: int,
        sampling: Sampling = UNIFORM,
        batches_per_frame: int = 1,
        in_place: bool = False,
    ) -> None:
        self._target = target
        self._in_place = in_place
        self._batch_size = batch_size
        self._sampling = sampling
        self._batches_per_frame = batches_per_frame
        self._owed: deque[tuple[int, int]] = deque()  # how many rows, at least and at most, come next
        self._here: deque[SampledBatch] = deque()
        self._to_read: deque[Portion] = deque()
        self.waiting: str | None = None
        self.ring: RingReader | None = None

    async def open(self, *, credits: int, pacing: Pacing | None = None) -> Self:
        """Starts the stream and grants the first credits; with a pace, batches come at that."""
        header = replay_pb2.SampleHeader(
            stream=self._target.header(),
            batch_size=self._batch_size,
            own_rows_only=self._sampling.own_rows_only,
            own_share=self._sampling.own_share,
            prioritisation=prioritisation_message(self._sampling),
            batches_per_frame=self._batches_per_frame,
            pace=None if pacing is None else pacing.message(),
            in_place=self._in_place,
        )
        self._stream = stream = self._target.sample_stream()
        async with opened_in_time(stream, self._target.address, UNARY_TIMEOUT_S):
            await stream.write(replay_pb2.SampleRequest(header=header, credits=credits))
            await stream.connected()
        self._owed.extend([(self._batch_size, self._batch_size)] * credits)
        return self

    async def grant(self, credits: int, *, used: int = 0, again: int = 0) -> None:
        """Lets the service send this many more batches; with a pace, `used` were taken since the last.

        `again` were overwritten: as many more come with their rows.
        """
        self._owed.extend([(self._batch_size, self._batch_size)] * (credits + again))
        found = self.ring is not None
        await self._opened.write(
            replay_pb2.SampleRequest(credits=credits, used=used, in_place=found, again=again)
        )

    async def ask(self, sizes: Sequence[int], *, own_rows: Sequence[int] = ()) -> None:
        """Has the service send a batch of each of these sizes, an empty one where it has nothing.

        With an own share `own_rows` says how many of each are the agent's own.
        """
        self._owed.extend((0, size) for size in sizes)
        found = self.ring is not None
        await self._opened.write(replay_pb2.SampleRequest(rows=sizes, own_rows=own_rows, in_place=found))

    async def tell(self, told: Told) -> None:
        """Gives the service the TD errors that are there."""
        for portion in taken(told):
            await self._opened.write(replay_pb2.SampleRequest(priorities=portion))

    async def next(self) -> SampledBatch:
        """The next batch; while it is not there, `waiting` says what the service waits for."""
        while not self._here:
            if self._to_read:
                self._read(self._to_read.popleft())
            else:
                await self._receive()
        return self._here.popleft()

    async def _receive(self) -> None:
        """Takes the frames of the next batch, or the frame of several."""
        pieces, received = list[Frame](), 0
        while not pieces or not pieces[-1].last:
            answer = await self._opened.read()
            if isinstance(answer, Waiting):
                self.waiting = answer.reason
                continue
            if isinstance(answer, replay_pb2.Ring):
                self.ring = found_ring(answer, self._target.schema, address=self._target.address)
                continue
            self.waiting = None
            pieces.append(answer)
            received += len(answer.rows) + len(answer.numbers) // NUMBER_BYTES * self._target.schema.row_bytes
            if not (self._batches_in(received) if answer.last else self._may_go_on(received)):
                raise DaseError(f"the replay service at {self._target.address} sent what was not asked for")
        batches, told = self._batches_in(received), pieces[-1]
        if told.numbers:
            self._to_read.extend(portions(told, batches, row_bytes=self._target.schema.row_bytes))
            return
        rows = np.frombuffer(joined(pieces), np.float32).reshape(-1, self._target.schema.width)
        self._take(rows, batches, told, slice(None))

    def _take(self, rows: Array, batches: int, told: Frame, which: slice) -> None:
        """Takes whole batches, which are these rows of a frame."""
        drawing, size = self._drawn(rows, told, which), len(rows) // batches
        for number in range(batches):
            self._owed.popleft()
            its = slice(number * size, (number + 1) * size)
            part = None if drawing is None else drawing.part(its)
            self._here.append(SampledBatch(rows[its], told.buffer_size, told.drawn_from, part))

    def _read(self, portion: Portion) -> None:
        """Reads batches in place; those of a portion of which a row had been overwritten have no rows."""
        if self.ring is None:
            raise DaseError(f"the replay service at {self._target.address} sent what was not asked for")
        rows, told = self.ring.gather(portion.numbers), portion.frame
        if rows is not None:
            rows.flags.writeable = False
            self._take(rows, portion.batches, told, portion.which)
            return
        nothing = self._target.schema.empty(0)
        for _ in range(portion.batches):
            self._owed.popleft()
            self._here.append(SampledBatch(nothing, told.buffer_size, told.drawn_from, overwritten=True))

    def _drawn(self, rows: Array, told: Frame, which: slice) -> Drawing | None:
        """How these rows of a frame were drawn by priorities; checks that it was as the stream asked for."""
        sampling, target = self._sampling, self._target
        if not len(rows) or (sampling.own_share is None and sampling.prioritisation is None):
            return None
        drawing = None if told.drawing is None else Drawing.read(told.drawing).part(which)
        as_asked = drawing is not None and drawing.fits(len(rows), 1 if sampling.own_share is None else 2)
        if sampling.prioritisation is None:  # then `drawn_from` counts the agent's own
            own = target.schema.agent_ids(rows) == target.member.agent_id
            as_asked = told.drawn_from < told.buffer_size or bool(own.all())
        if not as_asked:
            raise DaseError(
                f"the replay service at {target.address} does not draw by own_share or priorities as the "
                f"stream asks for; it is older than this node: update it"
            )
        return drawing

    def _batches_in(self, received: int) -> int:
        """How many of the batches that come next these bytes are; 0 if they are not whole ones."""
        if not self._owed:
            return 0
        row_bytes = self._target.schema.row_bytes
        if received in {size * row_bytes for size in self._owed[0]}:
            return 1
        batches, rest = divmod(received, self._batch_size * row_bytes)
        next_ones = list(islice(self._owed, batches)) if batches <= self._batches_per_frame else []
        of_full_size = next_ones == [(self._batch_size, self._batch_size)] * batches
        return batches if of_full_size and not rest else 0

    def _may_go_on(self, received: int) -> bool:
        return bool(self._owed) and received <= self._owed[0][1] * self._target.schema.row_bytes


class BatchQueue:
    """Batches that are here, and how many may be on their way.

    `next` belongs to the compute thread and blocks; everything else belongs to the event loop that made
    the queue. None is asked for before the first `next`, and at most `prefetch` ahead of their use; a
    `portion`, half of that or one, is worth a message. `asked` is set once the compute thread has asked
    for a batch, until `hold`: then it had better not wait, and is `held` until it asks again. `moved` is
    set when there is room for a portion.
    """

    def __init__(self, prefetch: int, *, one_by_one: bool = False, timing: Times = USUAL) -> None:
        self._loop = asyncio.get_running_loop()
        self.asked = asyncio.Event()
        self.moved = asyncio.Event()
        self.delivered = 0
        self.held = False
        self.portion = 1 if one_by_one else max(1, prefetch // 2)
        self._prefetch = prefetch
        self._batches: Handoff[tuple[Array, int, Prioritised | None]] = Handoff(
            prefetch, on_change=self._tell, wake_s=timing.wake_s
        )

    def __len__(self) -> int:
        """Batches that are here and not used yet."""
        return len(self._batches)

    def next(self, *, unless: Callable[[], bool]) -> tuple[Array, int, Prioritised | None] | None:
        """The next batch, see `put`; blocks until it is there, or gives None as soon as `unless` holds."""
        self.held = False
        self.ask()
        return self._batches.get(unless=unless)

    def ask(self) -> None:
        """Has batches drawn from now on; on the compute thread."""
        if not self.asked.is_set():
            self._loop.call_soon_threadsafe(self.asked.set)

    def put(self, rows: Array, buffer_size: int, prioritised: Prioritised | None = None) -> None:
        """Adds a batch; never blocks, for no more are asked for than there is room. Halted if closed."""
        self.delivered += 1
        self._batches.put((rows, buffer_size, prioritised))

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


@dataclass
class OneFetcher:
    """Fills a BatchQueue over one Sample stream, which begins again when it breaks (connection.py).

    With `pacing`, which is asked when a stream begins (collected.py), batches come at an agent's pace; the
    queue is a `one_by_one` then, for the service waits to hear which are used. With `in_place` rows are read
    from the replay's own ring where that can be.

    Attributes:
        overwritten: batches that were drawn again, because rows read in place had been overwritten.
    """

    connection: Connection
    queue: BatchQueue
    batch_size: int
    sampling: Sampling
    pacing: Callable[[int, int], Pacing] | None
    in_place: bool = False
    overwritten: int = 0
    _sampler: Sampler | None = None
    _again: int = 0  # batches that were overwritten and are not asked for again yet
    _told: Told = field(default_factory=deque)

    @property
    def waiting(self) -> str | None:
        """What the service waits for before it sends a batch, in a sentence; None if nothing is missing."""
        return None if self._sampler is None else self._sampler.waiting

    @property
    def reads_in_place(self) -> bool:
        """Whether rows are read from the replay's own ring now."""
        return self._sampler is not None and self._sampler.ring is not None

    async def run(self) -> None:
        """Keeps batches drawn ahead, from the first one asked for; after a close until one more has come."""
        await self.connection.keep(Stream.SAMPLE, self._fetch)

    async def _fetch(self, target: StreamTarget) -> None:
        sampler = Sampler(
            target,
            batch_size=self.batch_size,
            sampling=self.sampling,
            batches_per_frame=self.queue.portion,
            in_place=self.in_place,
        )
        self._again = 0
        self._sampler = sampler
        try:
            used = self.queue.taken
            pacing = self.pacing and self.pacing(used, self.queue.delivered - used)
            await sampler.open(credits=0, pacing=pacing)
            self.connection.up(Stream.SAMPLE)
            await self.queue.asked.wait()
            async with asyncio.TaskGroup() as tasks:
                granting = tasks.create_task(self._grant(sampler, used))
                with suppress(Halted):
                    while True:
                        batch, prioritised = await sampler.next(), None
                        if batch.overwritten:
                            self.overwritten += 1
                            self._again += 1
                            self.queue.moved.set()
                            continue
                        if batch.drawing is not None:
                            own = target.schema.agent_ids(batch.rows) == target.member.agent_id
                            likelihood = batch.drawing.likelihood(own)
                            drawn, ignored = [(batch.drawing, self._told)], batch.drawing.ignored
                            prioritised = Prioritised.of(drawn, likelihood, ignored=ignored)
                        self.queue.put(batch.rows, batch.buffer_size, prioritised)
                granting.cancel()
        finally:
            sampler.cancel()

    async def _grant(self, sampler: Sampler, told: int) -> None:
        queue = self.queue
        granted = queue.delivered
        while True:
            due = queue.due(granted)
            if due < queue.portion:
                due = 0
            if due or self._again:
                again, self._again = self._again, 0
                now = queue.taken  # read once: the compute thread may take another batch at any time
                used = now - told if self.pacing else 0
                told = now
                await sampler.tell(self._told)
                await sampler.grant(due, used=used, again=again)
                granted += due
            queue.moved.clear()
            if queue.due(granted) < queue.portion and not self._again:
                await queue.moved.wait()
