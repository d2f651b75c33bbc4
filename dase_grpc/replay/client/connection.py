"""A node's connection to its replay: streams that break begin again, until it has been away too long."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final, Self

from grpc import StatusCode
from grpc.aio import Channel

from dase_grpc.errors import (
    AgentTakenError,
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
from dase_grpc.progress import Progress, several
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget
from dase_grpc.replay.client.patience import AWAY
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.status import STATUS
from dase_grpc.replay.wire.v1 import replay_pb2

AWAY_AFTER_S: Final = 2.0
"""A replay whose streams are broken for longer counts as away; a shorter break is just waited for."""

LOOK_EVERY_S: Final = 30.0
"""How often it is looked whether a replay is away because of the credentials."""

STOPPING_S: Final = 3.0
"""How long a learner that has been told to stop still tries to reach its replay."""

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


class Away(StrEnum):
    """Why a replay does not serve."""

    UNREACHABLE = "unreachable"
    OVERLOADED = "overloaded"
    DRAINED = "drained"

    @classmethod
    def of(cls, error: RefusalError) -> Self:
        """What a refusal says of its replay."""
        if isinstance(error, DrainingError):
            return cls("drained")
        return cls("overloaded" if isinstance(error, OverloadedError) else "unreachable")


@dataclass(frozen=True)
class Outage:
    """Since when (monotonic seconds) the replay does not serve, why, and with which status that began."""

    since: float
    why: Away
    code: str = StatusCode.UNAVAILABLE.name

    def __str__(self) -> str:
        seconds = f"{time.monotonic() - self.since:.0f} s"
        if self.why is Away.DRAINED:
            return f"shut down {seconds} ago"
        if self.why is Away.OVERLOADED:
            return f"has been overloaded for {seconds}"
        return f"has not answered for {seconds}"

    def next(self, why: Away) -> "Outage":
        """The same outage after one more failure; a replay that shut down is silent because it did."""
        gone = self.why is Away.DRAINED and why is Away.UNREACHABLE
        return self if gone else replace(self, why=why)


class Connection:
    """What all streams of a learner share: who it is at its replay, and what to do when one breaks.

    `keep` runs a stream and begins it again, after a pause that grows (`Backoff`), when the connection
    broke or the replay is shutting down. It gives up when that stream has been broken for `timeout_s`,
    0 being at the first failure. If the replay came back without its data, the learner joins again under
    the same agent id, once for all its streams. If another node has the id, the learner is fenced off:
    StaleLeaseError, for good.

    Lives on the event loop, but for `outage`, `losses` and `followers`, which any thread may read.

    Args:
        target: where the learner has joined.
        node_name: the name to join again under.
        timeout_s: how long the replay may be away.
        accept: checks a new membership, and raises what ends the learner.
        metrics: counts what happens.
        rng: draws the pauses.
        look_why_away: raises UnauthenticatedError where the replay is away because of the credentials.

    Attributes:
        stopping: the learner is to end, so the replay is waited for only briefly.
        losses: how often the replay came back without transitions it had.
        buffer_size: how many the buffer held when it was last heard of.
        buffer: what was last heard of it; another object whenever something was heard.
        needed: whether the node cannot go on without it, so that waiting for it has a limit.
        followers: how many wanted the agent's policy then; none while nothing is heard.
    """

    def __init__(
        self,
        target: StreamTarget,
        *,
        node_name: str = "learner",
        timeout_s: float = 0.0,
        accept: Callable[[Membership], None] = lambda member: None,
        metrics: StreamMetrics | None = None,
        rng: random.Random | None = None,
        look_why_away: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._look_why_away = look_why_away
        self._looked_at = -LOOK_EVERY_S
        self.target = target
        self.outage: Outage | None = None
        self.stopping = False
        self.losses = 0
        self.followers = 0
        self.incarnation = target.member.incarnation
        self._cluster = ClusterClient(target.channel, target.address)
        self._node_name = node_name
        self._timeout_s = timeout_s
        self._accept = accept
        self._metrics = metrics
        self._rng = rng or random.Random()
        self._broken: dict[Stream, Outage] = {}
        self._rejoining = asyncio.Lock()
        self.buffer_size = target.member.buffer_size
        self.buffer = target.member.buffer
        self.needed: Callable[[], bool] = lambda: True
        self._on_restart: list[Callable[[], None]] = []

    @property
    def away(self) -> Outage | None:
        """The outage under way, if it has lasted for longer than `AWAY_AFTER_S`."""
        outage = self.outage
        return outage if outage and time.monotonic() - outage.since > AWAY_AFTER_S else None

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
        self._cluster = ClusterClient(channel, address)

    async def keep(self, stream: Stream, once: Callable[[StreamTarget], Awaitable[None]]) -> None:
        """Runs `once`, which opens a stream and calls `up` when the replay has answered, until it returns.

        Raises:
            UnreachableError, DrainingError: the replay was away for too long.
            StaleLeaseError: another node has the agent id.
            Exception: whatever else ended the stream.
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
                await self._rejoin(stream, target, backoff)
            except PASSING as error:
                _require_not_cancelled(error)
                if stream not in self._broken and time.monotonic() - began > LONGEST_PAUSE_S:
                    backoff.reset()
                self._down(stream, error)
                await self._say_why_away()
                await asyncio.sleep(backoff.next_s())

    async def _say_why_away(self) -> None:
        """Says whether it is the credentials; new ones may still come, so this is no reason to end."""
        now = time.monotonic()
        if self._look_why_away is None or self.away is None or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            await self._look_why_away()
        except UnauthenticatedError as error:
            log.warning("%s", error)

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

    async def heartbeats(self, progress: Callable[[], Progress], *, every_s: float) -> None:
        """Renews the lease and reports progress until cancelled.

        Raises:
            RefusalError: see `keep`.
        """
        await self.keep(Stream.HEARTBEAT, partial(self._beat, progress, every_s))

    async def _beat(self, progress: Callable[[], Progress], every_s: float, _: StreamTarget) -> None:
        while True:
            member = self.target.member
            answer = await self._cluster.heartbeat(member, progress())
            self.up(Stream.HEARTBEAT)
            self.followers = answer.followers
            self._notice(answer.buffer)
            await asyncio.sleep(min(every_s, member.ttl_s / 4))

    def lost(self, sentence: str) -> None:
        """Notes that the replay came back without transitions it had."""
        self.losses += 1
        if self._metrics is not None:
            self._metrics.losses.inc()
        log.warning("%s", sentence)

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
        """Notes that a stream is broken.

        Raises:
            RefusalError: it has been for too long.
        """
        now = time.monotonic()
        why = Away.of(error)
        outage = self._broken.get(stream, Outage(now, why, STATUS[type(error)].name)).next(why)
        lasted, limit_s = now - outage.since, self._limit_s(error)
        if lasted >= limit_s and self.needed():
            if not lasted:
                raise error
            raise type(error)(f"gave up after {lasted:.0f} s: {error}") from error
        if not self._broken:
            log.info("%s; trying again for up to %g s", error, limit_s)
        self._broken[stream] = outage
        if stream is Stream.HEARTBEAT:
            self.followers = 0
        self._note_outage()

    def _limit_s(self, error: RefusalError) -> float:
        if not self.stopping:
            return self._timeout_s
        return 0.0 if isinstance(error, DrainingError) else min(self._timeout_s, STOPPING_S)

    def _note_outage(self) -> None:
        broken = self._broken.values()
        if not broken:
            self.outage = None
            return
        gravity = [Away.UNREACHABLE, Away.OVERLOADED, Away.DRAINED]
        why = max((outage.why for outage in broken), key=gravity.index)
        self.outage = Outage(min(outage.since for outage in broken), why)

    async def _replaced(self, target: StreamTarget, error: StaleLeaseError) -> None:
        """Ends the learner, because the lease that `target` works under is not valid any more."""
        raise self._fenced(error) from error

    async def _rejoin(self, stream: Stream, target: StreamTarget, backoff: Backoff) -> None:
        """Joins a replay that holds another buffer, under the same agent id, if no other stream has."""
        async with self._rejoining:
            if self.target is not target:
                return
            before = target.member
            try:
                member = await self._cluster.join(
                    node_name=self._node_name,
                    schema=target.schema,
                    agent_id=before.agent_id,
                    run_id=before.run_id,
                    lost_buffer_id=before.buffer_id,
                    node_id=before.node_id,
                )
            except AWAY as error:
                self._down(stream, error)
                await asyncio.sleep(backoff.next_s())
                return
            except AgentTakenError as error:
                raise self._fenced(error) from error
            self._accept(member)
            self.target = replace(target, member=member)
            self.lost(
                f"the replay service at {target.address} came back without its data (incarnation "
                f"{member.incarnation}, was {self.incarnation}): the {self.buffer_size} transitions of the "
                f"run that it held are gone; joined again as agent {member.agent_id} (epoch {member.epoch}), "
                f"the buffer fills up anew"
            )
            self.buffer_size = member.buffer_size
            self.buffer = member.buffer
            self._restarted(member.incarnation)

    def _fenced(self, error: RefusalError) -> StaleLeaseError:
        agent_id = self.target.member.agent_id
        return StaleLeaseError(
            f"fenced off: agent {agent_id} belongs to another node now, so this one ends and stores "
            f"nothing more ({str(error).partition('; ')[0]})"
        )


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
