"""ReplayService's servicer: streams of rows into and out of a SharedRun."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import grpc
import numpy as np

from dase_grpc import seeding
from dase_grpc.errors import MalformedError
from dase_grpc.metrics.buffer import Calls
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.buffer.sharding import WHOLE
from dase_grpc.replay.buffer.store import ReplayStore
from dase_grpc.replay.security.door import require_agent
from dase_grpc.replay.service.draining import Drained, Draining
from dase_grpc.replay.service.insert import Acknowledger, Admission
from dase_grpc.replay.service.interceptors import read, read_first
from dase_grpc.replay.service.paced import (
    MAX_CREDITS,
    Change,
    Gate,
    PacedBatches,
    limiter_of,
    require_no_header,
)
from dase_grpc.replay.service.sample import Batches
from dase_grpc.replay.wire.messages import buffer_to_proto, schema_to_proto
from dase_grpc.replay.wire.packed import ROWS_BYTES, Chunk, read_request
from dase_grpc.replay.wire.status import Context, refusals
from dase_grpc.replay.wire.v1 import replay_pb2, replay_pb2_grpc

MAX_BATCH_SIZE: Final = 65_536
MAX_BATCH_BYTES: Final = 64 * 2**20
MAX_WRITER_ID: Final = 128
WAITING_EVERY_S: Final = 1.0


class ReplayServicer(Drained, replay_pb2_grpc.ReplayServiceServicer):
    """ReplayService over a SharedRun. Lives on one event loop.

    A chunk is stored synchronously, so a stream that is cut off anywhere leaves whole rows only; it is
    committed before it is acknowledged. How long each chunk and each batch takes is noted in `calls`.
    `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        run: SharedRun,
        *,
        calls: Calls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._clock = clock
        self._calls = Calls() if calls is None else calls
        self._changed = Change()
        self._draining = Draining("Insert", "Sample")
        self._sample_streams: Counter[int] = Counter()
        self._inserting = Admission("Insert")
        self._sampling = Admission("Sample")

    async def Describe(
        self, request: replay_pb2.DescribeRequest, context: Context
    ) -> replay_pb2.DescribeResponse:
        answer = replay_pb2.DescribeResponse(run_id=self._run.run_id, buffer=buffer_to_proto(self._run))
        if self._run.opened:
            schema = self._run.store.schema
            answer.schema.CopyFrom(schema_to_proto(schema))
            answer.schema_fingerprint = schema.fingerprint
        return answer

    # grpc.aio runs a coroutine that reads and writes its context as well as a generator; the
    # generated stubs know only the generator.
    async def Insert(  # type: ignore[override]
        self, request_iterator: AsyncIterator[replay_pb2.InsertRequest], context: Context
    ) -> None:
        async with refusals(context):
            await self._draining.serve(context, self._insert, rpc="Insert")

    async def Sample(  # type: ignore[override]
        self, request_iterator: AsyncIterator[replay_pb2.SampleRequest], context: Context
    ) -> None:
        async with refusals(context):
            await self._draining.serve(context, self._sample, rpc="Sample")

    async def _insert(self, context: Context) -> None:
        header = await _insert_header(context)
        store = self._require(context, header.stream)
        if not 0 < len(header.writer_id) <= MAX_WRITER_ID:
            raise MalformedError(
                f"a writer id has 1 to {MAX_WRITER_ID} characters, not {len(header.writer_id)}"
            )
        with self._inserting.stream(header.stream.agent_id):
            await self._insert_as(header, store, context)

    async def _insert_as(self, header: replay_pb2.InsertHeader, store: ReplayStore, context: Context) -> None:
        writer, agent_id = header.writer_id, header.stream.agent_id
        if header.HasField("forgotten_writers"):
            store.require_remembered(writer, agent_id=agent_id, forgotten=header.forgotten_writers)
        store.make_room(writer, agent_id=agent_id, now=self._clock())
        store.watch.opened((agent_id, writer))
        try:
            await self._take_chunks(context, header, store)
        finally:
            store.watch.closed((agent_id, writer), self._clock())
            if not store.committed(writer, agent_id=agent_id):  # many names may be tried
                store.watch.forget((agent_id, writer))

    async def _take_chunks(
        self, context: Context, header: replay_pb2.InsertHeader, store: ReplayStore
    ) -> None:
        stored_seq = store.committed(header.writer_id, agent_id=header.stream.agent_id)
        acks = Acknowledger(
            context, stored_seq=stored_seq, commit=store.commit, forgotten=lambda: store.forgotten
        )
        acknowledging = asyncio.ensure_future(acks.run())
        try:
            if await self._store_chunks(context, header, store, acks):
                acks.finish()
                await acknowledging
        finally:
            acknowledging.cancel()
            await asyncio.gather(acknowledging, return_exceptions=True)

    async def _store_chunks(
        self, context: Context, header: replay_pb2.InsertHeader, store: ReplayStore, acks: Acknowledger
    ) -> bool:
        """Stores each chunk as it comes; returns whether the stream ended with an end frame."""
        while (request := await read(context)) is not grpc.aio.EOF:
            if not isinstance(request, Chunk):
                _require_end(request)
                return True
            await self._store_chunk(request, header, store, acks)
            del request  # a stream that idles keeps no rows
        return False

    async def _store_chunk(
        self, chunk: Chunk, header: replay_pb2.InsertHeader, store: ReplayStore, acks: Acknowledger
    ) -> None:
        writer, agent_id, epoch = header.writer_id, header.stream.agent_id, header.stream.lease_epoch
        clock, took = self._calls.clock, self._calls.requests("Insert").observe
        began = clock()
        first_seq, rows = chunk.first_seq, store.schema.from_bytes(chunk.rows)
        while len(rows):
            self._run.leases.require(agent_id, epoch)
            count = await self._room_for(header, first_seq, len(rows), acks)
            if not count:
                began = clock()
                continue
            refused = store.append(writer, first_seq, rows[:count], agent_id=agent_id, commit=False)
            acks.stored(store.committed(writer, agent_id=agent_id), refused=refused)
            first_seq, rows = first_seq + count, rows[count:]
            self._changed.tell()
        took(clock() - began)

    async def _room_for(
        self, header: replay_pb2.InsertHeader, first_seq: int, count: int, acks: Acknowledger
    ) -> int:
        """How many of the next rows may be stored now; 0 after having waited for a change."""
        if not self._run.limiters and not header.paced:
            return count
        agent_id = header.stream.agent_id
        gate = Gate(self._run, agent_id)
        room = gate.room(paced=header.paced)
        if room is None:
            return count
        committed = self._run.store.committed(header.writer_id, agent_id=agent_id)
        known = min(count, max(0, committed + 1 - first_seq))
        if known or room:
            return min(count, known + room)
        acks.waiting(f"waiting for {gate.why_full()}")
        with suppress(TimeoutError):
            async with asyncio.timeout(WAITING_EVERY_S):
                await self._changed.wait()
        return 0

    async def _sample(self, context: Context) -> None:
        request = await read_first(context)
        if request is grpc.aio.EOF:
            return
        if not request.HasField("header"):
            raise MalformedError("the first request of a Sample stream carries no header")
        row_bytes = self._require(context, request.header.stream).schema.row_bytes
        batch_size = request.header.batch_size
        _require_batch_size(batch_size, row_bytes=row_bytes)
        agent_id, paced = request.header.stream.agent_id, request.header.HasField("pace")
        at_once = 1 if paced else _batches_per_frame(request.header, row_bytes)
        with self._sampling.stream(agent_id, held_bytes=at_once * batch_size * row_bytes):
            if paced:
                self._run.limiters[agent_id] = limiter_of(request.header)
                self._changed.tell()
                await self._serve_at_a_pace(request, context)
            else:
                if self._run.limiters.pop(agent_id, None) is not None:
                    self._changed.tell()
                await self._serve_credits(request, context, at_once=at_once)

    async def _serve_at_a_pace(self, request: Any, context: Context) -> None:
        header, stream = request.header, request.header.stream
        rng, gate = self._stream_rng(stream.agent_id), Gate(self._run, stream.agent_id)
        clock, took = self._calls.clock, self._calls.requests("Sample").observe
        drawn = Batches(self._run, header, rng, context)

        async def draw() -> None:
            began = clock()
            await drawn.send(header.batch_size)
            took(clock() - began)

        limiter = self._run.limiters[stream.agent_id]
        valid = partial(self._run.leases.require, stream.agent_id, stream.lease_epoch)
        batches = PacedBatches(context, gate, limiter, changed=self._changed, draw=draw, require_valid=valid)
        await batches.serve(request)

    def _stream_rng(self, agent_id: int) -> np.random.Generator:
        """The generator of an agent's next Sample stream."""
        key: tuple[int, ...] = (agent_id, self._sample_streams[agent_id])
        if self._run.shard != WHOLE:  # shards of one seed must not draw alike
            key = (*key, self._run.shard.index)
        self._sample_streams[agent_id] += 1
        return seeding.generator(self._run.seed, seeding.Purpose.SAMPLING, *key)

    async def _serve_credits(self, request: Any, context: Context, *, at_once: int) -> None:
        header = request.header
        drawn = Batches(self._run, header, self._stream_rng(header.stream.agent_id), context)
        clock, took = self._calls.clock, self._calls.requests("Sample").observe
        while request is not grpc.aio.EOF:
            if request.credits > MAX_CREDITS:
                raise MalformedError(f"a request grants at most {MAX_CREDITS} credits, not {request.credits}")
            _require_sizes(request.rows, header.batch_size)
            for batches in _portions(request.credits, at_once):
                asked = clock()
                await self._wait_until_ready(context, header)
                ready = clock()
                await drawn.send(batches * header.batch_size)
                self._calls.sample_wait.observe(ready - asked)
                took(clock() - ready)
            for size in request.rows:
                began = clock()
                await drawn.send(size)
                took(clock() - began)
            request = await read(context)
            if request is not grpc.aio.EOF:
                require_no_header(request)

    def _require(self, context: Context, stream: replay_pb2.StreamHeader) -> ReplayStore:
        """The store; the stream ends as soon as `look` finds its lease stale."""
        require_agent(stream.agent_id)
        store = self._run.require_stream(
            run_id=stream.run_id,
            agent_id=stream.agent_id,
            epoch=stream.lease_epoch,
            fingerprint=stream.schema_fingerprint,
            buffer_id=stream.buffer_id,
        )
        valid = partial(self._run.leases.require, stream.agent_id, stream.lease_epoch)
        self._draining.require(context, valid)
        return store

    async def _wait_until_ready(self, context: Context, header: replay_pb2.SampleHeader) -> None:
        stream, store, min_size = header.stream, self._run.store, self._run.min_size
        shortage = partial(
            store.shortage, min_size, agent_id=stream.agent_id, own_rows_only=header.own_rows_only
        )
        while (missing := shortage()) is not None:
            self._run.leases.require(stream.agent_id, stream.lease_epoch)
            answer = replay_pb2.SampleResponse()
            answer.waiting.size, answer.waiting.min_size = len(store.ring), min_size
            answer.waiting.reason = f"waiting for {missing}"
            await context.write(answer)
            with suppress(TimeoutError):
                async with asyncio.timeout(WAITING_EVERY_S):
                    while shortage() is not None:
                        await self._changed.wait()


def add_replay(servicer: ReplayServicer, server: grpc.aio.Server) -> None:
    """Has a server serve ReplayService as the generated code would, but rows are read without a copy."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Insert": grpc.stream_stream_rpc_method_handler(
            servicer.Insert,
            request_deserializer=read_request,
            response_serializer=replay_pb2.InsertResponse.SerializeToString,
        ),
        "Sample": grpc.stream_stream_rpc_method_handler(
            servicer.Sample,
            request_deserializer=replay_pb2.SampleRequest.FromString,
            response_serializer=replay_pb2.SampleResponse.SerializeToString,
        ),
        "Describe": grpc.unary_unary_rpc_method_handler(
            servicer.Describe,
            request_deserializer=replay_pb2.DescribeRequest.FromString,
            response_serializer=replay_pb2.DescribeResponse.SerializeToString,
        ),
    }
    service = replay_pb2.DESCRIPTOR.services_by_name["ReplayService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


async def _insert_header(context: Context) -> replay_pb2.InsertHeader:
    request = await read_first(context)
    if not isinstance(request, replay_pb2.InsertRequest) or not request.HasField("header"):
        raise MalformedError("the first message of this stream must be its header")
    return request.header


def _require_end(request: replay_pb2.InsertRequest) -> None:
    kind = request.WhichOneof("kind")
    if kind != "end":
        raise MalformedError(f"an Insert stream takes chunks and an end frame, not {kind or 'nothing'}")


def _require_batch_size(batch_size: int, *, row_bytes: int) -> None:
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise MalformedError(f"a batch has 1 to {MAX_BATCH_SIZE} transitions, not {batch_size}")
    if batch_size * row_bytes > MAX_BATCH_BYTES:
        raise MalformedError(
            f"a batch has at most {MAX_BATCH_BYTES} bytes, not {batch_size} transitions of {row_bytes}"
        )


def _portions(count: int, most: int) -> Iterator[int]:
    """Cuts a number into parts of at most `most`."""
    for start in range(0, count, most):
        yield min(most, count - start)


def _require_sizes(sizes: Sequence[int], batch_size: int) -> None:
    if len(sizes) > MAX_CREDITS:
        raise MalformedError(f"a request asks for at most {MAX_CREDITS} batches by size, not {len(sizes)}")
    if sizes and not 1 <= min(sizes) <= max(sizes) <= batch_size:
        raise MalformedError(f"a batch asked for by size has 1 to {batch_size} transitions on this stream")


def _batches_per_frame(header: replay_pb2.SampleHeader, row_bytes: int) -> int:
    """How many batches a frame holds where as many credits are there."""
    if header.own_rows_only:  # what rejection draws depends on how many are drawn at once
        return 1
    fitting = ROWS_BYTES // (header.batch_size * row_bytes)
    return max(1, min(header.batches_per_frame, fitting))
