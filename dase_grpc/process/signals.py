"""Signals and the leash: what tells a process to end. The only place that handles signals.

The first SIGTERM, SIGINT or SIGHUP stops a process, a second one kills it. A child process ends with its
launcher, too: its leash is a pipe that only the launcher holds open, which closes however the launcher dies.
"""

import fcntl
import logging
import os
import re
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, Final, NoReturn

from dase_grpc.process.ends import end_now

SAME_REQUEST_S: Final = 1.0
"""Within this time the same signal again is the same request: `timeout` and process groups send it twice."""

INIT_PID: Final = 1
"""The process that was started in a container. The kernel keeps from it what would end another process."""

_RACE: Final = re.compile(r"Signal \d+ ignored due to race condition")
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_heeded: Final[list[None]] = []
"""One for each block in which signals stop, so that they do not end, this process."""


FIRST_OWN_DESCRIPTOR: Final = 200
"""From here on the leash has a number of its own: an environment may close stdin, as daemons do. Where fewer
files may be open, from the middle of what is allowed."""

LEASHLESS_S: Final = 8.0
"""How long a process may drain after its launcher has gone, before it and all it started are killed."""

_log = logging.getLogger("dase")

_lock: Final = threading.Lock()
_gone: Final = threading.Event()
_then: Final[list[Callable[[], None]]] = []
"""What to do when the launcher is gone; the last of them is done."""


class Requests:
    """A signal handler that tells the first request from the same one again and from a second one."""

    def __init__(
        self, on_first: Callable[[signal.Signals], None], on_second: Callable[[int], None] | None = None
    ) -> None:
        self.on_second = _kill if on_second is None else on_second
        self._on_first = on_first
        self._first: int | None = None
        self._first_at = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self._first is None:
            self._first, self._first_at = number, time.monotonic()
            self._on_first(signal.Signals(number))
        elif not self.is_first_again(number):
            self.on_second(number)

    @property
    def has_come(self) -> bool:
        """Whether the first signal has come."""
        return self._first is not None

    def is_first_again(self, number: int) -> bool:
        """Whether this signal, if it came now, would be the first request once more."""
        return number == self._first and time.monotonic() - self._first_at < SAME_REQUEST_S


def is_ours(before: object, now: object) -> bool:
    """Whether `heeding` has put the handler `now` in the place of `before`, which therefore stays."""
    asked = isinstance(before, Requests) and before.has_come
    return isinstance(now, Requests) or (asked and now == signal.SIG_DFL)


@contextmanager
def heeding(
    on_first: Callable[[signal.Signals], None], on_second: Callable[[int], None] | None = None
) -> Iterator[None]:
    """Within the block the first signal calls `on_first`, and a second one `on_second`; without one it kills.

    Both are called in a signal handler. SIGHUP stays ignored where it is, as under nohup. Handlers come
    back at the end: that of the first signal once that is over, so that the same again ends nothing.
    """
    before = {
        each: signal.getsignal(each)
        for each in _SIGNALS
        if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN
    }

    def first(number: signal.Signals) -> None:
        if on_second is None and os.getpid() != INIT_PID:
            for each in before.keys() - {number}:
                signal.signal(each, signal.SIG_DFL)  # kills also where this thread hangs
        on_first(number)

    requests = Requests(first, on_second)
    _say_nothing_of_races()
    _heeded.append(None)
    try:
        for each in before:
            signal.signal(each, requests)
        yield
    finally:
        if _heeded:  # not so in a fork
            _heeded.pop()
        requests.on_second = lambda number: _raise_for(before[signal.Signals(number)], number)
        for each, handler in before.items():
            if not requests.is_first_again(each):
                signal.signal(each, handler)


class _Unraisable:
    """What the interpreter calls with errors that nobody can catch, without those of signals that race.

    Where two signals come at once, the handler of the first takes away that of the second, which Python has
    noted by then. It says so with a traceback; that one request was enough is no news.
    """

    def __init__(self, say: Callable[[Any], Any]) -> None:
        self._say = say

    def __call__(self, raised: Any) -> None:
        """Says what it is told, or nothing."""
        if not (isinstance(raised.exc_value, OSError) and _RACE.fullmatch(str(raised.exc_value))):
            self._say(raised)


def _say_nothing_of_races() -> None:
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)


def ignore_repeats() -> None:
    """Lets a process end, while Python takes its handlers back, although the same signal comes again."""
    for each in _SIGNALS:
        if isinstance(signal.getsignal(each), Requests):
            signal.signal(each, signal.SIG_IGN)


def end_as_init() -> None:
    """Has SIGTERM end the first process of a container from now on; else it is lost before `heeding`."""
    if os.getpid() == INIT_PID:
        signal.signal(signal.SIGTERM, lambda number, frame: _kill(number))


def _kill(number: int) -> NoReturn:
    _raise_for(signal.SIG_DFL, number)
    os._exit(128 + number)  # the kernel lets the first process of a container live


def _raise_for(handler: Any, number: int) -> None:
    """Raises a signal for another handler, which has it from now on."""
    signal.signal(number, handler)
    signal.raise_signal(number)


def _forget_signals() -> None:
    """In a forked process, an environment's worker: signals are for itself, and end it.

    Ctrl-C goes to the parent too, which uses it until it has kept its state: only a second one ends it.
    """
    if _heeded:
        _heeded.clear()
        for each in _SIGNALS:
            if callable(signal.getsignal(each)):
                ended = each == signal.SIGTERM
                signal.signal(each, signal.SIG_DFL if ended else Requests(lambda number: None))


os.register_at_fork(after_in_child=_forget_signals)


def end_with_launcher(*, stdin_is_leash: bool) -> None:
    """From now on the process, which has nothing to keep yet, ends at once when its launcher is gone.

    But not within a `leashed` block.
    """
    if stdin_is_leash:
        _add(_end)


@contextmanager
def leashed(then: Callable[[], None]) -> Iterator[None]:
    """Calls `then`, on another thread, when the launcher is gone within the block, or was before it."""
    _add(then)
    try:
        yield
    finally:
        with _lock:
            _then.remove(then)


def kill_unless_ended() -> None:
    """Kills this process, whose launcher is gone, and all it has started, unless it ends in `LEASHLESS_S`."""
    _log.info("the launcher is gone: stopping")
    last_resort = threading.Timer(LEASHLESS_S, _kill_all_of_us)
    last_resort.daemon = True
    last_resort.start()


def _add(then: Callable[[], None]) -> None:
    with _lock:
        _then.append(then)
        is_gone = _gone.is_set()
    if is_gone:
        then()
    else:
        _watching()


@cache
def _watching() -> threading.Thread:
    """The one thread that watches, for the rest of the process."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = allowed // 2 if 0 <= allowed <= 2 * FIRST_OWN_DESCRIPTOR else FIRST_OWN_DESCRIPTOR
    leash = fcntl.fcntl(sys.stdin.fileno(), fcntl.F_DUPFD_CLOEXEC, first)
    thread = threading.Thread(target=_watch, args=(leash,), name="leash", daemon=True)
    thread.start()
    return thread


def _watch(leash: int) -> None:
    is_open = True
    while is_open:
        try:
            select.select([leash], [], [])
            is_open = bool(os.read(leash, 4_096))  # what is written into a leash says nothing
        except BlockingIOError:
            continue
        except OSError:  # closed by somebody else, so nobody would notice the launcher's end
            is_open = False
    with _lock:
        _gone.set()
        then = _then[-1:]
    for each in then:
        each()


def _end() -> None:
    _log.info("the launcher is gone: ended")
    end_now(1)


def _kill_all_of_us() -> None:
    _log.error("this process did not end within %g s of its launcher: killed", LEASHLESS_S)
    if os.getpgid(0) == os.getpid():  # a session of its own, with what the environment has started
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def interrupt_deferred() -> Iterator[threading.Event]:
    """A block that Ctrl-C does not break off: it sets the event. Off the main thread Ctrl-C does nothing."""
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: came.set())
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
