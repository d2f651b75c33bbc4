"""LearnerStreams: what a learner keeps open at its replay: rows, batches, policies, its lease."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dase_grpc.errors import UnreachableError
from dase_grpc.process.lifecycle import HangAlarm
from dase_grpc.process.tasks import first_cause, unless
from dase_grpc.progress import Progress
from dase_grpc.replay.client import draining
from dase_grpc.replay.client.channels import Lines
from dase_grpc.replay.client.draining import drain, in_time
from dase_grpc.replay.client.finding import follow_name
from dase_grpc.replay.client.link import ReplayLink
from dase_grpc.replay.client.policies import PolicyExchange
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.client.waits import say_waits

HEARTBEAT_S: Final = 0.5


@dataclass(frozen=True)
class LearnerStreams:
    """The streams of a learner that has joined; on the event loop."""

    shards: Shards
    link: ReplayLink
    exchange: PolicyExchange[Any, Any]
    lines: Lines

    async def run(
        self,
        compute: "asyncio.Future[None]",
        stop: asyncio.Event,
        *,
        halt: Callable[[], object],
        progress: Callable[[], Progress],
        alarm: HangAlarm,
        waited: Callable[[str, float], None] = lambda reason, seconds: None,
        beside: Sequence[Coroutine[Any, Any, None]] = (),
    ) -> None:
        """Keeps the streams open until the compute thread has ended or `stop`, then drains them.

        `halt` tells the thread to end, which it has when this returns or raises. When this returns, each row
        is acknowledged and the last policy has arrived.

        Raises:
            EnvironmentHangsError: the thread hangs in the environment, and has not ended.
            RefusalError: the replay takes no rows or no policy any more, or see Connection.keep.
            Exception: what the compute thread raised, whatever the streams did then.
        """
        link = self.link
        try:
            with first_cause():
                async with asyncio.TaskGroup() as tasks:
                    inserting = tasks.create_task(link.insert_rows())
                    jobs = [
                        link.fetch_batches(),
                        say_waits(lambda: link.wait, count=waited),
                        self.shards.heartbeats(progress, every_s=HEARTBEAT_S),
                        self.exchange.run(),
                        follow_name(self.shards, self.lines),
                        *beside,
                    ]
                    others = [tasks.create_task(job) for job in jobs]
                    await unless(stop, alarm.unless_hanging(compute))
                    halt()
                    link.stop_batches()
                    await drain(compute, inserting, link=link, shards=self.shards, alarm=alarm, stop=stop)
                    await self._flush(stop)
                    for task in others:
                        task.cancel()
        finally:
            halt()
            link.close()
            await alarm.unless_hanging(compute)
            if (error := compute.exception()) is not None:
                raise error from error.__cause__

    async def _flush(self, stop: asyncio.Event) -> None:
        """Lets the last policy arrive.

        Raises:
            UnreachableError: the replay does not take it.
        """
        async with asyncio.TaskGroup() as tasks:
            flushing = tasks.create_task(self.exchange.flush())
            if not await in_time(flushing, self.shards, stop):
                raise UnreachableError(
                    f"the replay service has not taken the last policy within {draining.DRAIN_S:g} s"
                )
