"""An actor at work: its thread explores beside its streams, until it is stopped or its agent has finished."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from dase_grpc.errors import RefusalError, WaitedTooLongError
from dase_grpc.learning.training.acting import Acting
from dase_grpc.metrics.nodes import ActorMetrics
from dase_grpc.nodes.followed import FollowedPolicy
from dase_grpc.process.lifecycle import HangAlarm
from dase_grpc.process.tasks import first_cause, unless, watch_loop_lag
from dase_grpc.process.watchdog import Watch
from dase_grpc.progress import Attendance, several
from dase_grpc.replay.client.attending import ActorConnection, has_finished
from dase_grpc.replay.client.draining import drain
from dase_grpc.replay.client.insert import RowLink
from dase_grpc.replay.client.joining import FAREWELL_S
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.client.waits import Wait, say_waits

HELD_BACK_LOOK_S: Final = 0.5

Follow = Callable[[], Coroutine[Any, Any, None]]
"""Looks where shards are that have moved, until cancelled."""

log = logging.getLogger("dase")


@dataclass(frozen=True)
class Troupe:
    """An actor that has been let in, and what it is connected to."""

    connections: Sequence[ActorConnection]
    shards: Shards
    link: RowLink
    guide: FollowedPolicy
    acting: Acting
    envs: int
    metrics: ActorMetrics
    watch: Watch
    alarm: HangAlarm

    @property
    def connection(self) -> ActorConnection:
        """That to the first shard, which says who the learner is and keeps the policies."""
        return self.connections[0]

    @property
    def over(self) -> bool:
        """Whether the agent has done all its steps, so that nobody needs more transitions."""
        return self.connection.finished.is_set()

    @property
    def wait(self) -> Wait | None:
        """What it has waited for since long, if it has."""
        return self.connection.wait or self.guide.wait or self.link.wait

    def attendance(self) -> Attendance:
        """What it says of itself; its gauges show the same."""
        acting, version = self.acting, self.acting.version
        lag = None if version is None else max(0, self._known_updates - version)
        self.metrics.unacknowledged.set(self.link.unacknowledged)
        self.metrics.policy_lag.set(lag or 0)
        return Attendance(
            envs=self.envs,
            env_steps=acting.env_steps,
            env_steps_per_second=acting.env_steps_per_second,
            policy_version=version,
            policy_lag_updates=lag,
            state=self._state,
        )

    @property
    def _known_updates(self) -> int:
        return max(self.guide.latest_version or 0, self.connection.learner_updates)

    @property
    def _state(self) -> str:
        if (environment := self.watch.waiting) is not None:
            return f"waiting: {environment}"
        if (wait := self.wait) is not None:
            return wait.state
        if self.guide.latest_version is None:
            return f"waiting: a policy of agent {self.connection.target.member.agent_id}"
        return "exploring"


async def explore_to_the_end(
    troupe: Troupe, replay_timeout_s: float, stop: asyncio.Event, follow: Follow
) -> None:
    """Explores until `stop` or until the agent has finished; every transition is acknowledged then.

    What the replay has not taken of an agent that has finished is dropped, for no learner needs it.

    Raises:
        EnvironmentHangsError: the thread hangs in an environment, and has not ended.
        WaitedTooLongError: what it needs from the learner has not come.
        RefusalError: the replay refused, was lost or is shutting down.
        Exception: what the thread raised, whatever the streams did then.
    """
    try:
        with first_cause():
            await _explore(troupe, replay_timeout_s, stop, follow)
        if troupe.over:
            log.info(
                "%s, so this actor ends after %d environment steps; %d transitions that no learner needs any "
                "more are dropped",
                has_finished(troupe.connection.target.member.agent_id),
                troupe.acting.env_steps,
                troupe.link.unacknowledged,
            )
            return
        log.info("stopped after %d environment steps", troupe.acting.env_steps)
    finally:
        if troupe.link.unacknowledged and not troupe.over:
            log.info(
                "%s not acknowledged",
                several(troupe.link.unacknowledged, "transition was", "transitions were"),
            )
        for connection in troupe.connections:
            with suppress(RefusalError):
                await connection.leave(timeout_s=FAREWELL_S)


async def _explore(troupe: Troupe, replay_timeout_s: float, stop: asyncio.Event, follow: Follow) -> None:
    """Runs the exploring thread beside its streams; the thread has ended when this returns or raises."""
    link, halt, over = troupe.link, threading.Event(), troupe.connection.finished
    exploring: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    exploring.set_result(None)
    try:
        async with asyncio.TaskGroup() as tasks:
            inserting = tasks.create_task(link.insert_rows())
            jobs = [
                *(each.attending(troupe.attendance) for each in troupe.connections),
                follow(),
                troupe.guide.run(),
                watch_loop_lag(troupe.metrics.loop_lag.observe),
                say_waits(lambda: troupe.wait, count=troupe.metrics.waited),
                _held_back(troupe, replay_timeout_s),
            ]
            others = [tasks.create_task(job) for job in jobs]
            await unless(stop, unless(over, troupe.guide.first(timeout_s=replay_timeout_s)))
            if not stop.is_set() and not over.is_set():
                exploring = asyncio.ensure_future(asyncio.to_thread(troupe.acting.explore, halt))
                await unless(stop, unless(over, troupe.alarm.unless_hanging(exploring)))
            halt.set()
            shards, alarm = troupe.shards, troupe.alarm
            await drain(exploring, inserting, link=link, shards=shards, alarm=alarm, stop=stop, over=over)
            for task in others:
                task.cancel()
    finally:
        halt.set()
        link.close()
        await troupe.alarm.unless_hanging(exploring)
        if (error := exploring.exception()) is not None:
            raise error from error.__cause__


async def _held_back(troupe: Troupe, limit_s: float) -> None:
    """Ends an actor whose transitions the replay holds back, because the learner makes no updates.

    Raises:
        WaitedTooLongError: it has for too long.
    """
    since, acknowledged = time.monotonic(), -1.0
    while True:
        now, count = time.monotonic(), troupe.link.acknowledged
        if count != acknowledged or troupe.link.held_back is None:
            since, acknowledged = now, count
        elif now - since >= limit_s:
            raise WaitedTooLongError(
                f"the replay has stored nothing for {limit_s:g} s, {troupe.link.held_back}, so this actor "
                f"ends; see what the learner waits for, or let the actor wait longer with --replay-timeout"
            )
        await asyncio.sleep(HELD_BACK_LOOK_S)
