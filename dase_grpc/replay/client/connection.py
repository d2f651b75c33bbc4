"""A node's connection to one shard: streams that break begin again, until it is away too long."""

import asyncio
import logging
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final, Self

from grpc import StatusCode
from grpc.aio import Channel

from dase_grpc.errors import (
    BufferGoneError,
    DrainingError,
    NotJoinedError,
    OverloadedError,
    RefusalError,
    StaleLeaseError,
    UnauthenticatedError,
)
from dase_grpc.metrics.nodes import StreamMetrics
from dase_grpc.pace import LONGEST_PAUSE_S, Backoff
from dase_grpc.process.tasks import first_cause
from dase_grpc.progress import several
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.handoff import USUAL, Times
from dase_grpc.replay.client.patience import AWAY
from dase_grpc.replay.wire.status import STATUS
from dase_grpc.replay.wire.v1 import replay_pb2

LOOK_EVERY_S: Final = 30.0
"""How often it is looked whether a replay is away because of the credentials."""

ALWAYS: Final = -math.inf
"""Since when whatever has no beginning holds."""

PASSING: Final = (*AWAY, NotJoinedError)
"""What a new attempt may put right."""

log = logging.getLogger("dase")


class Stream(StrEnum):
    """What a learner keeps open; a label of a metric, so their number is fixed."""

    HEARTBEAT = "heartbeat"
    INSERT = "insert"
    SAMPLE = "sample"
    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"


OF_POLICIES: Final = frozenset({Stream.PUBLISH, Stream.SUBSCRIBE})
"""A shard that refuses these alone still serves."""


class Away(StrEnum):
    """Why a replay does not serve; the gravest comes last."""

    UNREACHABLE = "unreachable"
    OVERLOADED = "overloaded"
    DRAINED = "drained"

    @classmethod
    def of(cls, error: RefusalError) -> Self:
        """What a refusal says of its replay."""
        known = {DrainingError: "drained", OverloadedError: "overloaded"}
        return cls(known.get(type(error), "unreachable"))


@dataclass(frozen=True)
class Outage:
    """Since when (monotonic seconds) the replay does not serve, why, and with which status that began."""

    since: float
    why: Away
    code: str = StatusCode.UNAVAILABLE.name

    def __str__(self) -> str:
        told = {Away.DRAINED: "shut down {} ago", Away.OVERLOADED: "has been overloaded for {}"}
        seconds = f"{time.monotonic() - self.since:.0f} s"
        return told.get(self.why, "has not answered for {}").format(seconds)

    def next(self, why: Away) -> "Outage":
        """The same outage after one more failure; a replay that shut down is silent because it did."""
        gone = self.why is Away.DRAINED and why is Away.UNREACHABLE
        return self if gone else replace(self, why=why)


class Connection(ABC):
    """What all streams of a node to one shard share: who it is there, and what to do when one breaks.

    What the end of a lease or of a buffer means is each role's own (membership.py); here it is the end.
    Lives on the event loop, but for `outage`, `losses` and `followers`, which any thread may read.

    Attributes:
        losses: how often the replay came back without transitions it had.
        buffer: what was last heard of it; another object whenever something was heard.
        inserted_by_agent: transitions of each agent that were ever stored, where the node asks for that.
        needed_since: since when (monotonic seconds) the node cannot go on without it, so that waiting for
            it has a limit; None while it can.
        followers: how many wanted the agent's policy then.
    """

    def __init__(
        self,
        target: StreamTarget,
        *,
        timeout_s: float = 0.0,
        metrics: StreamMetrics | None = None,
        rng: random.Random | None = None,
        look_why_away: Callable[[], Awaitable[None]] | None = None,
        timing: Times = USUAL,
    ) -> None:
        self.target = target
        self.timing = timing
        self.outage: Outage | None = None
        self.stopping_since: float | None = None
        self.losses = 0
        self.followers = 0
        self.incarnation = target.member.incarnation
        self.buffer_size = target.member.buffer_size
        self.buffer = target.member.buffer
        self.inserted_by_agent: Mapping[int, int] = {}
        self.needed_since: Callable[[], float | None] = lambda: ALWAYS
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._rng = rng or random.Random()
        self._look_why_away = look_why_away
        self._looked_at = -LOOK_EVERY_S
        self._broken: dict[Stream, Outage] = {}
        self._on_restart: list[Callable[[], None]] = []

    @property
    def away(self) -> Outage | None:
        """The outage under way, if it has lasted for so long that the replay counts as away."""
        outage = self.outage
        return outage if outage and time.monotonic() - outage.since > self.timing.away_after_s else None

    @property
    def unserved_since(self) -> float | None:
        """Since when it takes no heartbeats or rows, or sends no batches; None if it does."""
        broken = self._broken.items()
        return min((each.since for stream, each in broken if stream not in OF_POLICIES), default=None)

    def note_stopping(self) -> None:
        """Notes that the node is to end, so that the replay is waited for only briefly from now on."""
        if self.stopping_since is None:
            self.stopping_since = time.monotonic()

    def inserted_of(self, agent_id: int) -> int:
        """Transitions of an agent that were ever stored, when the replay was last heard of."""
        return self.buffer.inserted_by_agent.get(agent_id, 0)

    def on_restart(self, call: Callable[[], None]) -> None:
        """Has `call` called whenever the replay turns out to have been started again.

        Where it came back without its data, that is before any stream to the new buffer begins.
        """
        self._on_restart.append(call)

    def move(self, channel: Channel, address: str) -> None:
        """Goes on at another address, where the same replay is now, with each stream that begins anew."""
        log.info("the replay service at %s is at %s now", self.target.address, address)
        self.target = replace(self.target, channel=channel, address=address)

    async def keep(self, stream: Stream, once: Callable[[StreamTarget], Awaitable[None]]) -> None:
        """Runs `once`, which opens a stream and calls `up` when the replay has answered, until it returns.

        Begins it again, after a pause that grows, when the connection broke or the replay is shutting down;
        raises that once the stream has been broken for `timeout_s`, 0 being at the first failure.
        """
        backoff = Backoff(self._rng)
        while True:
            target, began = self.target, time.monotonic()
            try:
                with _gravest():
                    return await once(target)
            except StaleLeaseError as error:
                _require_not_cancelled(error)
                await self._replaced(target, error)
            except BufferGoneError as error:
                _require_not_cancelled(error)
                await self._rejoin(stream, target, error, backoff)
            except PASSING as error:
                _require_not_cancelled(error)
                if stream not in self._broken and time.monotonic() - began > LONGEST_PAUSE_S:
                    backoff.reset()
                self._down(stream, error)
                await self._say_why_away()
                await asyncio.sleep(backoff.next_s())

    def up(self, stream: Stream) -> None:
        """Notes that a stream has been answered."""
        outage = self._broken.pop(stream, None)
        if outage is None:
            return
        if self._metrics is not None:
            self._metrics.reconnected(stream, outage.code)
        if not self._broken:
            lasted = time.monotonic() - outage.since
            log.info("the replay service at %s answers again, after %.1f s", self.target.address, lasted)
        self._note_outage()

    async def heartbeats(self, say: Callable[[], Any]) -> None:
        """Reports again and again what the node does: a learner's Progress, the Attendance of others."""
        await self.keep(Stream.HEARTBEAT, partial(self._beat, say))

    def beat_s(self, asked_s: float) -> float:
        """How long the next heartbeat waits, for which the replay has asked that long or longer."""
        return min(max(self.timing.beat_s, asked_s), self.target.member.ttl_s / 4)

    def lost(self, sentence: str) -> None:
        """Notes that the replay came back without transitions it had."""
        self.losses += 1
        if self._metrics is not None:
            self._metrics.losses.inc()
        log.warning("%s", sentence)

    async def _beat(self, say: Callable[[], Any], _: StreamTarget) -> None:
        while True:
            answer = await self._report(say())
            self.up(Stream.HEARTBEAT)
            self._heard(answer)
            await asyncio.sleep(self.beat_s(answer.beat_seconds))

    @abstractmethod
    async def _report(self, said: Any) -> Any:
        """Reports what the node does; returns the replay's answer, which `_heard` takes."""

    @abstractmethod
    def _heard(self, answer: Any) -> None:
        """Takes what the replay has answered to a report."""

    async def _replaced(self, target: StreamTarget, error: StaleLeaseError) -> None:
        """Ends the node, or finds it another lease than that of `target`, which is not valid any more."""
        raise error

    async def _rejoin(
        self, stream: Stream, target: StreamTarget, error: BufferGoneError, backoff: Backoff
    ) -> None:
        """Ends the node, or has it let in anew where the replay holds another buffer."""
        raise error

    async def _say_why_away(self) -> None:
        now = time.monotonic()
        if self._look_why_away is None or self.away is None or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            await self._look_why_away()
        except UnauthenticatedError as error:
            log.warning("%s", error)

    def _notice(self, state: replay_pb2.BufferState) -> None:
        self.buffer_size, self.buffer = state.size, state
        if state.incarnation != self.incarnation:
            log.info(
                "the replay service at %s was started again (incarnation %s, was %s), holding %s",
                self.target.address,
                state.incarnation,
                self.incarnation,
                several(state.size, "transition"),
            )
            self._restarted(state.incarnation)

    def _restarted(self, incarnation: str) -> None:
        self.incarnation = incarnation
        for call in self._on_restart:
            call()

    def _down(self, stream: Stream, error: RefusalError) -> None:
        """Notes that a stream is broken; raises the error if it has been for too long."""
        now = time.monotonic()
        why = Away.of(error)
        outage = self._broken.get(stream, Outage(now, why, STATUS[type(error)].name)).next(why)
        lasted, limit_s = self._missed_s(outage, now), self._limit_s(error)
        if lasted is not None and lasted >= limit_s:
            if not lasted:
                raise error
            raise type(error)(f"gave up after {lasted:.0f} s: {error}") from error
        if not self._broken:
            log.info("%s; trying again for up to %g s", error, limit_s)
        self._broken[stream] = outage
        if stream is Stream.HEARTBEAT:
            self.followers = 0
        self._note_outage()

    def _missed_s(self, outage: Outage, now: float) -> float | None:
        """How long a stream that is broken has been waited for; None where the node can go on without."""
        needed_since, stopping_since = self.needed_since(), self.stopping_since
        if needed_since is None:
            return None
        return now - max(outage.since, needed_since, ALWAYS if stopping_since is None else stopping_since)

    def _limit_s(self, error: RefusalError) -> float:
        if self.stopping_since is None:
            return self._timeout_s
        return 0.0 if isinstance(error, DrainingError) else min(self._timeout_s, self.timing.stopping_s)

    def _note_outage(self) -> None:
        broken = self._broken.values()
        if not broken:
            self.outage = None
            return
        why = max((outage.why for outage in broken), key=list(Away).index)
        self.outage = Outage(min(outage.since for outage in broken), why)


def _require_not_cancelled(error: RefusalError) -> None:
    """Raises the cancellation that a task group dropped because one of its tasks failed just then."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from error


@contextmanager
def _gravest() -> Iterator[None]:
    """`first_cause`, but of several refusals raises one that no new attempt would put right."""
    try:
        yield
    except ExceptionGroup as group:
        lasting = group.split(PASSING)[1]
        with first_cause():
            raise (group if lasting is None else lasting) from None
