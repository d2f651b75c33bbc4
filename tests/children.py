"""Processes that tests start: their environment, whether they live, and how they end."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patience import PATIENCE_S


def importing(*folders: Path, **variables: str) -> dict[str, str]:
    """This process's environment, where modules are found in these folders too.

    PYTHONPATH as it is stays behind them: it may say which checkout is tested.
    """
    found = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found), **variables}


def ran(
    *command: object, check: bool = False, timeout: float = PATIENCE_S, **options: Any
) -> subprocess.CompletedProcess[str]:
    """What a program that ends by itself has printed, and its exit code; for options see subprocess.run."""
    words = [str(each) for each in command]
    return subprocess.run(words, capture_output=True, text=True, check=check, timeout=timeout, **options)


@contextmanager
def python(program: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a program, with pipes to it; killed where it has not ended after the block."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def let_go(process: subprocess.Popen[str]) -> None:
    """Closes a process's stdin, which may be its leash."""
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, and what it still wrote to stdout and stderr."""
    output, log = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output, log


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
