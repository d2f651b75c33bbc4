"""Commands as a person runs them: real processes in a folder of their own, and what they leave."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from children import importing, until_ended
from patience import PATIENCE_S

from dase_grpc.runs.checkpoint import latest, load_checkpoint
from dase_grpc.runs.directory import AgentDirectory, RunDirectory
from dase_grpc.runs.logs import read_evaluations, read_metrics

TESTS = Path(__file__).parents[1]
ENDLESS = 10_000_000


class Command:
    """A `dase` process in a folder; what it prints lies there in output.txt."""

    def __init__(self, folder: Path, *arguments: object, stdout: int | None = None) -> None:
        self.output_file = folder / "output.txt"
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dase_grpc", *map(str, arguments)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=output if stdout is None else stdout,
                env=importing(TESTS, TERM="xterm"),
            )

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that happens while it runs."""
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < limit, self.output
            time.sleep(0.02)

    def end(self, number: signal.Signals | None = None) -> int:
        """Sends it a signal, if any; its exit code."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def dase(folder: Path, *arguments: object) -> tuple[int, str]:
    """A `dase` process to its end: its exit code, and what it printed."""
    command = Command(folder, *arguments)
    return command.end(), command.output


def living(*needles: str) -> Iterator[tuple[int, list[str]]]:
    """Processes whose command line holds all of these, and it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = os.fsdecode(path.read_bytes()).split("\0")
        except OSError:
            continue
        if all(any(needle in part for part in command) for needle in needles):
            yield int(path.parent.name), command


class Train(Command):
    """A `dase train` process in a folder of its own, named after that folder."""

    def __init__(self, folder: Path, *arguments: object, stdout: int | None = None) -> None:
        self.name = f"{folder.parent.name}-{folder.name}"
        self.path = folder / "runs" / self.name
        super().__init__(folder, "train", "--name", self.name, *arguments, stdout=stdout)

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory.open(self.path)

    def agent(self, agent_id: int) -> AgentDirectory:
        return AgentDirectory(self.path / "agents" / str(agent_id))

    def log(self, name: str) -> str:
        return (self.directory.logs / f"{name}.log").read_text()

    def nodes(self) -> dict[str, int]:
        """The pids of this run's nodes that live, by role or agent; launched by us or left behind."""
        found = {}
        for pid, command in living(self.name, "--stdin-is-leash"):
            role = next(part for part in command if part.startswith(("--agent=", "--role=replay")))
            found[role.removeprefix("--role=").removeprefix("--")] = pid
        return found

    def until_nobody_is_left(self) -> None:
        while left := self.nodes().values():
            until_ended(*left)

    def until_training(self) -> None:
        """Returns once both agents have trained for a while."""
        self.until(lambda: all(len(self.curve(agent_id).step) >= 3 for agent_id in (0, 1)))

    def curve(self, agent_id: int):
        return read_evaluations(self.agent(agent_id).evaluations.path)


def assert_kept_until_the_end(run: RunDirectory) -> None:
    """Each agent has a checkpoint that can be read, of the step that its last record names."""
    for agent in run.agents():
        path = latest(agent.checkpoints)
        assert path is not None
        assert load_checkpoint(path).step == read_metrics(agent.metrics.path)[-1]["step"]
