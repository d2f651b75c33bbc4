"""Sample streams at the service: headers, credits and paces."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import zip_longest
from typing import Any, Final

import grpc
import numpy as np

from dase_grpc import seeding
from dase_grpc.errors import MalformedError
from dase_grpc.metrics.calls import Calls
from dase_grpc.pace import Pace, StepLimiter
from dase_grpc.replay.buffer.priorities import Prioritisation
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.buffer.sampling import Sampling
from dase_grpc.replay.buffer.sharding import WHOLE
from dase_grpc.replay.service.batches import Batches
from dase_grpc.replay.service.interceptors import read, read_first
from dase_grpc.replay.service.streams import Admission, Changes, Gate, Streams
from dase_grpc.replay.wire.packed import NUMBER_BYTES, ROWS_BYTES
from dase_grpc.replay.wire.status import Context
from dase_grpc.replay.wire.v1 import replay_pb2

MAX_BATCH_SIZE: Final = 65_536
MAX_BATCH_BYTES: Final = 64 * 2**20
MAX_CREDITS: Final = 1_024
WAITING_EVERY_S: Final = 1.0


class Samples:
    """The Sample streams of a service."""

    def __init__(self, run: SharedRun, streams: Streams, *, changed: Changes, calls: Calls) -> None:
        self._run, self._streams, self._changed, self._calls = run, streams, changed, calls
        self._opened: Counter[int] = Counter()
        self._admission = Admission("Sample")

    async def serve(self, context: Context) -> None:
        """Serves one stream; returns once its client has ended its side, and all is sent."""
        request = await read_first(context)
        if request is grpc.aio.EOF:
            return
        if not request.HasField("header"):
            raise MalformedError("the first request of a Sample stream carries no header")
        header, agent_id = request.header, request.header.stream.agent_id
        row_bytes = self._streams.admit(context, header.stream).schema.row_bytes
        _require_batch_size(header.batch_size, row_bytes=row_bytes)
        sampling, paced = _sampling(header), header.HasField("pace")
        at_once = 1 if paced else _batches_per_frame(header, row_bytes)
        with (
            self._admission.stream(agent_id, held_bytes=at_once * header.batch_size * row_bytes),
            ExitStack() as ending,
        ):
            before, limiter = self._run.limiters.get(agent_id), _limiter(header) if paced else None
            batches = Batches(self._run, header, sampling, self._rng(agent_id), context, calls=self._calls)
            ending.callback(batches.end)
            if limiter is not None:
                self._run.limiters[agent_id] = limiter
            elif before is not None:
                del self._run.limiters[agent_id]
            if limiter is not before:
                self._changed.tell(agent_id)
            await self._streams.admitted(context)
            await batches.offer()
            if limiter is None:
                await self._serve_credits(request, batches, row_bytes=row_bytes)
            else:
                await PacedBatches(batches, Gate(self._run, agent_id), limiter, self._changed).serve(request)

    def _rng(self, agent_id: int) -> np.random.Generator:
        """The generator of an agent's next Sample stream."""
        key: tuple[int, ...] = (agent_id, self._opened[agent_id])
        if self._run.shard != WHOLE:  # shards of one seed must not draw alike
            key = (*key, self._run.shard.index)
        self._opened[agent_id] += 1
        return seeding.generator(self._run.seed, seeding.Purpose.SAMPLING, *key)

    async def _serve_credits(self, request: Any, batches: Batches, *, row_bytes: int) -> None:
        size, clock, waited = batches.header.batch_size, self._calls.clock, self._calls.sample_wait.observe
        while request is not grpc.aio.EOF:
            batches.take(request)
            while batches.again:
                await self._wait_until_ready(batches)
                await batches.send_again()
            at_once = _batches_per_frame(batches.header, NUMBER_BYTES if batches.in_place else row_bytes)
            _require_credits(request.credits)
            _require_sizes(request.rows, size)
            _require_own(request, has_share=batches.header.HasField("own_share"))
            for first in range(0, request.credits, at_once):
                asked = clock()
                await self._wait_until_ready(batches)
                waited(clock() - asked)
                await batches.send(size, batches=min(at_once, request.credits - first))
            for wanted, own in zip_longest(request.rows, request.own_rows):
                await batches.send(wanted, own=own)
            request = await _read_next(batches.context)

    async def _wait_until_ready(self, batches: Batches) -> None:
        source, store, min_size = batches.source, self._run.store, self._run.min_size
        while (missing := source.shortage(min_size)) is not None:
            batches.require_valid()
            answer = replay_pb2.SampleResponse()
            answer.waiting.size, answer.waiting.min_size = len(store.ring), min_size
            answer.waiting.reason = f"waiting for {missing}"
            await batches.context.write(answer)
            agent_id = batches.header.stream.agent_id
            with self._changed.of({agent_id}) as changed, suppress(TimeoutError):
                async with asyncio.timeout(WAITING_EVERY_S):
                    while source.shortage(min_size) is not None:
                        changed.clear()
                        await changed.wait()


class PacedBatches:
    """Serves the credits of one stream whose agent's updates and steps keep a pace.

    Requests are read while batches wait, for they say which updates were made.
    """

    def __init__(self, batches: Batches, gate: Gate, limiter: StepLimiter, changed: Changes) -> None:
        self._batches, self._gate, self._limiter, self._changed = batches, gate, limiter, changed
        self._credits = 0
        self._said_at = -WAITING_EVERY_S

    async def serve(self, request: Any) -> None:
        """Serves until the client has ended its side and every credit is used."""
        with self._changed.of({self._gate.agent_id}) as changed:
            await self._serve(request, changed)

    async def _serve(self, request: Any, changed: asyncio.Event) -> None:
        reading: asyncio.Future[Any] | None = None
        self._take(request)
        ended = False
        try:
            while not ended or self._owes:
                changed.clear()
                why = self._why_no_batch()
                if why is None:
                    await self._send()
                    continue
                if reading is None and not ended:
                    reading = asyncio.ensure_future(_read_next(self._batches.context))
                if self._owes:
                    await self._say(why)
                await self._until_moved(reading, changed)
                self._batches.require_valid()
                if reading is not None and reading.done():
                    request, reading = reading.result(), None
                    ended = request is grpc.aio.EOF
                    if not ended:
                        self._take(request)
        finally:
            if reading is not None:
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading

    @property
    def _owes(self) -> bool:
        return self._credits > 0 or self._batches.again > 0

    def _why_no_batch(self) -> str | None:
        """What the next batch waits for; None if it may be drawn. One that is asked for again has no pace."""
        if self._batches.again:
            return self._batches.source.shortage(self._gate.run.min_size)
        return self._gate.why_no_batch(self._limiter) if self._credits else "no credit"

    async def _send(self) -> None:
        if self._batches.again:
            await self._batches.send_again()
            return
        self._limiter.draw()
        self._credits -= 1
        await self._batches.send(self._batches.header.batch_size)

    def _take(self, request: replay_pb2.SampleRequest) -> None:
        self._batches.take(request)
        _require_credits(request.credits)
        if request.rows or request.own_rows:
            raise MalformedError("a Sample stream with a pace gives batches for credits, not by size")
        self._credits += request.credits
        if request.used:
            self._limiter.charge(request.used)
            self._changed.tell(self._gate.agent_id)

    async def _until_moved(self, reading: "asyncio.Future[Any] | None", changed: asyncio.Event) -> None:
        """Returns when a request has come or, while a batch is due, at a change."""
        waiting: set[asyncio.Future[Any]] = set() if reading is None else {reading}
        if not self._owes:
            await asyncio.wait(waiting)
            return
        moved = asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait(
                {*waiting, moved}, timeout=WAITING_EVERY_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            moved.cancel()

    async def _say(self, why: str) -> None:
        """Says what is waited for, at most once a second."""
        now = asyncio.get_running_loop().time()
        if now - self._said_at < WAITING_EVERY_S:
            return
        self._said_at = now
        answer = replay_pb2.SampleResponse()
        answer.waiting.reason = f"waiting for {why}"
        await self._batches.context.write(answer)


async def _read_next(context: Context) -> Any:
    """A request that is not the stream's first, or `grpc.aio.EOF`."""
    request = await read(context)
    if request is not grpc.aio.EOF and request.HasField("header"):
        raise MalformedError("only the first request of a Sample stream carries a header")
    return request


def _limiter(header: replay_pb2.SampleHeader) -> StepLimiter:
    """What the pace of a stream begins with."""
    said = header.pace
    pace = Pace(
        said.updates_per_step,
        said.step_error_buffer,
        first_steps=said.first_steps,
        collected_before=said.collected_before,
    )
    return StepLimiter(pace, used=said.used, held=said.held, own_rows_only=header.own_rows_only)


def _sampling(header: replay_pb2.SampleHeader) -> Sampling:
    """How the batches of a stream are drawn.

    Raises:
        MalformedError: they cannot be drawn like that.
    """
    share = header.own_share if header.HasField("own_share") else None
    weighed = _prioritisation(header.prioritisation) if header.HasField("prioritisation") else None
    if header.own_rows_only and (share is not None or weighed is not None):
        raise MalformedError("a Sample stream with own_rows_only has no own_share and no prioritisation")
    if share is not None and not 0 <= share <= 1:
        raise MalformedError(f"own_share is a share of a batch, from 0 to 1, not {share:g}")
    return Sampling(header.own_rows_only, share, weighed)


def _prioritisation(said: replay_pb2.Prioritisation) -> Prioritisation:
    alpha, epsilon, uniform = said.alpha, said.epsilon, said.uniform_share
    if not (0 <= alpha <= 1 and 0 <= uniform <= 1 and 0 <= epsilon < math.inf):
        raise MalformedError(
            f"priorities take an alpha from 0 to 1, an epsilon of at least 0 and a uniform_share from 0 to "
            f"1, not {alpha:g}, {epsilon:g} and {uniform:g}"
        )
    return Prioritisation(alpha, epsilon, uniform)


def _batches_per_frame(header: replay_pb2.SampleHeader, row_bytes: int) -> int:
    """How many batches a frame holds where as many credits are there, and a row takes so much of it."""
    if header.own_rows_only:  # what rejection draws depends on how many are drawn at once
        return 1
    fitting = ROWS_BYTES // (header.batch_size * row_bytes)
    return max(1, min(header.batches_per_frame, fitting))


def _require_batch_size(batch_size: int, *, row_bytes: int) -> None:
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise MalformedError(f"a batch has 1 to {MAX_BATCH_SIZE} transitions, not {batch_size}")
    if batch_size * row_bytes > MAX_BATCH_BYTES:
        raise MalformedError(
            f"a batch has at most {MAX_BATCH_BYTES} bytes, not {batch_size} transitions of {row_bytes}"
        )


def _require_credits(credits: int) -> None:
    if credits > MAX_CREDITS:
        raise MalformedError(f"a request grants at most {MAX_CREDITS} credits, not {credits}")


def _require_sizes(sizes: Sequence[int], batch_size: int) -> None:
    if len(sizes) > MAX_CREDITS:
        raise MalformedError(f"a request asks for at most {MAX_CREDITS} batches by size, not {len(sizes)}")
    if sizes and not 1 <= min(sizes) <= max(sizes) <= batch_size:
        raise MalformedError(f"a batch asked for by size has 1 to {batch_size} transitions on this stream")


def _require_own(request: replay_pb2.SampleRequest, *, has_share: bool) -> None:
    own, sizes = request.own_rows, request.rows
    if own and not (has_share and len(own) == len(sizes) and all(map(int.__le__, own, sizes))):
        raise MalformedError(
            "own_rows says for each batch asked for by size how many of its rows are the agent's own, on a "
            "stream with an own_share; here it does not"
        )
