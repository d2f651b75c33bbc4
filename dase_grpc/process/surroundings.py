"""Surroundings of a process, from whoever starts it, put right: streams, signals, its limit of open files."""

import logging
import os
import resource
import signal
import sys
from typing import Final

WANTED_OPEN_FILES: Final = 8_192
"""More than connections that a replay takes (replay/service/server.py)."""

LEAST_OPEN_FILES: Final = 64
"""With fewer, libraries cannot even be loaded."""


def put_right() -> None:
    """Puts right what can be; to be called before a thread is started and a file is opened."""
    _open_standard_streams()
    _take_signals()
    _raise_open_files()
    _draw_into_files()
    _count_in_memory()


def too_few_files() -> str | None:
    """Says that this process may not open enough files; None where it may."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= LEAST_OPEN_FILES:
        return None
    return f"this process may have {limit} files open, and needs at least {LEAST_OPEN_FILES}; {MORE_FILES}"


MORE_FILES: Final = "raise the limit with ulimit -n 1024, or where the process is started"
"""What helps where files run out."""


def _open_standard_streams() -> None:
    """Opens those that are closed on nothing, else the next file or connection would get their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(nowhere, True)
            setattr(sys, name, open(nowhere, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _take_signals() -> None:
    """Undoes blocked stop signals, and ignored ends of children: Python cannot wait for a child then."""
    stopping = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _draw_into_files() -> None:
    """Has matplotlib need no screen, and say nothing about a home that it cannot write to.

    A notebook leaves the name of a backend that is its own; matplotlib refuses to be imported with that.
    """
    os.environ["MPLBACKEND"] = "agg"
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


def _count_in_memory() -> None:
    """Has the Prometheus client keep its numbers in memory; it looks while it is imported, and later.

    In files, a missing folder would end the process, and in one that exists a process would go on with the
    numbers of an earlier one that had its pid, in a container always 1.
    """
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        os.environ.pop(name, None)


def _raise_open_files() -> None:
    """Raises the limit as far as it is needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
