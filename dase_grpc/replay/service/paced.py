"""Streams of an agent whose updates and steps keep a pace: which of them waits, and for what."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import grpc

from dase_grpc.errors import MalformedError
from dase_grpc.pace import Pace, StepLimiter
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.service.interceptors import read
from dase_grpc.replay.wire.status import Context
from dase_grpc.replay.wire.v1 import replay_pb2

MAX_CREDITS: Final = 1_024
SAY_EVERY_S: Final = 1.0


class Change:
    """Something that streams wait for has changed; each waits for the next change after its look.

    Whoever lets others run between its look and its wait takes `next` before the look.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Wakes everybody who waits."""
        self._event.set()
        self._event = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Set at the next change."""
        return self._event

    async def wait(self) -> None:
        """Returns at the next change."""
        await self._event.wait()


class Gate:
    """What one agent's next transition, or next batch, waits for. Lives on the service's event loop.

    Attributes:
        agent_id: whose.
    """

    def __init__(self, run: SharedRun, agent_id: int) -> None:
        self.agent_id = agent_id
        self._run = run

    def room(self, *, paced: bool) -> int | None:
        """How many transitions may be stored now; None where nothing limits that.

        What is missing before a batch can be drawn at all need not wait, for batches could not come either.
        `paced` writers wait for the learner to say its pace.
        """
        limiter = self._run.limiters.get(self.agent_id)
        if limiter is None:
            return 0 if paced else None
        ring = self._run.store.ring
        missing = self._run.min_size - len(ring)
        if limiter.own_rows_only and not ring.count_of(self.agent_id):
            missing = max(missing, 1)
        return max(limiter.room(self._collected), missing)

    def why_full(self) -> str:
        """What a transition for which there is no room waits for."""
        limiter = self._run.limiters.get(self.agent_id)
        if limiter is None:
            return f"the learner of agent {self.agent_id} to say its pace"
        return (
            f"updates of agent {self.agent_id}, whose actors are ahead by as many environment steps as "
            f"train.step_error_buffer allows, {limiter.pace.step_error_buffer}"
        )

    def why_no_batch(self, limiter: StepLimiter) -> str | None:
        """What a batch waits for; None if it may be drawn."""
        missing = limiter.missing(self._collected)
        if missing and not self._run.attendance.has_actor(self.agent_id):
            return (
                f"an actor of agent {self.agent_id}: start one with `dase node --role actor --agent "
                f"{self.agent_id}`"
            )
        if missing:
            return f"{missing} more environment steps of the actors of agent {self.agent_id}"
        return self._shortage()

    @property
    def _collected(self) -> int:
        return self._run.store.traffic.inserted[self.agent_id]

    def _shortage(self) -> str | None:
        limiter = self._run.limiters.get(self.agent_id)
        own = limiter is not None and limiter.own_rows_only
        return self._run.store.shortage(self._run.min_size, agent_id=self.agent_id, own_rows_only=own)


def limiter_of(header: replay_pb2.SampleHeader) -> StepLimiter:
    """What the pace of a Sample stream begins with.

    Raises:
        MalformedError: it is no pace.
    """
    said = header.pace
    pace = Pace(
        said.updates_per_step,
        said.step_error_buffer,
        first_steps=said.first_steps,
        collected_before=said.collected_before,
    )
    return StepLimiter(pace, used=said.used, held=said.held, own_rows_only=header.own_rows_only)


def require_no_header(request: replay_pb2.SampleRequest) -> None:
    """Checks a request of a Sample stream that is not its first.

    Raises:
        MalformedError: it carries a header.
    """
    if request.HasField("header"):
        raise MalformedError("only the first request of a Sample stream carries a header")


class PacedBatches:
    """Serves the credits of one Sample stream with a pace.

    Requests are read while batches wait, for they say which updates were made.

    Args:
        draw: sends one batch.
        require_valid: raises where the stream may not go on.
    """

    def __init__(
        self,
        context: Context,
        gate: Gate,
        limiter: StepLimiter,
        *,
        changed: Change,
        draw: Callable[[], Awaitable[None]],
        require_valid: Callable[[], object],
    ) -> None:
        self._context = context
        self._gate = gate
        self._limiter = limiter
        self._changed = changed
        self._draw = draw
        self._require_valid = require_valid
        self._credits = 0
        self._said_at = -SAY_EVERY_S

    async def serve(self, request: Any) -> None:
        """Serves until the client has ended its side and every credit is used.

        Raises:
            MalformedError: a request is none of such a stream.
        """
        reading: asyncio.Future[Any] | None = None
        self._take(request)
        ended = False
        try:
            while not ended or self._credits:
                change = self._changed.next
                why = self._gate.why_no_batch(self._limiter) if self._credits else "no credit"
                if why is None:
                    self._limiter.draw()
                    self._credits -= 1
                    await self._draw()
                    continue
                if reading is None and not ended:
                    reading = asyncio.ensure_future(read(self._context))
                if self._credits:
                    await self._say(why)
                await self._until_moved(reading, change)
                self._require_valid()
                if reading is not None and reading.done():
                    request, reading = reading.result(), None
                    ended = request is grpc.aio.EOF
                    if not ended:
                        require_no_header(request)
                        self._take(request)
        finally:
            if reading is not None:
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading

    def _take(self, request: replay_pb2.SampleRequest) -> None:
        if request.credits > MAX_CREDITS:
            raise MalformedError(f"a request grants at most {MAX_CREDITS} credits, not {request.credits}")
        if request.rows:
            raise MalformedError("a Sample stream with a pace gives batches for credits, not by size")
        self._credits += request.credits
        if request.used:
            self._limiter.charge(request.used)
            self._changed.tell()

    async def _until_moved(self, reading: "asyncio.Future[Any] | None", change: asyncio.Event) -> None:
        """Returns when a request has come or, while a batch is due, at the change."""
        waiting: set[asyncio.Future[Any]] = set() if reading is None else {reading}
        if not self._credits:
            await asyncio.wait(waiting)
            return
        moved = asyncio.ensure_future(change.wait())
        try:
            await asyncio.wait({*waiting, moved}, timeout=SAY_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()

    async def _say(self, why: str) -> None:
        """Says what is waited for, at most once a second."""
        now = asyncio.get_running_loop().time()
        if now - self._said_at < SAY_EVERY_S:
            return
        self._said_at = now
        answer = replay_pb2.SampleResponse()
        answer.waiting.reason = f"waiting for {why}"
        await self._context.write(answer)
