"""Rows out to one shard: kept until they are acknowledged, sent in one Insert stream with bounded memory."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Self

import numpy as np

from dase_grpc.errors import DaseError
from dase_grpc.replay.client.cluster import UNARY_TIMEOUT_S, StreamTarget
from dase_grpc.replay.client.streams import OneStream, opened_in_time
from dase_grpc.replay.wire.packed import ROWS_BYTES, ChunkWriter
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.schema import Array

WINDOW_ROWS: Final = 8_192


class Outbox:
    """Numbers a writer's rows and keeps each until it is acknowledged, so that it can be sent again.

    A row keeps its number over all streams to the same buffer, for the service drops by number what it has.
    It gets another one only when the service has lost committed rows, or holds another buffer.
    """

    def __init__(self, *, count: Callable[[int], None] = lambda rows: None) -> None:
        self._count = count
        self._blocks: deque[Array] = deque()
        self._first = 1
        self._next = 1
        self._buffer_id: str | None = None
        self.acknowledged = 0

    def __len__(self) -> int:
        """Rows that are kept."""
        return self._next - self._first

    def add(self, rows: Array) -> None:
        """Keeps (N, width) rows, numbered on from the last."""
        self._blocks.append(rows)
        self._next += len(rows)

    def blocks(self) -> Iterator[Array]:
        """The rows that are kept, oldest first, as they were when this was called."""
        yield from tuple(self._blocks)

    def resume(self, committed_seq: int, *, buffer_id: str) -> int:
        """Begins a stream to a service that has committed everything up to a number of this writer.

        What is kept then are the rows to send, numbered from there on. Returns how many acknowledged rows the
        service has lost; 0 where it holds another buffer than before. DaseError if it has rows never sent.
        """
        lost, same = self._first - 1 - committed_seq, buffer_id == self._buffer_id
        self._buffer_id = buffer_id
        if same and committed_seq >= self._next:
            raise DaseError(
                f"the replay service has row {committed_seq} of this writer, which sent only "
                f"{self._next - 1}: another node writes under the same name"
            )
        if same and lost <= 0:
            self.acknowledge(committed_seq)
            return 0
        self._next -= lost
        self._first -= lost
        return lost if same else 0

    def acknowledge(self, committed_seq: int) -> None:
        """Lets go of all rows up to `committed_seq`. DaseError if no row of that number was ever sent."""
        if committed_seq >= self._next:
            raise DaseError(
                f"the replay service acknowledged row {committed_seq}, but only {self._next - 1} were sent"
            )
        due = max(0, committed_seq + 1 - self._first)
        self._first += due
        self.acknowledged += due
        self._count(due)
        while due:
            block = self._blocks.popleft()
            if len(block) > due:
                self._blocks.appendleft(block[due:])
            due -= min(due, len(block))


class Inserter(OneStream):
    """One Insert stream: sends rows, holds at most `window` of them unacknowledged.

    `receive` must run in a task that the caller owns, from `open` until `finish` has returned. All methods
    raise the refusals of errors.py when the stream breaks; then what `unacknowledged` counts may or may not
    be stored. `append` and `finish` wait as long as the service takes. `on_acknowledged` gets each number up
    to which it has committed. While it holds rows back, as a `paced` writer's until the agent's learner says
    its pace, `waiting` says what for. Whoever opens another stream for a writer states the
    `forgotten_writers` of the one before, so that it is refused if the service may have forgotten it.
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
        self._chunks = ChunkWriter()
        self._moved = asyncio.Event()
        self._broken: DaseError | None = None
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
        self.sent_seq = self.acknowledged_seq = answer.committed_seq
        self.forgotten_writers = answer.forgotten_writers
        return self

    async def append(self, rows: Array) -> None:
        """Sends (N, width) rows in order; waits while `window` rows are unacknowledged."""
        stream = self._opened
        for start in range(0, len(rows), self._rows_per_chunk):
            chunk = rows[start : start + self._rows_per_chunk]
            await self._wait_until(partial(self._has_room, len(chunk)))
            first_seq, data = self.sent_seq + 1, np.ascontiguousarray(chunk).data.cast("B")
            self.sent_seq += len(chunk)
            await stream.write(self._chunks.message(first_seq, data))  # kept nowhere, so its memory is free

    async def receive(self) -> None:
        """Takes acknowledgements until the stream is finished."""
        stream = self._opened
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
        stream = self._opened
        await stream.write(replay_pb2.InsertRequest(end=replay_pb2.InsertEnd()))
        await stream.end_writing()
        await self._wait_until(lambda: self.finished)

    def _has_room(self, rows: int) -> bool:
        return self.unacknowledged + rows <= self._window

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._broken is not None:
                raise self._broken
            self._moved.clear()
            await self._moved.wait()
