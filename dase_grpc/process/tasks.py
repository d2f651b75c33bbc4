"""asyncio in the small: what ends first, which error counts, and how late the event loop is."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from dase_grpc.errors import DaseError

T = TypeVar("T")

ANSWER_S: Final = 3.0
"""How long the event loop may take to answer a probe; a probe has to wait longer than that."""

LOOK_EVERY_S: Final = 0.25


async def unless(stop: asyncio.Event, awaited: Coroutine[Any, Any, T]) -> T | None:
    """What `awaited` gives, or None if `stop` is set first; then `awaited` is cancelled and has ended.

    Where `stop` is set already it does not begin.
    """
    if stop.is_set():
        awaited.close()
        return None
    work = asyncio.ensure_future(awaited)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, stopped):
            task.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)


async def in_thread(blocking: Callable[[], object]) -> None:
    """Runs what blocks on a thread, to its end: where it is cancelled meanwhile that is raised only then."""
    running = asyncio.ensure_future(asyncio.to_thread(blocking))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    failed = None if running.cancelled() else running.exception()
    if cancelled is not None:
        raise cancelled
    if failed is not None:
        raise failed


@contextmanager
def first_cause() -> Iterator[None]:
    """Raises, instead of a group of errors, its only bug, else our first error; of two bugs the group."""
    try:
        yield
    except ExceptionGroup as group:
        refusals, bugs = group.split(DaseError)
        cause: Exception | None = refusals if bugs is None else bugs
        while isinstance(cause, ExceptionGroup) and (bugs is None or len(cause.exceptions) == 1):
            cause = cause.exceptions[0]
        if cause is None or isinstance(cause, ExceptionGroup):
            raise
        raise cause from cause.__cause__


def loop_turns(*, within_s: float = ANSWER_S) -> Callable[[], bool]:
    """Asks the running loop, when called on another thread, for a sign of life; waits that long for it."""
    loop = asyncio.get_running_loop()

    def ask() -> bool:
        answered = threading.Event()
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # the loop has been closed meanwhile
            return False
        return answered.wait(within_s)

    return ask


async def watch_loop_lag(observe: Callable[[float], None], *, every_s: float = LOOK_EVERY_S) -> None:
    """Observes how many seconds later than asked this loop wakes a task, again and again, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + every_s
        await asyncio.sleep(every_s)
        observe(max(0.0, loop.time() - due))
