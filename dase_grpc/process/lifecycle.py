"""The life of a node from start to end: logging, when it is to stop, exit codes, the alarm of a hang."""

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Final

from dase_grpc.errors import DaseError, EnvironmentHangsError
from dase_grpc.process.ends import end_now, keep_freed_memory
from dase_grpc.process.signals import heeding, kill_unless_ended, leashed
from dase_grpc.process.tasks import first_cause
from dase_grpc.process.watchdog import Watch, say_where, watchdog

READY_PREFIX: Final = "listening on "
"""What a node that listens prints on stdout, before its address, once it answers."""

FAREWELL_GRACE_S: Final = 10.0
"""How long the event loop has, from the alarm on, to give the lease back; then the process ends without."""

_GRPC_LOGGER: Final = "grpc._cython.cygrpc"
_ENDED_MEANWHILE: Final = "ExecuteBatchError raised in core by servicer method ["

log = logging.getLogger("dase")


class StopEvent(asyncio.Event):
    """Set when a process shall drain and end.

    Attributes:
        orphaned: its launcher is gone, so it is killed unless it ends within `LEASHLESS_S` (signals.py).
    """

    def __init__(self) -> None:
        super().__init__()
        self.orphaned = False


def is_orphaned(stop: asyncio.Event) -> bool:
    """Whether there is a hurry: nobody is left for whom it would be worth to drain at length."""
    return isinstance(stop, StopEvent) and stop.orphaned


def run_node(name: str, main: Callable[[asyncio.Event], Awaitable[None]], *, stdin_is_leash: bool) -> int:
    """Runs a node until it ends or SIGTERM, SIGINT or the end of its leash stops it; returns its exit code.

    `main` gets an event that is set when the node shall drain and return. A refusal or a usage
    error is logged as one sentence; a bug propagates with its traceback. A second signal kills.
    """
    keep_freed_memory()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {name} | %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger(_GRPC_LOGGER).addFilter(_is_worth_saying)

    async def guarded() -> int:
        async with stop_event(stdin_is_leash=stdin_is_leash) as stop:
            try:
                with first_cause():
                    await main(stop)
            except DaseError as error:
                log.error("error: %s", error)  # noqa: TRY400 - one sentence; a bug keeps its traceback
                if isinstance(error, EnvironmentHangsError):
                    end_now(error.exit_code)
                return error.exit_code
        return 0

    return asyncio.run(guarded())


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Whether a line of gRPC's is not about a call that ended while it was answered, which is no news."""
    cancelled = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cancelled and not record.getMessage().startswith(_ENDED_MEANWHILE)


@contextmanager
def halt_event(*, stdin_is_leash: bool = False) -> Iterator[threading.Event]:
    """`stop_event` for a program without an event loop."""
    halt = threading.Event()

    def on_gone() -> None:
        kill_unless_ended()
        halt.set()

    with heeding(lambda number: halt.set()), leashed(on_gone) if stdin_is_leash else nullcontext():
        yield halt


@asynccontextmanager
async def stop_event(
    *, stdin_is_leash: bool, on_second: Callable[[], None] | None = None
) -> AsyncIterator[StopEvent]:
    """An event set by the first SIGTERM, SIGINT or SIGHUP, or when stdin, if that is a leash, ends.

    A second signal calls `on_second`, in a signal handler; without one it kills. The same signal again
    within `SAME_REQUEST_S` is no second one.
    """
    loop, stop = asyncio.get_running_loop(), StopEvent()

    def told(number: signal.Signals) -> None:
        log.info("%s: stopping (once more kills)", number.name)
        stop.set()

    def on_first(number: signal.Signals) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(told, number)

    def on_gone() -> None:
        kill_unless_ended()  # also where the loop hangs
        stop.orphaned = True
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(stop.set)

    second = None if on_second is None else lambda number: on_second()
    with heeding(on_first, second), leashed(on_gone) if stdin_is_leash else nullcontext():
        yield stop


class HangAlarm:
    """Tells an event loop that a thread hangs in the environment; `raised` then holds the error."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._over = threading.Event()
        self.raised: asyncio.Future[None] = loop.create_future()

    @contextmanager
    def watching(self, watch: Watch, *, timeout_s: float) -> Iterator[None]:
        """Looks at the watch within the block; `FAREWELL_GRACE_S` after the alarm the process ends."""
        with watchdog([watch], timeout_s=timeout_s, on_hang=self._on_hang):
            try:
                yield
            finally:
                self._over.set()

    async def unless_hanging(self, *others: "asyncio.Future[None]") -> None:
        """Returns when one of the others is done.

        Raises:
            EnvironmentHangsError: the alarm came first.
        """
        await asyncio.wait({self.raised, *others}, return_when=asyncio.FIRST_COMPLETED)
        if not any(other.done() for other in others):
            self.raised.result()

    def _on_hang(self, watch: Watch, error: EnvironmentHangsError) -> None:
        say_where(watch)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._raise, error)
        if not self._over.wait(FAREWELL_GRACE_S):
            log.error("error: %s", error)
            end_now(error.exit_code)

    def _raise(self, error: EnvironmentHangsError) -> None:
        if not self.raised.done():
            self.raised.set_exception(error)
            self.raised.exception()  # whether or not somebody waits
