"""Streams of a service: how many are open, what they wait for, and how they end."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

from dase_grpc.errors import DrainingError, OverloadedError, RefusalError
from dase_grpc.pace import StepLimiter
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.buffer.sampling import shortage
from dase_grpc.replay.buffer.store import ReplayStore
from dase_grpc.replay.security.door import require_agent
from dase_grpc.replay.wire.status import ADMITTED_KEY, Context
from dase_grpc.replay.wire.v1 import replay_pb2

T = TypeVar("T")

MAX_AGENT_STREAMS: Final = 96
"""Streams of one kind that one agent may have open: its learner, 64 actors, and some that died unnoticed."""

MAX_AGENT_HELD_BYTES: Final = 256 * 2**20
MAX_HELD_BYTES: Final = 2**30

CALLS_END_S: Final = 5.0
"""How long calls that were cut off may take to end once the server has; they do so at once."""


@dataclass(eq=False)
class _Stream:
    """An open stream; `end` is set to what it is to end with, whatever its body waits for."""

    end: asyncio.Future[RefusalError]
    require_valid: Callable[[], object] = lambda: None
    telling: asyncio.Future[None] | None = None

    def end_with(self, refusal: RefusalError) -> None:
        if not self.end.done():
            self.end.set_result(refusal)


class Streams:
    """The open streams of a service, and their end. Lives on one event loop.

    A stream that only waits does not find out by itself that it may not go on: `look` does.

    Attributes:
        open_streams: how many are open, by the names of the calls, which are those given.
    """

    def __init__(self, run: SharedRun, *rpcs: str) -> None:
        self.open_streams = dict.fromkeys(rpcs, 0)
        self._run = run
        self._streams: dict[Context, _Stream] = {}
        self._draining = False

    def drain(self) -> None:
        """Ends every open stream, and every one to come, with DrainingError."""
        self._draining = True
        for stream in self._streams.values():
            stream.end_with(_shutting_down())

    def look(self) -> None:
        """Ends the open streams that may not go on, those that idle included."""
        for stream in list(self._streams.values()):
            try:
                stream.require_valid()
            except RefusalError as refusal:
                stream.end_with(refusal)

    def admit(self, context: Context, header: replay_pb2.StreamHeader) -> ReplayStore:
        """The store, for an open stream of a caller that may have it; `look` finds its lease stale."""
        require_agent(header.agent_id)
        store = self._run.require_stream(
            run_id=header.run_id,
            agent_id=header.agent_id,
            epoch=header.lease_epoch,
            fingerprint=header.schema_fingerprint,
            buffer_id=header.buffer_id,
        )
        self.require(context, partial(self._run.leases.require, header.agent_id, header.lease_epoch))
        return store

    def require(self, context: Context, valid: Callable[[], object]) -> None:
        """Has `look` call `valid`, which raises the refusal that an open stream is to end with."""
        self._streams[context].require_valid = valid

    async def admitted(self, context: Context) -> None:
        """Tells the client that its stream is served, once nothing refuses it and before its first message.

        A client whose streams are refused at once must not take the service for one that answers again. And
        metadata that go out with the first message would leave a stream that ends in between without status.
        """
        metadata = ((ADMITTED_KEY, "1"),)
        stream = self._streams[context]
        stream.telling = asyncio.ensure_future(context.send_initial_metadata(metadata))
        await asyncio.shield(stream.telling)

    async def serve(
        self, context: Context, body: Callable[[Context], Coroutine[Any, Any, T]], *, rpc: str
    ) -> T:
        """Runs a stream's body to its end, or until the service ends it; the body has ended then."""
        self.open_streams[rpc] += 1
        try:
            return await self._serve(context, body)
        finally:
            self.open_streams[rpc] -= 1

    async def _serve(self, context: Context, body: Callable[[Context], Coroutine[Any, Any, T]]) -> T:
        if self._draining:
            raise _shutting_down()
        stream = self._streams[context] = _Stream(asyncio.get_running_loop().create_future())
        running = asyncio.ensure_future(body(context))
        try:
            await asyncio.wait((running, stream.end), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise stream.end.result()
            return running.result()
        finally:
            del self._streams[context]
            running.cancel()
            stream.end.cancel()
            await asyncio.gather(running, return_exceptions=True)
            if stream.telling is not None:  # the status cannot be sent in the middle of it
                await asyncio.gather(stream.telling, return_exceptions=True)


def _shutting_down() -> DrainingError:
    return DrainingError("the replay service is shutting down")


async def calls_ended() -> None:
    """Waits until all other tasks have ended, those of calls that were still open after the server's grace.

    gRPC does not wait for them. A loop that ended earlier would cancel them once more, and gRPC would write
    a traceback for each, past the log.
    """
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=CALLS_END_S)


class Admission:
    """Counts the open streams of one kind. A stream is admitted for as long as the block lasts.

    `held_bytes` is what a stream can make the service hold: a batch, while its client does not read.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._streams: Counter[int] = Counter()
        self._held: Counter[int] = Counter()

    @contextmanager
    def stream(self, agent_id: int, *, held_bytes: int = 0) -> Iterator[None]:
        """Admits a stream of an agent."""
        self._require_room(agent_id, held_bytes)
        self._streams[agent_id] += 1
        self._held[agent_id] += held_bytes
        try:
            yield
        finally:
            self._held[agent_id] -= held_bytes
            self._streams[agent_id] -= 1
            if not self._streams[agent_id]:
                del self._streams[agent_id], self._held[agent_id]

    def _require_room(self, agent_id: int, held_bytes: int) -> None:
        if self._streams[agent_id] >= MAX_AGENT_STREAMS:
            raise OverloadedError(
                f"agent {agent_id} has {MAX_AGENT_STREAMS} {self._what} streams open, as many as the service "
                f"takes; end some"
            )
        for held, limit, whose in (
            (self._held[agent_id], MAX_AGENT_HELD_BYTES, f"of agent {agent_id}"),
            (self._held.total(), MAX_HELD_BYTES, "of all agents"),
        ):
            if held + held_bytes > limit:
                raise OverloadedError(
                    f"the batches of open {self._what} streams {whose} would take {held + held_bytes} bytes, "
                    f"over the limit of {limit}; end some streams, or ask for smaller batches"
                )


class Changes:
    """What streams wait for changes, of one agent or of all; each wakes at changes of its own agents alone.

    Every agent's streams tell of changes and wait for some, so to wake all of them each time would be K².
    """

    def __init__(self) -> None:
        self._of: defaultdict[int, set[asyncio.Event]] = defaultdict(set)
        self._of_any: set[asyncio.Event] = set()

    @contextmanager
    def of(self, agent_ids: Collection[int]) -> Iterator[asyncio.Event]:
        """An event that each change of these agents sets, or of any where none is named, within the block.

        Whoever waits clears it before the look that the wait follows.
        """
        changed = asyncio.Event()
        kept = [self._of[agent_id] for agent_id in agent_ids] or [self._of_any]
        for waiting in kept:
            waiting.add(changed)
        try:
            yield changed
        finally:
            for waiting in kept:
                waiting.discard(changed)

    def tell(self, agent_id: int) -> None:
        """Wakes everybody who waits for a change of this agent."""
        for changed in (*self._of[agent_id], *self._of_any):
            changed.set()

    def tell_all(self) -> None:
        """Wakes everybody who waits."""
        for changed in chain(self._of_any, *self._of.values()):
            changed.set()


@dataclass(frozen=True)
class Gate:
    """What one agent's next transition, or next batch, waits for where actors and updates keep a pace."""

    run: SharedRun
    agent_id: int

    def room(self, *, paced: bool) -> int | None:
        """How many transitions may be stored now; None where nothing limits that.

        What is missing before a batch can be drawn at all need not wait, for batches could not come either.
        `paced` writers wait for the learner to say its pace.
        """
        limiter = self.run.limiters.get(self.agent_id)
        if limiter is None:
            return 0 if paced else None
        ring = self.run.store.ring
        missing = self.run.min_size - len(ring)
        if limiter.own_rows_only and not ring.count_of(self.agent_id):
            missing = max(missing, 1)
        return max(limiter.room(self._collected), missing)

    def why_full(self) -> str:
        """What a transition for which there is no room waits for."""
        limiter = self.run.limiters.get(self.agent_id)
        if limiter is None:
            return f"the learner of agent {self.agent_id} to say its pace"
        return (
            f"updates of agent {self.agent_id}, whose actors are ahead by as many environment steps as "
            f"train.step_error_buffer allows, {limiter.pace.step_error_buffer}"
        )

    def why_no_batch(self, limiter: StepLimiter) -> str | None:
        """What a batch waits for; None if it may be drawn."""
        agent_id, missing = self.agent_id, limiter.missing(self._collected)
        if missing and not self.run.attendance.has_actor(agent_id):
            return f"an actor of agent {agent_id}: start one with `dase node --role actor --agent {agent_id}`"
        if missing:
            return f"{missing} more environment steps of the actors of agent {agent_id}"
        latest = self.run.limiters.get(agent_id)
        own = latest is not None and latest.own_rows_only
        return shortage(self.run.store.ring, self.run.min_size, agent_id=agent_id, own_rows_only=own)

    @property
    def _collected(self) -> int:
        return self.run.store.traffic.inserted[self.agent_id]
