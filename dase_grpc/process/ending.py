"""The end of a process in every case, what its forks must not keep, and which memory it keeps."""

import ctypes
import logging
import os
import platform
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn, Protocol
from weakref import WeakSet

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_MESSAGE_BYTES: Final = 16 * 2**20
_KEPT_BYTES: Final = 64 * 2**20


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


def keep_freed_memory() -> None:
    """Makes glibc's allocator keep up to 64 MiB of freed memory per arena; does nothing elsewhere.

    By default it gives a freed message of several 100 kB back to the kernel, and the next one pays a
    page fault for each 4 KiB: with batches of 256 at 348 observation components that was 80 % of the
    processor time of both sides.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MESSAGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class Held(Protocol):
    """Something that `close` lets go of in this process, and not in the one that it was opened in."""

    def close(self) -> None:
        """Lets go of it."""
        ...


_held: Final[WeakSet[Held]] = WeakSet()


def closed_in_forks(held: Held) -> None:
    """From now on it is closed in whatever is forked from this process; it may be closed before."""
    _held.add(held)


def _close_in_fork() -> None:
    for held in list(_held):
        with suppress(OSError):
            held.close()


os.register_at_fork(after_in_child=_close_in_fork)
