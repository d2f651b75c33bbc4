"""Processes that tests start: their environment, and whether they live."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patience import PATIENCE_S


def importing(*folders: Path, **variables: str) -> dict[str, str]:
    """This process's environment, where modules are found in these folders too.

    PYTHONPATH as it is stays behind them: it may say which checkout is tested.
    """
    found = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found), **variables}


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_ended(*pids: int) -> None:
    """Returns once none of these processes runs."""
    limit = time.monotonic() + PATIENCE_S
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < limit, f"{left} are still running"
        time.sleep(0.01)


@contextmanager
def forked() -> Iterator[int]:
    """A fork of this process, which runs when the block begins and has ended after it."""
    (to_end, end), (is_up, up) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.write(up, b"1")
        os.read(to_end, 1)
        os._exit(0)
    assert os.read(is_up, 1) == b"1"
    try:
        yield child
    finally:
        os.close(end)
        assert os.waitpid(child, 0) == (child, 0)
        for each in (to_end, is_up, up):
            os.close(each)
