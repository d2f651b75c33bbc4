"""Sampler: one Sample stream, with bounded memory."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

import numpy as np

from dase_grpc.errors import DaseError
from dase_grpc.pace import Pace
from dase_grpc.replay.client.cluster import UNARY_TIMEOUT_S, StreamTarget
from dase_grpc.replay.client.streams import ClientStream, opened, opened_in_time
from dase_grpc.replay.wire.packed import Frame, Waiting, joined
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.schema import Array


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
        await opened(self._stream).write(replay_pb2.SampleRequest(credits=credits, used=used))

    async def ask(self, sizes: Sequence[int]) -> None:
        """Has the service send a batch of each of these sizes, an empty one where it has nothing."""
        self._owed.extend((0, size) for size in sizes)
        await opened(self._stream).write(replay_pb2.SampleRequest(rows=sizes))

    async def next(self) -> SampledBatch:
        """The next batch; while it is not there, `waiting` says what the service waits for."""
        if not self._here:
            await self._receive()
        return self._here.popleft()

    async def _receive(self) -> None:
        """Takes the frames of the next batch, or the frame of several."""
        pieces, received = list[Frame](), 0
        while not pieces or not pieces[-1].last:
            answer = await opened(self._stream).read()
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
