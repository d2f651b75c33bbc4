"""Inserter: one Insert stream, with bounded memory."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Self

import numpy as np

from dase_grpc.errors import DaseError
from dase_grpc.replay.client.cluster import UNARY_TIMEOUT_S, StreamTarget
from dase_grpc.replay.client.streams import ClientStream, opened, opened_in_time
from dase_grpc.replay.wire.packed import (
    ROWS_BYTES,
    ChunkWriter,
)
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.schema import Array

WINDOW_ROWS: Final = 8_192


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
        stream = opened(self._stream)
        for start in range(0, len(rows), self._rows_per_chunk):
            chunk = rows[start : start + self._rows_per_chunk]
            await self._wait_until(partial(self._has_room, len(chunk)))
            first_seq, data = self.sent_seq + 1, np.ascontiguousarray(chunk).data.cast("B")
            self.sent_seq += len(chunk)
            await stream.write(self._chunks.message(first_seq, data))  # kept nowhere, so its memory is free

    async def receive(self) -> None:
        """Takes acknowledgements until the stream is finished."""
        stream = opened(self._stream)
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
        stream = opened(self._stream)
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
