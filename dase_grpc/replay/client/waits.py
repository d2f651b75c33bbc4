"""Waits of a node: noticed by the compute thread, said in the log, in the status and in a metric."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SAY_AFTER_S: Final = 5.0
"""A wait that lasts longer is said."""

LOOK_EVERY_S: Final = 1.0

log = logging.getLogger("dase")


class WaitReason(StrEnum):
    """What a learner or an actor can wait for; a label of a metric, so their number is fixed."""

    WARM_UP = "warm_up"
    UNREACHABLE = "unreachable"
    OVERLOADED = "overloaded"
    DRAINED = "drained"
    COMMIT = "commit"
    BATCH = "batch"
    LEARNER = "learner"
    POLICY = "policy"
    STEPS = "steps"
    PACE = "pace"


class Waited:
    """Since when one thread has been without something; any thread may look."""

    def __init__(self) -> None:
        self.since: float | None = None

    def begin(self) -> None:
        """It is missing from now on, or has been already."""
        if self.since is None:
            self.since = time.monotonic()

    def end(self) -> None:
        """It is there."""
        self.since = None

    @property
    def long(self) -> bool:
        """Whether it has been missing for longer than `SAY_AFTER_S`."""
        since = self.since
        return since is not None and time.monotonic() - since > SAY_AFTER_S


@dataclass(frozen=True)
class Wait:
    """A long wait: whose, for what, and a sentence that starts with "waiting for".

    exploring: the compute thread has no batch, but explores on.
    """

    waited: Waited
    reason: WaitReason
    text: str
    exploring: bool = False

    @property
    def state(self) -> str:
        """The wait as Status shows it, "waiting: <for what>"."""
        return f"waiting: {self.text.removeprefix('waiting for ')}"


async def say_waits(look: Callable[[], Wait | None], *, count: Callable[[str, float], None]) -> None:
    """Logs each long wait, again when it changes its kind, and counts how long it lasts; until cancelled."""
    said: tuple[WaitReason, bool] | None = None
    counted_to = began = 0.0
    while True:
        now, wait = time.monotonic(), look()
        if wait is None:
            if said is not None:
                log.info("going on, after a wait of %.0f s", now - began)
            said = None
        else:
            since = wait.waited.since
            if said is None:
                counted_to = began = now if since is None else since
            if (wait.reason, wait.exploring) != said:
                log.info("%s", wait.text)
            count(wait.reason, now - counted_to)
            said, counted_to = (wait.reason, wait.exploring), now
        await asyncio.sleep(LOOK_EVERY_S)
