"""The watch over calls into an environment: one that does not return is noticed, for others to decide."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from dase_grpc.errors import EnvironmentHangsError

LOOK_S: Final = 0.5
SAY_AFTER_S: Final = 5.0
"""A call that lasts longer is shown as what a learner waits for."""

Call = tuple[str, float]
"""What is called, and since when on the monotonic clock."""

_log = logging.getLogger("dase")


class Watch:
    """Which call into an environment one thread is in, if it is in one; any thread may look.

    Attributes:
        owner: whose environments they are, for what is said.
        thread: the identity of the thread that called last.
        answered: whether a reset has ever returned what it should; what goes wrong later is a failure of
            the environment, and not one of who chose it.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.call: Call | None = None
        self.thread: int | None = None
        self.answered = False

    def begin(self, what: str) -> None:
        """The calling thread is in a call from now on."""
        self.thread = threading.get_ident()
        self.call = (what, time.monotonic())

    def end(self) -> None:
        """It has returned, or raised."""
        self.call = None

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """The calling thread is in a call for the block."""
        self.begin(what)
        try:
            yield
        finally:
            self.end()

    @property
    def waiting(self) -> str | None:
        """What a call that has lasted long is waited for, in words, and for how long."""
        call = self.call
        if call is None or (lasted := time.monotonic() - call[1]) < SAY_AFTER_S:
            return None
        return f"the environment's {call[0]} to return ({lasted:.0f} s so far)"


OnHang = Callable[[Watch, EnvironmentHangsError], None]


@contextmanager
def watchdog(watches: Sequence[Watch], *, timeout_s: float, on_hang: OnHang) -> Iterator[None]:
    """Calls `on_hang` once, on a thread of its own, when a call has not returned within `timeout_s`.

    With 0 it never does. Time in which this process did not run, being stopped or its machine asleep,
    does not count. A call that keeps Python's global lock is not noticed.
    """
    if timeout_s == 0:
        yield
        return
    over = threading.Event()
    arguments = (watches, timeout_s, on_hang, over)
    thread = threading.Thread(target=_look, args=arguments, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        if not any(watch.call for watch in watches):
            thread.join()


def say_where(watch: Watch) -> None:
    """Logs where in its code the environment is."""
    frame = sys._current_frames().get(watch.thread or 0)
    if frame is not None:
        stack = "".join(traceback.format_stack(frame)).rstrip()
        _log.error("%s hangs here (most recent call last):\n%s", watch.owner, stack)


def _look(watches: Sequence[Watch], timeout_s: float, on_hang: OnHang, over: threading.Event) -> None:
    every_s = min(LOOK_S, timeout_s / 4)
    seen: list[tuple[Call | None, float]] = [(None, 0.0)] * len(watches)
    looked_at = time.monotonic()
    while not over.wait(every_s):
        now = time.monotonic()
        passed, looked_at = min(now - looked_at, 4 * every_s), now
        for index, watch in enumerate(watches):
            call, lasted = watch.call, 0.0
            if call is not None and call is seen[index][0]:
                lasted = seen[index][1] + passed
            seen[index] = (call, lasted)
            if call is not None and lasted >= timeout_s:
                return on_hang(watch, _hangs(watch.owner, call, timeout_s))


def _hangs(owner: str, call: Call, timeout_s: float) -> EnvironmentHangsError:
    what, since = call
    began = datetime.fromtimestamp(time.time() - (time.monotonic() - since)).astimezone()
    return EnvironmentHangsError(
        f"the environment's {what} has not returned since {began:%H:%M:%S} ({owner}), longer than "
        f"env.timeout_s = {timeout_s:g}, and cannot be interrupted, so this process ends; correct the "
        f"environment, or raise env.timeout_s if it only is slow (the last checkpoint, if there is one, is "
        f"kept)"
    )
