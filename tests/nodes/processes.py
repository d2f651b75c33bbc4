"""Nodes as real processes, started by the command line."""

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from children import importing
from nodes.learning_cases import SETTINGS
from patience import PATIENCE_S

from dase_grpc.process.lifecycle import READY_PREFIX

TESTS = Path(__file__).resolve().parents[1]


class NodeProcess:
    """A node as a child process, and what it has written to its log so far."""

    def __init__(self, *arguments: str, within: tuple[str, ...] = ()) -> None:
        self.popen = subprocess.Popen(
            [*within, sys.executable, "-m", "dase_grpc", "node", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=importing(TESTS),
        )
        self.log = ""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.popen.stderr or ():
            self._lines.put(line)

    def until_says(self, text: str) -> None:
        """Waits until its log holds a text."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.log:
            try:
                self.log += self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{text!r} is not in the log:\n{self.log}") from None

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def exit_code(self) -> int:
        """Waits for its end."""
        code = self.popen.wait(timeout=PATIENCE_S)
        self._reader.join(PATIENCE_S)
        while not self._lines.empty():
            self.log += self._lines.get()
        return code


@contextmanager
def process(*arguments: str, within: tuple[str, ...] = ()) -> Iterator[NodeProcess]:
    """A node that is killed at the end of the block, if it still runs; `within` is a command that runs it."""
    node = NodeProcess(*arguments, within=within)
    try:
        yield node
    finally:
        if node.popen.poll() is None:
            node.send(signal.SIGCONT)
            node.popen.kill()
        node.exit_code()
        for stream in (node.popen.stdout, node.popen.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def replay_process(*arguments: str) -> Iterator[tuple[NodeProcess, str]]:
    """A replay node and its address."""
    with process(
        "--role=replay", "--listen=127.0.0.1:0", "--capacity=10000", "--min-size=20", *arguments
    ) as node:
        line = node.popen.stdout.readline() if node.popen.stdout else ""
        assert line.startswith(READY_PREFIX), node.log
        yield node, line.removeprefix(READY_PREFIX).strip()


def learner_arguments(address: str, run_dir: Path, **settings: object) -> list[str]:
    """A learner of a tiny run that goes on until it is stopped; settings as `section__key=value`."""
    values = {f"{section}.{key}": value for section, keys in SETTINGS.items() for key, value in keys.items()}
    values |= {"train.steps": 10_000_000, "replay.capacity": 10_000, "eval.every": 1_000}
    values |= {key.replace("__", "."): value for key, value in settings.items()}
    assignments = [f"--set={key}={value}" for key, value in values.items()]
    return ["--role=learner", f"--replay={address}", f"--run-dir={run_dir}", *assignments]
