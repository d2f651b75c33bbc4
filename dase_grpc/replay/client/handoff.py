"""Between compute thread and event loop: a bounded, closable queue, and the waits that are said."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from dase_grpc.errors import Halted

T = TypeVar("T")

log = logging.getLogger("dase")


@dataclass(frozen=True)
class Times:
    """All in seconds.

    Attributes:
        beat_s: between two reports of what a node does, where its replay does not ask for fewer, and two
            looks whether it is stuck.
        gather_s: how long rows wait for more before they are sent. A message for each row would cost both
            sides as much time as an update of a small network; what nobody has acknowledged is kept, and a
            batch misses some steps of a thousand.
        wake_s: how often a compute thread that waits looks whether to give up.
        say_wait_after_s: a wait that lasts longer is said.
        look_at_wait_s: how often it is looked whether something is waited for.
        say_silent_after_s: a first call that lasts longer is said.
        away_after_s: a replay whose streams are broken for longer counts as away.
        stopping_s: how long a node that has been told to stop still tries to reach its replay.
        drain_s: how long the replay may take, at the end, for accepting the rows queued, acknowledging them,
            a policy.
        find_again_s: how often a name is resolved again while shards behind it are missing.
        holder_look_s: time in which a live learner renews its lease several times.
    """

    beat_s: float = 0.5
    gather_s: float = 0.05
    wake_s: float = 0.25
    say_wait_after_s: float = 5.0
    look_at_wait_s: float = 1.0
    say_silent_after_s: float = 2.0
    away_after_s: float = 2.0
    stopping_s: float = 3.0
    drain_s: float = 15.0
    find_again_s: float = 1.0
    holder_look_s: float = 2.0


USUAL: Final = Times()


class Handoff(Generic[T]):
    """Carries items between two threads; closing it wakes both sides. `added` counts what `put` has added.

    `on_change` is called after `put`, `get` and `close`, on the thread that called these; it must not block.
    """

    def __init__(
        self, limit: int, *, on_change: Callable[[], object] = lambda: None, wake_s: float = Times.wake_s
    ) -> None:
        self._limit = limit
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._on_change = on_change
        self._wake_s = wake_s
        self.added = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        """Whether `put` would block."""
        return len(self._items) >= self._limit

    def put(self, item: T) -> None:
        """Adds an item; blocks while `limit` items are waiting. Halted if the queue is closed."""
        with self._changed:
            while len(self._items) >= self._limit and not self._closed:
                self._changed.wait()
            if self._closed:
                raise Halted
            self._items.append(item)
            self.added += 1
            self._changed.notify_all()
        self._on_change()

    def get(self, *, unless: Callable[[], bool] | None = None) -> T | None:
        """Takes the oldest item; blocks while there is none, or gives None then as soon as `unless` holds.

        Halted if the queue is closed; items still waiting are not given out any more.
        """
        with self._changed:
            while not self._items and not self._closed:
                if unless is not None and unless():
                    return None
                self._changed.wait(None if unless is None else self._wake_s)
            if self._closed:
                raise Halted
            item = self._items.popleft()
            self._changed.notify_all()
        self._on_change()
        return item

    def take(self, limit: int | None = None) -> list[T]:
        """Takes what is there, or up to `limit` of it, closed or not, without blocking; oldest first."""
        with self._changed:
            if limit is None or len(self._items) <= limit:
                items = list(self._items)
                self._items.clear()
            else:
                items = [self._items.popleft() for _ in range(limit)]
            self._changed.notify_all()
        return items

    def close(self) -> None:
        """Makes `put` and `get` raise Halted, those that wait already included."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._on_change()


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

    def __init__(self, timing: Times) -> None:
        self._timing = timing
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
        """Whether it has been missing for so long that it is said."""
        since = self.since
        return since is not None and time.monotonic() - since > self._timing.say_wait_after_s


class Standstill:
    """Since when nothing has changed, though it is waited for."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: object = None
        self._since = time.monotonic()

    def lasts(self, progressed: object, *, waiting: bool) -> bool:
        """Notes how far things are; whether that has not changed for too long."""
        now = time.monotonic()
        if waiting and progressed == self._seen:
            return now - self._since >= self._limit_s
        self._seen, self._since = progressed, now
        return False


@dataclass(frozen=True)
class Wait:
    """A long wait: whose, for what, in a sentence, and whether the compute thread explores on meanwhile."""

    waited: Waited
    reason: WaitReason
    text: str
    exploring: bool = False

    @property
    def state(self) -> str:
        """The wait as Status shows it, "waiting: <for what>"."""
        return f"waiting: {self.text.removeprefix('waiting for ')}"


async def say_waits(
    look: Callable[[], Wait | None], *, count: Callable[[str, float], None], timing: Times
) -> None:
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
        await asyncio.sleep(timing.look_at_wait_s)
