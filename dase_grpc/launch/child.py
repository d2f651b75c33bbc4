"""ChildRun: a run of `dase train` or `dase resume` in a process of its own, followed and ended from here."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import tomli_w

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import USAGE_CODE, DaseError, UsageError
from dase_grpc.launch.processes import ERROR_PREFIX, PROGRAM
from dase_grpc.process.containment import given_variables

STOP_S: Final = 90.0
"""How long a run may take to keep its checkpoints; then it is killed."""

READ_S: Final = 10.0
"""How long the last of what a run has said may take to be passed on, once it has ended."""

_SHOWN: Final = 20
_OF_A_NODE: Final = f" | {ERROR_PREFIX}"
"""Comes before the sentence that a node has ended with, in its log."""


class ChildRun:
    """A process whose stdin is its leash: it keeps its checkpoints and ends when this one does, however.

    What it says is passed on line by line, from a thread. Any thread may start one; no signal handler of
    this process changes. As a context manager it does not outlive its block. What it has started and has not
    let go of is killed when it has ended.
    """

    def __init__(self, arguments: Sequence[str], *, say: Callable[[str], None]) -> None:
        self._said: deque[str] = deque(maxlen=_SHOWN)
        self._group_killed = False
        self._read_s = READ_S
        self._process = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=given_variables() | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(say,), name="dase child", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def runs(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for its end, at most so long; whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if self.runs:
            return False
        self._kill_rest()
        return True

    def stop(self) -> None:
        """Has the run keep its checkpoints and end, and waits for that; interrupted, it kills."""
        try:
            if self.runs:
                self._process.send_signal(signal.SIGTERM)
                self.wait(STOP_S)
        finally:
            if self.runs:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._take_rest()
            assert self._process.stdin is not None
            self._process.stdin.close()

    def require_success(self) -> None:
        """Checks how it ended.

        Raises:
            UsageError: what was asked cannot be done, in its own sentence.
            DaseError: it failed; in its own sentence, or the last one of a node that was given up, or else
                with the end of what it said.
        """
        code = self._process.returncode
        self._take_rest()
        if code == 0:
            return
        own = [line.removeprefix(ERROR_PREFIX) for line in self._said if line.startswith(ERROR_PREFIX)]
        if code == USAGE_CODE and own:
            raise UsageError(own[-1])
        of_nodes = [line.partition(_OF_A_NODE)[2] for line in self._said if _OF_A_NODE in line]
        whole = [line for line in own if not line.endswith(":")]  # else the end of a node's log follows
        said = "\n".join(self._said)
        raise DaseError((whole or of_nodes or [f"the run ended with code {code}:\n{said}"])[-1])

    def _take_rest(self) -> None:
        """Waits until all that was said is passed on, unless what has left the run's group holds it up."""
        self._kill_rest()
        self._reader.join(self._read_s)
        self._read_s = 0.0

    def _kill_rest(self) -> None:
        """Kills what the run has left behind: a simulator that outlives it holds its stdout open."""
        if not self._group_killed:  # only once, for the system may give the number to another later
            self._group_killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self, say: Callable[[str], None]) -> None:
        lines = self._lines()
        try:
            for line in lines:
                if not line.startswith(ERROR_PREFIX):  # which is raised
                    with contextlib.suppress(OSError, ValueError):  # nobody reads it, or cannot show it
                        say(line)
        finally:  # a pipe that is full would stop the run
            deque(lines, maxlen=0)
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.append(line.rstrip("\n"))
            yield self._said[-1]


@contextlib.contextmanager
def configured(config: RunConfig) -> Iterator[Path]:
    """A file that a child reads its whole configuration from, for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="dase-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(tomli_w.dumps(config.model_dump(mode="json")), encoding="utf-8")
        yield path
