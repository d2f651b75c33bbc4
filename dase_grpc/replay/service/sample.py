"""The batches of one Sample stream: drawn right into the messages that carry them."""

import numpy as np

from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.wire.packed import FRAME_HEAD_BYTES, ROWS_BYTES, ReusedMemory, frame_head, write_frame
from dase_grpc.replay.wire.status import Context
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.schema import Array


class Batches:
    """Draws the batches of a stream and sends them; holds the memory of one frame."""

    def __init__(
        self, run: SharedRun, header: replay_pb2.SampleHeader, rng: np.random.Generator, context: Context
    ) -> None:
        self._run = run
        self._header = header
        self._rng = rng
        self._context = context
        self._memory = ReusedMemory()

    async def send(self, size: int) -> None:
        """Sends this many transitions, none where there is nothing to draw from.

        Raises:
            StaleLeaseError: the agent's lease is not that of the stream any more.
        """
        agent_id, ring = self._header.stream.agent_id, self._run.store.ring
        self._run.leases.require(agent_id, self._header.stream.lease_epoch)
        present = ring.count_of(agent_id) if self._header.own_rows_only else len(ring)
        count = size if present else 0
        if count * ring.schema.row_bytes <= ROWS_BYTES:
            await self._context.write(self._frame(count, buffer_size=len(ring), drawn_from=present))
        else:
            await self._send_pieces(count, buffer_size=len(ring), drawn_from=present)

    def _frame(self, count: int, *, buffer_size: int, drawn_from: int) -> bytes:
        size_bytes = count * self._run.store.schema.row_bytes
        head = frame_head(size_bytes, last=True, buffer_size=buffer_size, drawn_from=drawn_from)

        def fill(message: memoryview) -> None:
            message[:FRAME_HEAD_BYTES] = head
            if count:
                self._draw(self._run.store.schema.from_bytes(message[FRAME_HEAD_BYTES:]))

        return self._memory.message(FRAME_HEAD_BYTES + size_bytes, fill)

    async def _send_pieces(self, count: int, *, buffer_size: int, drawn_from: int) -> None:
        """Sends what is too large for one frame."""
        rows = self._run.store.schema.empty(count)
        self._draw(rows)
        data = rows.data.cast("B")
        for start in range(0, len(data), ROWS_BYTES):
            piece, last = data[start : start + ROWS_BYTES], start + ROWS_BYTES >= len(data)
            await self._context.write(
                write_frame(piece, last=last, buffer_size=buffer_size, drawn_from=drawn_from)
            )

    def _draw(self, rows: Array) -> None:
        agent_id, own = self._header.stream.agent_id, self._header.own_rows_only
        self._run.store.sample(len(rows), self._rng, agent_id=agent_id, own_rows_only=own, out=rows)
