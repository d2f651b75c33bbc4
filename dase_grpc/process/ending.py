"""How a process ends although something in it, or something it has started, does not."""

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn


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
