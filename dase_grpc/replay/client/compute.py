"""A compute thread beside the streams of its node, and how both end: drained, within limits."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dase_grpc.errors import UnreachableError
from dase_grpc.process.lifecycle import HangAlarm, is_orphaned
from dase_grpc.process.tasks import first_cause, unless
from dase_grpc.progress import Progress
from dase_grpc.replay.client.cluster import Lines
from dase_grpc.replay.client.discovery import follow_name
from dase_grpc.replay.client.handoff import say_waits
from dase_grpc.replay.client.link import ReplayLink, RowLink
from dase_grpc.replay.client.policies import PolicyExchange
from dase_grpc.replay.client.shards import Shards

ORPHAN_DRAIN_S: Final = 2.0
"""What `Times.drain_s` is once the launcher is gone, whether the replay serves or not."""

FAILED_DRAIN_S: Final = 2.0
"""The same for the rows of a node whose thread has failed."""

LOOK_S: Final = 0.25

Jobs = Sequence[Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Compute:
    """A compute thread beside the streams of its node, until `stop`, or `over`: nobody needs it any more.

    `thread` is done when it has ended; `halt` tells it to, and may be called again.
    """

    thread: "asyncio.Future[None]"
    halt: Callable[[], object]
    stop: asyncio.Event
    alarm: HangAlarm
    shards: Shards
    over: asyncio.Event | None = None

    async def run(
        self,
        jobs: Jobs,
        *,
        link: RowLink | None = None,
        flush: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> bool:
        """Keeps jobs running until the thread has ended, `stop` or `over`; then drains what is left.

        Returns whether the thread has ended by itself; it has ended when this returns or raises. When this
        returns, each row of the link is acknowledged, unless none counts any more, and `flush` has returned.

        Raises:
            EnvironmentHangsError: the thread hangs in the environment, and has not ended.
            UnreachableError: the replay takes no rows, or not what is flushed, any more.
            Exception: what the thread raised, whatever the jobs did then; or what ended one of these.
        """
        try:
            with first_cause():
                async with asyncio.TaskGroup() as tasks:
                    inserting = tasks.create_task(link.insert_rows()) if link else None
                    others = [tasks.create_task(job) for job in jobs]
                    await self._until_it_ends()
                    by_itself = self.thread.done()
                    self.halt()
                    if link and inserting:
                        await self._drain(inserting, link)
                    if flush:
                        await self._flushed(tasks.create_task(flush()))
                    for task in others:
                        task.cancel()
        finally:
            self.halt()
            if link:
                link.close()
            await self.alarm.unless_hanging(self.thread)
            if (error := self.thread.exception()) is not None:
                raise error from error.__cause__
        return by_itself

    async def _until_it_ends(self) -> None:
        working = self.alarm.unless_hanging(self.thread)
        await unless(self.stop, unless(self.over, working) if self.over else working)

    async def _drain(self, inserting: "asyncio.Task[None]", link: RowLink) -> None:
        """Lets the thread end, then the last rows be acknowledged, unless it is `over` and none counts.

        What a thread collected before it failed is sent, too, if the replay takes it soon.
        """
        if not await self._in_time(self.thread):
            link.close()  # it evaluates, or waits for room in a queue that is stuck
            await self.alarm.unless_hanging(self.thread)
        link.no_more_rows()
        if self.thread.exception() is not None:
            await asyncio.wait({inserting}, timeout=FAILED_DRAIN_S)
            self.thread.result()
        taken = await self._in_time(inserting)
        if self._is_over:
            inserting.cancel()
        elif not taken or link.unacknowledged:
            raise UnreachableError(
                f"the replay service has not acknowledged {link.unacknowledged} transitions within "
                f"{self.shards.first.timing.drain_s:g} s"
            )

    async def _flushed(self, flushing: "asyncio.Task[None]") -> None:
        """Lets the last policy arrive. UnreachableError if the replay does not take it."""
        if not await self._in_time(flushing):
            raise UnreachableError(
                f"the replay service has not taken the last policy within "
                f"{self.shards.first.timing.drain_s:g} s"
            )

    async def _in_time(self, work: "asyncio.Future[Any]") -> bool:
        """Waits for the work, for `drain_s` of the time that the replay serves; whether it is done."""
        left_s, hurry_s = self.shards.first.timing.drain_s, ORPHAN_DRAIN_S
        while not work.done() and left_s > 0 and hurry_s > 0 and not self._is_over:
            if self.stop.is_set():
                self.shards.note_stopping()
            look_s = min(LOOK_S, left_s)
            await asyncio.wait({work}, timeout=look_s)
            if self.shards.complete:
                left_s -= look_s
            if is_orphaned(self.stop):
                hurry_s -= look_s
        return work.done()

    @property
    def _is_over(self) -> bool:
        return self.over is not None and self.over.is_set()


@dataclass(frozen=True)
class LearnerStreams:
    """What a learner keeps open at its replay: rows, batches, policies, its lease."""

    shards: Shards
    link: ReplayLink
    exchange: PolicyExchange[Any, Any]
    lines: Lines

    async def run(
        self,
        thread: "asyncio.Future[None]",
        stop: asyncio.Event,
        *,
        halt: Callable[[], object],
        progress: Callable[[], Progress],
        alarm: HangAlarm,
        waited: Callable[[str, float], None] = lambda reason, seconds: None,
        beside: Jobs = (),
    ) -> None:
        """See `Compute.run`; the last policy has arrived, too."""

        def halt_both() -> None:
            halt()
            self.link.stop_batches()

        jobs = [
            self.link.fetch_batches(),
            say_waits(lambda: self.link.wait, count=waited, timing=self.shards.first.timing),
            self.shards.heartbeats(progress),
            self.exchange.run(),
            follow_name(self.shards, self.lines),
            *beside,
        ]
        compute = Compute(thread, halt_both, stop, alarm, self.shards)
        await compute.run(jobs, link=self.link, flush=self.exchange.flush)
