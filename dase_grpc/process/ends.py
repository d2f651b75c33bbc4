"""Both ends of a process: what it is started with put right, its end in every case; forks, freed memory."""

import ctypes
import logging
import os
import platform
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn, Protocol
from weakref import WeakSet

WANTED_OPEN_FILES: Final = 8_192
"""More than connections that a replay takes (replay/service/server.py)."""

LEAST_OPEN_FILES: Final = 64
"""With fewer, libraries cannot even be loaded."""

MORE_FILES: Final = "raise the limit with ulimit -n 1024, or where the process is started"
"""What helps where files run out."""

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_MESSAGE_BYTES: Final = 16 * 2**20
_KEPT_BYTES: Final = 64 * 2**20


def put_right() -> None:
    """Puts right what a process was started with; call it before a thread is started and a file is opened."""
    _open_standard_streams()
    stopping = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # Python cannot wait for a child then
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _raise_open_files()
    # a notebook leaves the name of a backend of its own, with which matplotlib refuses to be imported
    os.environ["MPLBACKEND"] = "agg"
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # of a home that it cannot write to
    # Prometheus would count in files: a missing folder ended the process, and in one that exists it went on
    # with the numbers of an earlier process of its pid, in a container always 1
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        os.environ.pop(name, None)


def too_few_files() -> str | None:
    """Says that this process may not open enough files; None where it may."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= LEAST_OPEN_FILES:
        return None
    return f"this process may have {limit} files open, and needs at least {LEAST_OPEN_FILES}; {MORE_FILES}"


def files_short_of(wanted: int) -> str | None:
    """Says that this process may not open as many files as it may want one day; None where it may."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return None
    return (
        f"this process may have {limit} files open, and wants {wanted}; raise the limit with "
        f"ulimit -n {wanted}"
    )


def _open_standard_streams() -> None:
    """Opens those that are closed on nothing, else the next file or connection would get their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(nowhere, True)
            setattr(sys, name, open(nowhere, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _raise_open_files() -> None:
    """Raises the limit as far as it is needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


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
            parent = stat_fields(stat)[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def stat_fields(stat: Path) -> list[str]:
    """What /proc/PID/stat says, from the state on, proc(5)'s field 3; OSError without the process."""
    return stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()


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


def boot_id() -> str:
    """Names the time since this machine was started; empty where the kernel does not tell."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


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
