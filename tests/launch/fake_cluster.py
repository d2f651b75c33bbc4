"""Local clusters of fake nodes, which behave as they are told; and what is left of them."""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from children import lives
from replay.wire.services import eventually
from small import new_run, small_config

from dase_grpc.launch.local import LocalCluster, run_cluster
from dase_grpc.launch.supervision import Supervisor, Timing
from dase_grpc.runs.logs import read_restarts

FAKE = Path(__file__).with_name("fake_node.py")
QUICK = Timing(status_s=0.05, first_pause_s=0.01)


class NullDisplay:
    """Notes whether it is shown."""

    shown = False

    def __enter__(self):
        self.shown = True
        return self

    def __exit__(self, *exc):
        self.shown = False

    def show(self, snapshot):
        pass


class FakeCluster:
    """A cluster of fake nodes, and what is left of it."""

    def __init__(self, root: Path, behaviours: dict[str, str], *, timing: Timing = QUICK, **settings):
        self.pids = root / "pids"
        self.pids.mkdir()
        self.config = small_config(**settings)
        self.directory = new_run(root, self.config)
        self.timing = timing
        self.stop = asyncio.Event()
        self.said: list[str] = []
        self.display = NullDisplay()
        self.program = (sys.executable, "-S", str(FAKE), str(self.pids), json.dumps(behaviours))

    def cluster(self, *, limit: int = 5, **options) -> LocalCluster:
        supervisor = Supervisor(self.directory, self.say, limit=limit, timing=self.timing)
        return LocalCluster(
            self.config, self.directory, supervisor, program=self.program, timing=self.timing, **options
        )

    async def run(self, cluster: LocalCluster | None = None, *, on_start=lambda _: None, **options) -> None:
        await run_cluster(
            cluster or self.cluster(**options),
            stop=self.stop,
            display=self.display,
            say=self.say,
            on_start=on_start,
        )

    def begin(self, **options) -> asyncio.Task[None]:
        return asyncio.create_task(self.run(**options))

    async def end(self, running: asyncio.Task[None]) -> None:
        """Stops it, as a signal does, which is a good end."""
        self.stop.set()
        await running

    def say(self, text):
        assert not (self.display.shown and text.startswith("stopping"))
        self.said.append(text)

    def starts(self, name: str) -> list[list[str]]:
        """The arguments of each start of a node."""
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.pids / f"{name}.starts").read_text().splitlines()]
        return []

    def times_started(self, *names: str) -> list[int]:
        return [len(self.starts(name)) for name in names]

    @property
    def restarts(self) -> list[tuple[str, str, float | None]]:
        """What was written down about failures: the node, why, and the pause."""
        return [(each.node, each.why, each.pause_s) for each in read_restarts(self.directory.restarts)]

    def log(self, name: str) -> str:
        with suppress(FileNotFoundError):
            return (self.directory.logs / f"{name}.log").read_text()
        return ""

    async def until_waiting(self, *names: str) -> None:
        """Returns when nodes train, or whatever they do until they are told to end."""
        await eventually(lambda: all("waiting" in self.log(name) for name in names))
        await eventually(lambda: self.display.shown)  # a process may run before its start has returned

    def send(self, name: str, number: signal.Signals) -> None:
        os.kill(int((self.pids / f"{name}.pid").read_text()), number)

    @property
    def left(self) -> list[str]:
        return [path.stem for path in self.pids.glob("*.pid") if lives(int(path.read_text()))]


def quick(**changes: float) -> Timing:
    return replace(QUICK, **changes)
