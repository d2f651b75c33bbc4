"""ReplayService's client: an asyncio inserter and sampler with bounded memory."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import grpc
import numpy as np
from grpc.aio import Channel

from dase_grpc.errors import DaseError, UnreachableError
from dase_grpc.schema import Array, TransitionSchema
from dase_grpc.wire.cluster import UNARY_TIMEOUT_S, Membership
from dase_grpc.wire.status import service
from dase_grpc.wire.v1 import replay_pb2, replay_pb2_grpc

CHUNK_BYTES: Final = 2**20 - 1024
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
        )


class Inserter:
    """One Insert stream: sends rows, holds at most `window` of them unacknowledged.

    `receive` must run in a task that the caller owns, from `open` until `finish` has returned.
    All methods raise the refusals of errors.py when the stream breaks; then whatever
    `unacknowledged` counts may or may not be stored.
    """

    def __init__(self, target: StreamTarget, *, writer_id: str, window: int = WINDOW_ROWS) -> None:
        self._target = target
        self._writer_id = writer_id
        self._window = window
        self._rows_per_chunk = max(1, CHUNK_BYTES // target.schema.row_bytes)
        self._call: Any = None
        self._moved = asyncio.Event()
        self._broken: DaseError | None = None
        self.sent_seq = 0
        self.acknowledged_seq = 0
        self.refused_rows = 0
        self.finished = False

    @property
    def unacknowledged(self) -> int:
        """Rows sent whose commit has not been acknowledged."""
        return self.sent_seq - self.acknowledged_seq

    async def open(self) -> Self:
        """Starts the stream; the next row's number follows what the service has committed."""
        stub = replay_pb2_grpc.ReplayServiceStub(self._target.channel)
        header = replay_pb2.InsertHeader(stream=self._target.header(), writer_id=self._writer_id)
        with service(self._target.address):
            self._call = stub.Insert(wait_for_ready=True)
            await self._call.write(replay_pb2.InsertRequest(header=header))
            answer = await _read(self._call, timeout_s=UNARY_TIMEOUT_S)
        self.sent_seq = self.acknowledged_seq = answer.committed_seq
        return self

    async def append(self, rows: Array) -> None:
        """Sends (N, width) rows in order; waits while `window` rows are unacknowledged."""
        for start in range(0, len(rows), self._rows_per_chunk):
            chunk = rows[start : start + self._rows_per_chunk]
            await self._wait_until(partial(self._has_room, len(chunk)))
            request = replay_pb2.InsertRequest()
            request.chunk.first_seq = self.sent_seq + 1
            request.chunk.rows = chunk.tobytes()
            self.sent_seq += len(chunk)
            with service(self._target.address):
                await self._call.write(request)

    async def receive(self) -> None:
        """Takes acknowledgements until the stream is finished."""
        try:
            with service(self._target.address):
                while not self.finished:
                    answer = await _read(self._call)
                    self.acknowledged_seq = answer.committed_seq
                    self.refused_rows = answer.refused_rows
                    self.finished = answer.finished
                    self._moved.set()
                await _read_end(self._call)
        except DaseError as error:
            self._broken = error
            raise
        finally:
            self._moved.set()

    async def finish(self) -> None:
        """Sends the end frame; returns once every row is acknowledged."""
        with service(self._target.address):
            await self._call.write(replay_pb2.InsertRequest(end=replay_pb2.InsertEnd()))
            await self._call.done_writing()
        await self._wait_until(lambda: self.finished)

    def cancel(self) -> None:
        """Drops the stream; has no effect once it has ended."""
        if self._call is not None:
            self._call.cancel()

    def _has_room(self, rows: int) -> bool:
        return self.unacknowledged == 0 or self.unacknowledged + rows <= self._window

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._broken is not None:
                raise self._broken
            self._moved.clear()
            await self._moved.wait()


@dataclass(frozen=True)
class SampledBatch:
    """(B, width) packed rows, read-only, and how many transitions the buffer held when they were drawn."""

    rows: Array
    buffer_size: int


class Sampler:
    """One Sample stream: batches arrive ahead of their use, at most as many as were granted.

    All methods raise the refusals of errors.py when the stream breaks.
    """

    def __init__(self, target: StreamTarget, *, batch_size: int) -> None:
        self._target = target
        self._batch_size = batch_size
        self._call: Any = None
        self.waiting: str | None = None

    async def open(self, *, credits: int) -> Self:
        """Starts the stream and grants the first credits."""
        stub = replay_pb2_grpc.ReplayServiceStub(self._target.channel)
        header = replay_pb2.SampleHeader(stream=self._target.header(), batch_size=self._batch_size)
        with service(self._target.address):
            self._call = stub.Sample(wait_for_ready=True)
            await self._call.write(replay_pb2.SampleRequest(header=header, credits=credits))
        return self

    async def grant(self, credits: int) -> None:
        """Lets the service send this many more batches."""
        with service(self._target.address):
            await self._call.write(replay_pb2.SampleRequest(credits=credits))

    async def next(self) -> SampledBatch:
        """The next batch; while it is not there, `waiting` says what the service waits for."""
        pieces: list[bytes] = []
        with service(self._target.address):
            while True:
                answer = await _read(self._call)
                if answer.WhichOneof("kind") == "waiting":
                    self.waiting = answer.waiting.reason
                    continue
                self.waiting = None
                pieces.append(answer.frame.rows)
                if answer.frame.last:
                    break
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        rows = np.frombuffer(data, np.float32).reshape(self._batch_size, self._target.schema.width)
        return SampledBatch(rows, answer.frame.buffer_size)

    def cancel(self) -> None:
        """Ends the stream; has no effect once it has ended."""
        if self._call is not None:
            self._call.cancel()


async def _read(call: Any, *, timeout_s: float | None = None) -> Any:
    """The next message; a stream that ended instead raises its status.

    Raises:
        AioRpcError: the stream failed.
        UnreachableError: it ended well but too early, or nothing came in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            answer = await call.read()
    except TimeoutError:
        call.cancel()
        raise UnreachableError(f"the replay service did not answer within {timeout_s:g} s") from None
    if answer is grpc.aio.EOF:
        await _raise_for_status(call)
        raise UnreachableError("the replay service ended the stream too early")
    return answer


async def _read_end(call: Any) -> None:
    if await call.read() is grpc.aio.EOF:
        await _raise_for_status(call)


async def _raise_for_status(call: Any) -> None:
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )
