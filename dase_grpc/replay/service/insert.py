"""Insert streams at the service: headers, chunks of rows, acknowledgements."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

import grpc

from dase_grpc.errors import MalformedError
from dase_grpc.metrics.calls import Calls
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.buffer.store import ReplayStore
from dase_grpc.replay.service.interceptors import read, read_first
from dase_grpc.replay.service.streams import Admission, Changes, Gate, Streams
from dase_grpc.replay.wire.packed import Chunk
from dase_grpc.replay.wire.status import Context
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.schema import Array

MAX_WRITER_ID: Final = 128
WAITING_EVERY_S: Final = 1.0

ACK_ROWS: Final = 1_024
"""Rows whose acknowledgement goes out at once."""

ACK_EVERY_S: Final = 0.002
"""How often fewer are acknowledged at most. One acknowledgement for each chunk of 256 rows would take a third
of the processor time of both sides; to wait where chunks come seldom would wake the service once more."""


@dataclass(eq=False)
class Inserts:
    """The Insert streams of a service. `clock` is monotonic, in seconds."""

    run: SharedRun
    streams: Streams
    _: KW_ONLY
    changed: Changes
    calls: Calls
    clock: Callable[[], float] = time.monotonic
    admission: Admission = field(default_factory=lambda: Admission("Insert"))

    async def serve(self, context: Context) -> None:
        """Serves one stream; returns at its end frame, or where the client cuts it off."""
        header = await _header(context)
        store = self.streams.admit(context, header.stream)
        if not 0 < len(header.writer_id) <= MAX_WRITER_ID:
            raise MalformedError(
                f"a writer id has 1 to {MAX_WRITER_ID} characters, not {len(header.writer_id)}"
            )
        writer, agent_id = header.writer_id, header.stream.agent_id
        with self.admission.stream(agent_id):
            if header.HasField("forgotten_writers"):
                store.require_remembered(writer, agent_id=agent_id, forgotten=header.forgotten_writers)
            store.watch.opened((agent_id, writer))
            try:
                await self.streams.admitted(context)
                await _Insert(self, header, context).serve()
            finally:
                store.watch.closed((agent_id, writer), self.clock())
                if not store.committed(writer, agent_id=agent_id):  # many names may be tried
                    store.watch.forget((agent_id, writer))


class _Insert:
    """One stream of a writer.

    A chunk is stored synchronously, so a stream that is cut off anywhere leaves whole rows only; it is
    committed before it is acknowledged. How long each chunk takes is noted in `calls`.
    """

    def __init__(self, inserts: Inserts, header: replay_pb2.InsertHeader, context: Context) -> None:
        run, calls, self._changed, self._now = inserts.run, inserts.calls, inserts.changed, inserts.clock
        self._run, self._store, self._context = run, run.store, context
        self._writer, self._agent_id, self._paced = header.writer_id, header.stream.agent_id, header.paced
        self._epoch = header.stream.lease_epoch
        self._gate = Gate(run, self._agent_id)
        self._clock, self._took = calls.clock, calls.requests("Insert").observe
        self._acks = Acknowledger(context, run.store, stored_seq=self._committed())

    async def serve(self) -> None:
        acknowledging = asyncio.ensure_future(self._acks.run())
        try:
            if await self._store_chunks():
                self._acks.finish()
                await acknowledging
        finally:
            acknowledging.cancel()
            await asyncio.gather(acknowledging, return_exceptions=True)

    def _committed(self) -> int:
        return self._store.committed(self._writer, agent_id=self._agent_id)

    async def _store_chunks(self) -> bool:
        """Stores each chunk as it comes; returns whether the stream ended with an end frame."""
        while (request := await read(self._context)) is not grpc.aio.EOF:
            if not isinstance(request, Chunk):
                if (kind := request.WhichOneof("kind")) != "end":
                    raise MalformedError(
                        f"an Insert stream takes chunks and an end frame, not {kind or 'nothing'}"
                    )
                return True
            await self._take(request)
            del request  # a stream that idles keeps no rows
        return False

    async def _take(self, chunk: Chunk) -> None:
        began = self._clock()
        first_seq, rows = chunk.first_seq, self._store.schema.from_bytes(chunk.rows)
        while len(rows):
            self._run.leases.require(self._agent_id, self._epoch)
            count = await self._room_for(first_seq, len(rows))
            if not count:
                began = self._clock()
                continue
            self._append(first_seq, rows[:count])
            first_seq, rows = first_seq + count, rows[count:]
        self._took(self._clock() - began)

    def _append(self, first_seq: int, rows: Array) -> None:
        """Stores rows, and wakes who waits for them: everybody where batches can be drawn from now on.

        A writer needs a place in the table from its first rows on, whatever place there was at its header.
        """
        store, enough = self._store, self._run.min_size
        if not self._committed():
            store.make_room(self._writer, agent_id=self._agent_id, now=self._now())
        short = len(store.ring) < enough
        refused = store.append(self._writer, first_seq, rows, agent_id=self._agent_id, commit=False)
        self._acks.stored(self._committed(), refused=refused)
        if short and len(store.ring) >= enough:
            self._changed.tell_all()
        else:
            self._changed.tell(self._agent_id)

    async def _room_for(self, first_seq: int, count: int) -> int:
        """How many of the next rows may be stored now; 0 after having waited for a change."""
        if not self._run.limiters and not self._paced:
            return count
        room = self._gate.room(paced=self._paced)
        if room is None:
            return count
        known = min(count, max(0, self._committed() + 1 - first_seq))
        if known or room:
            return min(count, known + room)
        self._acks.waiting(f"waiting for {self._gate.why_full()}")
        with self._changed.of({self._agent_id}) as changed, suppress(TimeoutError):
            async with asyncio.timeout(WAITING_EVERY_S):
                await changed.wait()
        return 0


class Acknowledger:
    """Tells a writer what is committed, and commits it before. `run` must run in a task of the stream.

    So what comes between two acknowledgements is one commit: for small chunks that of each would take a
    tenth of the server's time.
    """

    def __init__(self, context: Context, store: ReplayStore, *, stored_seq: int) -> None:
        self._context = context
        self._store = store
        self._answer = replay_pb2.InsertResponse(committed_seq=stored_seq)
        self._sent_seq = stored_seq
        self._due = asyncio.Event()
        self._urgent = asyncio.Event()
        self._due.set()
        self._urgent.set()

    def stored(self, seq: int, *, refused: int) -> None:
        """Notes that everything up to `seq` is stored, `refused` more rows of it as refused."""
        self._answer.committed_seq = seq
        self._answer.waiting = ""
        self._answer.refused_rows += refused
        self._due.set()
        if seq - self._sent_seq >= ACK_ROWS:
            self._urgent.set()

    def waiting(self, reason: str) -> None:
        """Has the writer told what its next rows wait for."""
        self._answer.waiting = reason
        self._due.set()

    def finish(self) -> None:
        """Lets `run` send the last acknowledgement and return."""
        self._answer.finished = True
        self._due.set()
        self._urgent.set()

    async def run(self) -> None:
        """Sends what the writer starts from, and then what is due, until the last acknowledgement."""
        loop, finished, next_at = asyncio.get_running_loop(), False, 0.0
        while not finished:
            await self._due.wait()
            if next_at > loop.time():
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_at):
                        await self._urgent.wait()
            next_at = loop.time() + ACK_EVERY_S
            self._due.clear()
            self._urgent.clear()
            self._store.commit()
            self._sent_seq = self._answer.committed_seq
            finished = self._answer.finished
            self._answer.forgotten_writers = self._store.forgotten
            await self._context.write(self._answer)


async def _header(context: Context) -> replay_pb2.InsertHeader:
    request = await read_first(context)
    if not isinstance(request, replay_pb2.InsertRequest) or not request.HasField("header"):
        raise MalformedError("the first message of this stream must be its header")
    return request.header
