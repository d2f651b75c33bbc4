"""The batches of one Sample stream, drawn right into the messages that carry them, or as numbers of rows."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dase_grpc.errors import MalformedError
from dase_grpc.metrics.calls import Calls
from dase_grpc.replay.buffer.priorities import Drawn
from dase_grpc.replay.buffer.ring_file import handle_of
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.buffer.sampling import Sampling, Source
from dase_grpc.replay.wire.packed import (
    FRAME_HEAD_BYTES,
    ROWS_BYTES,
    ReusedMemory,
    frame_drawing,
    frame_head,
    numbers_frame,
    write_frame,
)
from dase_grpc.replay.wire.status import Context
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.schema import Array

Draw = Callable[..., tuple[Array, Drawn | None]]
"""Draws what was asked for into rows, `out`."""


class Batches:
    """Draws the batches of one stream and sends them; holds the memory of one frame.

    How long each message takes is noted in `calls`. A client that has found the ring which `offer` offers is
    sent numbers of rows instead of these, until `end`.

    Attributes:
        in_place: whether it is.
        again: batches that are asked for again, for `send_again`.
    """

    def __init__(
        self,
        run: SharedRun,
        header: replay_pb2.SampleHeader,
        sampling: Sampling,
        rng: np.random.Generator,
        context: Context,
        *,
        calls: Calls,
    ) -> None:
        self.header, self.context = header, context
        self._run, self._rng = run, rng
        self._agent_id = header.stream.agent_id
        self.source = Source(run.store, self._agent_id, sampling)
        self._clock, self._took = calls.clock, calls.requests("Sample").observe
        self._memory = ReusedMemory()
        self.in_place = self._offered = False
        self.again = 0
        self._as_numbers = 0  # batches that the client may still find overwritten

    async def offer(self) -> None:
        """Offers the ring to a client that would read it in place; whether it can, the client finds out."""
        ring = self._run.store.ring
        handle = handle_of(ring) if self.header.in_place else None
        if handle is None:
            return
        self._offered = True
        told = replay_pb2.Ring(
            pid=handle.pid,
            state_fd=handle.state_fd,
            rows_fd=handle.rows_fd,
            nonce=handle.nonce,
            slots=ring.slots,
        )
        await self.context.write(replay_pb2.SampleResponse(ring=told))

    def end(self) -> None:
        """Notes that the stream has ended."""
        if self.in_place:
            self._run.in_place[self._agent_id] -= 1

    def require_valid(self) -> None:
        """Checks the lease."""
        self._run.leases.require(self._agent_id, self.header.stream.lease_epoch)
        ours = self.source.priorities
        if ours is not None and self._run.store.priorities.get(self._agent_id) is not ours:
            raise MalformedError(
                f"another Sample stream of agent {self._agent_id} draws in another way, so the priorities of "
                f"this one are gone; close it and open another"
            )

    async def send(
        self, size: int, *, batches: int = 1, own: int | None = None, with_rows: bool = False
    ) -> None:
        """Sends batches of this many transitions, none where there is nothing to draw from.

        With an own share `own` may say how many of each are the agent's own. `with_rows` holds where rows are
        read in place, too.
        """
        began, ring, source = self._clock(), self._run.store.ring, self.source
        self.require_valid()
        how: dict[str, Any] = {"batches": batches, "own": own}
        sizes = {"buffer_size": len(ring), "drawn_from": source.told}
        count = batches * size if source.present else 0
        if self.in_place and count and not with_rows:
            numbers, drawn = source.draw_numbers(size, self._rng, **how)
            self._as_numbers += batches
            drawing = None if drawn is None else self._drawing(drawn)
            await self.context.write(numbers_frame(numbers.tobytes(), drawing, **sizes))
        else:
            small = source.priorities is None and count * ring.schema.row_bytes <= ROWS_BYTES
            send = self._send_frame if small else self._send_pieces
            await send(count, partial(source.draw, size, self._rng, **how), **sizes)
        self._took(self._clock() - began)

    async def _send_frame(self, count: int, draw: Draw, *, buffer_size: int, drawn_from: int) -> None:
        schema = self._run.store.schema
        size_bytes = count * schema.row_bytes
        head = frame_head(size_bytes, last=True, buffer_size=buffer_size, drawn_from=drawn_from)

        def fill(message: memoryview) -> None:
            message[:FRAME_HEAD_BYTES] = head
            if count:
                draw(out=schema.from_bytes(message[FRAME_HEAD_BYTES:]))

        await self.context.write(self._memory.message(FRAME_HEAD_BYTES + size_bytes, fill))

    async def _send_pieces(self, count: int, draw: Draw, *, buffer_size: int, drawn_from: int) -> None:
        """Sends what is too large for one frame, and what says how it was drawn."""
        rows = self._run.store.schema.empty(count)
        drawn = draw(out=rows)[1] if count else None
        drawing = b"" if drawn is None else frame_drawing(self._drawing(drawn))
        data = rows.data.cast("B") if count else b""
        for start in range(0, max(1, len(data)), ROWS_BYTES):
            piece, last = data[start : start + ROWS_BYTES], start + ROWS_BYTES >= len(data)
            frame = write_frame(piece, last=last, buffer_size=buffer_size, drawn_from=drawn_from)
            await self.context.write(frame + drawing if last else frame)

    def _drawing(self, drawn: Drawn) -> replay_pb2.Drawing:
        priorities = self.source.priorities
        assert priorities is not None
        sides = priorities.sides()
        return replay_pb2.Drawing(
            numbers=drawn.numbers.tobytes(),
            probabilities=drawn.probabilities.tobytes(),
            present=[side.present for side in sides],
            masses=[side.mass for side in sides],
            incarnation=self._run.incarnation,
            largest_mass=priorities.largest,
            ignored=priorities.ignored.total(),
        )

    def take(self, request: replay_pb2.SampleRequest) -> None:
        """Takes the TD errors of a request, and what it says of rows that are read in place."""
        self._take_errors(request.priorities)
        if request.in_place and not self.in_place:
            if not self._offered:
                raise MalformedError("this Sample stream was offered no ring to read in place")
            self.in_place = True
            self._run.in_place[self._agent_id] += 1
        if request.again > self._as_numbers:
            raise MalformedError(
                f"{request.again} batches are asked for again, but {self._as_numbers} came as numbers"
            )
        self._as_numbers -= request.again
        self.again += request.again

    async def send_again(self) -> None:
        """Sends one of the batches that are asked for again, with its rows."""
        self.again -= 1
        await self.send(self.header.batch_size, with_rows=True)

    def _take_errors(self, told: Sequence[replay_pb2.Priorities]) -> None:
        """Takes TD errors.

        Raises:
            MalformedError: the stream has no priorities, or there is not one error for each number.
        """
        if told:
            self.require_valid()
        for each in told:
            numbers, errors = len(each.numbers) // 8, len(each.errors) // 4
            priorities = self.source.priorities
            if priorities is None or len(each.numbers) % 8 or len(each.errors) % 4 or numbers != errors:
                raise MalformedError(
                    "priorities are for a stream with a prioritisation, 8 bytes for each number and 4 for "
                    f"its error; here are {len(each.numbers)} and {len(each.errors)}"
                )
            if each.incarnation != self._run.incarnation:
                priorities.ignored["restart"] += numbers
                continue
            priorities.put(np.frombuffer(each.numbers, "<i8"), np.frombuffer(each.errors, "<f4"))
