"""ReplayService's client: an asyncio inserter and sampler with bounded memory."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, Self

import numpy as np
from grpc.aio import Channel

from dase_grpc.errors import DaseError
from dase_grpc.pace import Pace
from dase_grpc.replay.client.streams import ClientStream, opened_in_time
from dase_grpc.replay.service.cluster import UNARY_TIMEOUT_S, Membership
from dase_grpc.replay.wire.packed import ROWS_BYTES
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.schema import Array, TransitionSchema
from dase_grpc.wire.chunks import ChunkWriter, write_request
from dase_grpc.wire.frames import Frame, Waiting, joined, read_response

_SERVICE: Final = replay_pb2.DESCRIPTOR.services_by_name["ReplayService"].full_name
WINDOW_ROWS: Final = 8_192


@dataclass(frozen=True)
class StreamTarget:
    """What a stream connects to and what it states first."""

    channel: Channel
    address: str
    member: Membership
    schema: TransitionSchema

    def header(self) -> replay_pb2.StreamHeader:
        """The first thing that every stream says."""
        return replay_pb2.StreamHeader(
            run_id=self.member.run_id,
            agent_id=self.member.agent_id,
            lease_epoch=self.member.epoch,
            schema_fingerprint=self.schema.fingerprint,
            buffer_id=self.member.buffer_id,
        )

    def insert_stream(self) -> ClientStream:
        """A new Insert stream; waits for the connection when first written to."""
        call = self.channel.stream_stream(
            f"/{_SERVICE}/Insert",
            request_serializer=write_request,
            response_deserializer=replay_pb2.InsertResponse.FromString,
        )
        return ClientStream(call(wait_for_ready=True), self.address)

    def sample_stream(self) -> ClientStream:
        """A new Sample stream; waits for the connection when first written to."""
        call = self.channel.stream_stream(
            f"/{_SERVICE}/Sample",
            request_serializer=replay_pb2.SampleRequest.SerializeToString,
            response_deserializer=read_response,
        )
        return ClientStream(call(wait_for_ready=True), self.address)


class Inserter:
    """One Insert stream: sends rows, holds at most `window` of them unacknowledged.

    `receive` must run in a task that the caller owns, from `open` until `finish` has returned.
    All methods raise the refusals of errors.py when the stream breaks; then whatever
    `unacknowledged` counts may or may not be stored. `append` and `finish` wait as long as the
    service takes; a dead connection is ended by keepalive, a stuck service by the caller.
    `on_acknowledged` is called with each number up to which the service has committed. While the service
    holds rows back, `waiting` says what for. A `paced` writer's wait until the agent's learner says its pace.
    Whoever opens another stream for a writer states the `forgotten_writers` of the one before, so that it is
    refused if the service may have forgotten it.
    """

    def __init__(
        self,
        target: StreamTarget,
        *,
        writer_id: str,
        window: int = WINDOW_ROWS,
        on_acknowledged: Callable[[int], None] = lambda seq: None,
        paced: bool = False,
        forgotten_writers: int | None = None,
    ) -> None:
        self._paced = paced
        self.forgotten_writers = forgotten_writers
        self.waiting: str | None = None
        self._target = target
        self._writer_id = writer_id
        self._window = window
        self._on_acknowledged = on_acknowledged
        self._rows_per_chunk = max(1, min(ROWS_BYTES // target.schema.row_bytes, window))
        self._stream: ClientStream | None = None
        self._chunks = ChunkWriter()
        self._moved = asyncio.Event()
        self._broken: DaseError | None = None
        self._start_seq = 0
        self.sent_seq = 0
        self.acknowledged_seq = 0
        self.refused_rows = 0
        self.finished = False

    @property
    def buffer_id(self) -> str:
        """The buffer that is meant."""
        return self._target.member.buffer_id

    @property
    def unacknowledged(self) -> int:
        """Rows sent whose commit has not been acknowledged."""
        return self.sent_seq - self.acknowledged_seq

    @property
    def acknowledged_rows(self) -> int:
        """Rows of this stream whose commit has been acknowledged."""
        return self.acknowledged_seq - self._start_seq

    async def open(self) -> Self:
        """Starts the stream; the next row's number follows what the service has committed."""
        header = replay_pb2.InsertHeader(
            stream=self._target.header(),
            writer_id=self._writer_id,
            paced=self._paced,
            forgotten_writers=self.forgotten_writers,
        )
        self._stream = stream = self._target.insert_stream()
        async with opened_in_time(stream, self._target.address, UNARY_TIMEOUT_S):
            await stream.write(replay_pb2.InsertRequest(header=header))
            answer = await stream.read()
        self._start_seq = self.sent_seq = self.acknowledged_seq = answer.committed_seq
        self.forgotten_writers = answer.forgotten_writers
        return self

    async def append(self, rows: Array) -> None:
        """Sends (N, width) rows in order; waits while `window` rows are unacknowledged."""
        stream = _opened(self._stream)
        for start in range(0, len(rows), self._rows_per_chunk):
            chunk = rows[start : start + self._rows_per_chunk]
            await self._wait_until(partial(self._has_room, len(chunk)))
            first_seq, data = self.sent_seq + 1, np.ascontiguousarray(chunk).data.cast("B")
            self.sent_seq += len(chunk)
            await stream.write(self._chunks.message(first_seq, data))  # kept nowhere, so its memory is free

    async def receive(self) -> None:
        """Takes acknowledgements until the stream is finished."""
        stream = _opened(self._stream)
        try:
            while not self.finished:
                answer = await stream.read()
                self.acknowledged_seq = answer.committed_seq
                self._on_acknowledged(answer.committed_seq)
                self.refused_rows = answer.refused_rows
                self.forgotten_writers = answer.forgotten_writers
                self.waiting = answer.waiting or None
                self.finished = answer.finished
                self._moved.set()
            await stream.read_end()
        except DaseError as error:
            self._broken = error
            raise
        finally:
            self._moved.set()

    async def finish(self) -> None:
        """Sends the end frame; returns once every row is acknowledged."""
        stream = _opened(self._stream)
        await stream.write(replay_pb2.InsertRequest(end=replay_pb2.InsertEnd()))
        await stream.end_writing()
        await self._wait_until(lambda: self.finished)

    def cancel(self) -> None:
        """Drops the stream; has no effect once it has ended."""
        if self._stream is not None:
            self._stream.cancel()

    def _has_room(self, rows: int) -> bool:
        return self.unacknowledged + rows <= self._window

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._broken is not None:
                raise self._broken
            self._moved.clear()
            await self._moved.wait()


@dataclass(frozen=True)
class SampledBatch:
    """(B, width) packed rows, read-only, and how many transitions the buffer held when they were drawn.

    `drawn_from` is how many of these they were drawn from.
    """

    rows: Array
    buffer_size: int
    drawn_from: int


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


class Sampler:
    """One Sample stream: batches arrive ahead of their use, at most as many as were granted.

    All methods raise the refusals of errors.py when the stream breaks, and DaseError when the service
    sends more than was granted or another size of batch.

    Args:
        target: where to, and for which agent.
        batch_size: rows of each batch.
        own_rows_only: draw only from what that agent collected.
        batches_per_frame: as many batches granted at once may come, and be drawn, together.
    """

    def __init__(
        self,
        target: StreamTarget,
        *,
        batch_size: int,
        own_rows_only: bool = False,
        batches_per_frame: int = 1,
    ) -> None:
        self._target = target
        self._batch_size = batch_size
        self._own_rows_only = own_rows_only
        self._batches_per_frame = batches_per_frame
        self._stream: ClientStream | None = None
        self._owed: deque[tuple[int, int]] = deque()  # how many rows, at least and at most, come next
        self._here: deque[SampledBatch] = deque()
        self.waiting: str | None = None

    async def open(self, *, credits: int, pacing: Pacing | None = None) -> Self:
        """Starts the stream and grants the first credits; with a pace, batches come at that."""
        header = replay_pb2.SampleHeader(
            stream=self._target.header(),
            batch_size=self._batch_size,
            own_rows_only=self._own_rows_only,
            batches_per_frame=self._batches_per_frame,
            pace=None if pacing is None else pacing.message(),
        )
        self._stream = stream = self._target.sample_stream()
        async with opened_in_time(stream, self._target.address, UNARY_TIMEOUT_S):
            await stream.write(replay_pb2.SampleRequest(header=header, credits=credits))
            await stream.connected()
        self._owed.extend([(self._batch_size, self._batch_size)] * credits)
        return self

    async def grant(self, credits: int, *, used: int = 0) -> None:
        """Lets the service send this many more batches; with a pace, `used` were taken since the last."""
        self._owed.extend([(self._batch_size, self._batch_size)] * credits)
        await _opened(self._stream).write(replay_pb2.SampleRequest(credits=credits, used=used))

    async def ask(self, sizes: Sequence[int]) -> None:
        """Has the service send a batch of each of these sizes, an empty one where it has nothing."""
        self._owed.extend((0, size) for size in sizes)
        await _opened(self._stream).write(replay_pb2.SampleRequest(rows=sizes))

    async def next(self) -> SampledBatch:
        """The next batch; while it is not there, `waiting` says what the service waits for."""
        if not self._here:
            await self._receive()
        return self._here.popleft()

    async def _receive(self) -> None:
        """Takes the frames of the next batch, or the frame of several."""
        pieces, received = list[Frame](), 0
        while not pieces or not pieces[-1].last:
            answer = await _opened(self._stream).read()
            if isinstance(answer, Waiting):
                self.waiting = answer.reason
                continue
            self.waiting = None
            pieces.append(answer)
            received += len(answer.rows)
            if not (self._batches_in(received) if answer.last else self._may_go_on(received)):
                raise DaseError(f"the replay service at {self._target.address} sent what was not asked for")
        rows = np.frombuffer(joined(pieces), np.float32).reshape(-1, self._target.schema.width)
        batches, told = self._batches_in(received), pieces[-1]
        for batch in np.split(rows, batches) if batches > 1 else (rows,):
            self._owed.popleft()
            self._here.append(SampledBatch(batch, told.buffer_size, told.drawn_from))

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
        """Whether these bytes can be the beginning of the next batch."""
        return bool(self._owed) and received <= self._owed[0][1] * self._target.schema.row_bytes

    def cancel(self) -> None:
        """Ends the stream; has no effect once it has ended."""
        if self._stream is not None:
            self._stream.cancel()


def _opened(stream: ClientStream | None) -> ClientStream:
    if stream is None:
        raise TypeError("the stream has not been opened")
    return stream
