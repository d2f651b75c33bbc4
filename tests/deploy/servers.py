"""Programs that a test starts and interrupts, and ports for them."""

import json
import signal
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def replaced(text: str, replacements: Mapping[str, str]) -> str:
    """A text in which each of these, which are all there, is another."""
    for before, after in replacements.items():
        assert before in text, before
        text = text.replace(before, after)
    return text


def every_second(text: str) -> str:
    """Prometheus's committed configuration, in more of a hurry."""
    intervals = {
        "scrape_interval: 5s": "scrape_interval: 1s",
        "evaluation_interval: 15s": "evaluation_interval: 1s",
    }
    return replaced(text, intervals)


def prometheus(folder: Path, address: str) -> list[str]:
    """The command that starts it, to be given in the folder of its configuration."""
    program = str(folder / "prometheus")
    return [
        program,
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
    ]


def asked(base: str, path: str, *, timeout_s: float = PATIENCE_S, **query: str) -> Any:
    """What Prometheus answers."""
    url = f"{base}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        said = json.load(answer)
    assert said["status"] == "success", said
    return said["data"]


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
