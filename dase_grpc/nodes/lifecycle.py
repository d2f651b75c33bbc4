"""How a node starts and ends: signals, logging, exit codes. The only place that handles signals."""

import asyncio
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from dase_grpc.errors import DaseError, EnvironmentHangsError
from dase_grpc.nodes.memory import keep_freed_memory

READY_PREFIX: Final = "listening on "
"""What a node that listens prints on stdout, before its address, once it answers."""

LEASHLESS_S: Final = 8.0
"""How long a process may drain after its launcher has gone, before it and all it started are killed."""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_GRPC_LOGGER: Final = "grpc._cython.cygrpc"
_ENDED_MEANWHILE: Final = "ExecuteBatchError raised in core by servicer method ["

log = logging.getLogger("dase")
T = TypeVar("T")


class StopEvent(asyncio.Event):
    """Set when a process shall drain and end.

    Attributes:
        orphaned: its launcher is gone, so it is killed unless it ends within `LEASHLESS_S`.
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
    """Whether a line of gRPC is not one, with a traceback, about a call that ended while it was answered.

    Clients that come and go bring that about every day. Errors of a servicer have other lines.
    """
    cancelled = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cancelled and not record.getMessage().startswith(_ENDED_MEANWHILE)


@contextmanager
def halt_event(*, stdin_is_leash: bool = False) -> Iterator[threading.Event]:
    """`stop_event` for a program without an event loop."""
    halt = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        halt.set()

    before = {each: signal.signal(each, on_signal) for each in _heeded()}
    try:
        with _leashed(halt) if stdin_is_leash else nullcontext():
            yield halt
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@asynccontextmanager
async def stop_event(
    *, stdin_is_leash: bool, on_second: Callable[[], None] | None = None
) -> AsyncIterator[StopEvent]:
    """An event set by the first SIGTERM, SIGINT or SIGHUP, or when stdin ends if that is a leash.

    A second signal calls `on_second`, in a signal handler; without one it kills.

    A leash is a pipe whose other end a launcher holds: it closes however the launcher dies. Nobody is
    left then to kill a node that does not end, so it does that itself after `LEASHLESS_S`.
    """
    loop, stop = asyncio.get_running_loop(), StopEvent()
    second = signal.SIG_DFL if on_second is None else lambda number, frame: on_second()

    def on_signal(number: int) -> None:
        log.info("%s: stopping (once more kills)", signal.Signals(number).name)
        for each in _SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, second)
        stop.set()

    before = {each: signal.getsignal(each) for each in _heeded()}
    for each in before:
        loop.add_signal_handler(each, on_signal, each)
    leash = await _watch_stdin(loop, stop) if stdin_is_leash else None
    try:
        yield stop
    finally:
        if leash is not None:
            leash.release()
        for each, handler in before.items():
            loop.remove_signal_handler(each)
            signal.signal(each, handler)


def _heeded() -> list[signal.Signals]:
    """The signals that stop; SIGHUP not where it is ignored, as under nohup."""
    return [each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


class _Leash(asyncio.Protocol):
    """Sets `stop` when the launcher's end of the pipe closes, but not when this end does."""

    def __init__(self, stop: StopEvent) -> None:
        self._stop = stop
        self._transport: asyncio.BaseTransport | None = None
        self._released = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._released:
            _launcher_gone(self._stop)

    def release(self) -> None:
        self._released = True
        if self._transport is not None:
            self._transport.close()


@contextmanager
def _leashed(halt: threading.Event) -> Iterator[None]:
    """Sets `halt` when stdin ends within the block; a thread waits for that."""
    woken, wake = os.pipe()

    def watch() -> None:
        stdin = sys.stdin.fileno()
        while woken not in select.select([stdin, woken], [], [])[0]:
            if not os.read(stdin, 4_096):
                return _launcher_gone(halt)

    thread = threading.Thread(target=watch, name="leash", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(wake)
        thread.join()
        os.close(woken)


def _launcher_gone(stop: StopEvent | threading.Event) -> None:
    log.info("the launcher is gone: stopping")
    if isinstance(stop, StopEvent):
        stop.orphaned = True
    stop.set()
    last_resort = threading.Timer(LEASHLESS_S, _kill_all_of_us)
    last_resort.daemon = True
    last_resort.start()


def _kill_all_of_us() -> None:
    log.error("this process did not end within %g s of its launcher: killed", LEASHLESS_S)
    if os.getpgid(0) == os.getpid():  # a session of its own, with what the environment has started
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def end_now(code: int) -> NoReturn:
    """Ends the process although a thread of it hangs; what was logged and printed is out.

    What it has started, such as a simulator that hangs, is killed.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    os._exit(code)


def _descendants(pid: int) -> list[int]:
    """The processes that this one has started, that those have started, and so on; only Linux tells."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


async def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: StopEvent) -> _Leash:
    pipe = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    _, leash = await loop.connect_read_pipe(lambda: _Leash(stop), pipe)
    return leash


async def unless(stop: asyncio.Event, awaited: Coroutine[Any, Any, T]) -> T | None:
    """What `awaited` gives, or None if `stop` is set first; then `awaited` is cancelled and has ended."""
    work = asyncio.ensure_future(awaited)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, stopped):
            task.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)


@contextmanager
def first_cause() -> Iterator[None]:
    """Raises, instead of a group of errors, the one to show.

    That is its only bug, or the group itself if it has several, or else the first of our errors.
    """
    try:
        yield
    except ExceptionGroup as group:
        refusals, bugs = group.split(DaseError)
        cause: Exception | None = bugs
        while isinstance(cause, ExceptionGroup) and len(cause.exceptions) == 1:
            cause = cause.exceptions[0]
        if cause is None and refusals is not None:
            cause = first_error(refusals)
        if cause is None or isinstance(cause, ExceptionGroup):
            raise
        raise cause from cause.__cause__


def first_error(group: ExceptionGroup[DaseError] | DaseError) -> DaseError:
    """The first of the errors in a group, however deeply nested."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, DaseError):
        raise TypeError(f"{error!r} is not one of our errors")
    return error
