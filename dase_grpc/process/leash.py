"""The leash of a child process, which ends with its launcher: a pipe that only the launcher holds open."""

import fcntl
import logging
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

from dase_grpc.process.ending import end_now

FIRST_OWN_DESCRIPTOR: Final = 200
"""From here on the leash has a number of its own: an environment may close stdin, as daemons do. Where fewer
files may be open, from the middle of what is allowed."""

LEASHLESS_S: Final = 8.0
"""How long a process may drain after its launcher has gone, before it and all it started are killed."""

log = logging.getLogger("dase")

_lock: Final = threading.Lock()
_gone: Final = threading.Event()
_then: Final[list[Callable[[], None]]] = []
"""What to do when the launcher is gone; the last of them is done."""


def end_with_launcher(*, stdin_is_leash: bool) -> None:
    """From now on the process ends at once when its launcher is gone, but within a `leashed` block.

    For all that takes time before there is anything to keep: importing torch, trying out an environment.
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
    """Kills this process and all that it has started if it has not ended after `LEASHLESS_S`.

    For one whose launcher is gone, so that nobody else would.
    """
    log.info("the launcher is gone: stopping")
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
    log.info("the launcher is gone: ended")
    end_now(1)


def _kill_all_of_us() -> None:
    log.error("this process did not end within %g s of its launcher: killed", LEASHLESS_S)
    if os.getpgid(0) == os.getpid():  # a session of its own, with what the environment has started
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
