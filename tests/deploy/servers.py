"""Programs that a test starts and interrupts, and ports for them."""

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from children import importing
from patience import PATIENCE_S

TESTS = Path(__file__).resolve().parents[1]
SOON_S = 5.0
ASKED_AGAIN_S = 5.0
"""What does not answer is asked again after as long."""


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has."""
    for first in range(19_500, 32_000, 17):
        try:
            for port in range(first, first + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@contextmanager
def running(command: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is interrupted at the end of the block, once more if that does not end it soon."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=importing(TESTS)
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(SOON_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # which kills its nodes, too
            process.wait(PATIENCE_S)
