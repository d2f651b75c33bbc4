"""Measures how long commands take to start: `dase --help`, a replay node, `dase train` in both its ways.

    python benchmarks/startup.py [--against CHECKOUT] [--turns 5] [--results FILE.csv | --show FILE.csv]

A run trains the quick start's agents for a few hundred steps. What counts is the time from its start to the
first environment step of the agent that comes last, and to its end. CHECKOUT is a folder with another
revision of this project, which takes turns with this one. Processor time is that of a command and of all that
it has started, to their ends.
"""

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Final

from first_steps import VARIABLE
from measuring import Figure, answer, conditions, machine, markdown, mean_ratio, median, ratios, values

from dase_grpc.errors import DaseError
from dase_grpc.process.lifecycle import READY_PREFIX

HERE: Final = Path(__file__).parent
NOW, BEFORE = "now", "before"
END, READY, FIRST_STEP = "end", "ready", "first step"
TRAIN: Final = (
    "train",
    "--preset=quickstart",
    "--env=first_steps:NotedEnv",
    "--steps=300",
    "--set=agent.start_steps=100",
    "--set=eval.every=150",
    "--set=eval.episodes=2",
)
REPLAY: Final = ("node", "--role=replay", "--listen=127.0.0.1:0", "--capacity=1000", "--min-size=10")

Times = Mapping[str, float]
"""Seconds from the start of a command until something was reached, by what that is."""


class CommandFailedError(DaseError):
    """A command that is measured did not do what it is for."""


@dataclass(frozen=True)
class Checkout:
    """The commands of one revision of this project, in a folder in which they work."""

    root: Path
    folder: Path

    def help(self) -> Times:
        """`dase --help`."""
        return {END: self._run("--help")[1]}

    def replay(self) -> Times:
        """A replay node, until it says that it listens."""
        begun = time.monotonic()
        with self._started(*REPLAY) as process:
            line = process.stdout.readline() if process.stdout else ""
            ready_s = time.monotonic() - begun
            process.send_signal(signal.SIGTERM)
        if not line.startswith(READY_PREFIX):
            raise CommandFailedError(f"a replay said {line!r} instead of its address")
        return {READY: ready_s}

    def train(self, agents: int, *more: str) -> Times:
        """A short run, whose first steps are those after the one by which its environment is tried out."""
        self._notes.unlink(missing_ok=True)
        begun = time.monotonic()
        launcher, end_s = self._run(*TRAIN, f"--agents={agents}", *more)
        lines = (line.split() for line in self._notes.read_text(encoding="ascii").splitlines())
        steps = sorted(((int(pid), float(at) - begun) for pid, at in lines), key=itemgetter(1))
        in_launcher = [at for pid, at in steps if pid == launcher][1:]
        in_others = {pid: at for pid, at in reversed(steps) if pid != launcher}  # the first of each
        found = sorted(in_others.values()) or in_launcher
        if len(found) < agents:
            raise CommandFailedError(f"{len(found)} of {agents} agents have made a step")
        return {FIRST_STEP: found[agents - 1], END: end_s}

    @property
    def _notes(self) -> Path:
        return self.folder / "first-steps"

    def _run(self, *arguments: str) -> tuple[int, float]:
        """The process of a command that has ended, and seconds to its end."""
        begun = time.monotonic()
        with self._started(*arguments) as process:
            output, _ = process.communicate()
        seconds = time.monotonic() - begun
        if process.returncode:
            raise CommandFailedError(f"dase {' '.join(arguments)} in {self.root} failed:\n{output}")
        return process.pid, seconds

    def _started(self, *arguments: str) -> subprocess.Popen[str]:
        paths = os.pathsep.join([str(self.root.absolute()), str(HERE)])
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return subprocess.Popen(
            [sys.executable, "-m", "dase_grpc", *arguments],
            cwd=self.folder,
            env={**kept, "PYTHONPATH": paths, VARIABLE: str(self._notes)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def commands(agents: Sequence[int]) -> Mapping[str, Callable[[Checkout], Times]]:
    """What is measured, by what it is called."""
    return {
        "dase --help": Checkout.help,
        "dase node --role replay": Checkout.replay,
        **{f"dase train, K = {count}": partial(Checkout.train, agents=count) for count in agents},
        f"dase train --lockstep, K = {agents[0]}": lambda each: each.train(agents[0], "--lockstep"),
    }


def measure(given: argparse.Namespace) -> list[Figure]:
    """All rounds, in which checkouts take turns."""
    roots = {NOW: HERE.parent, **({BEFORE: given.against} if given.against else {})}
    found: list[Figure] = []
    with ExitStack() as stack:
        checkouts = {
            who: Checkout(root, Path(stack.enter_context(tempfile.TemporaryDirectory())))
            for who, root in roots.items()
        }
        for each in () if given.quick else checkouts.values():  # compiles what has no bytecode yet
            each.train(1)
        every, turns = commands(given.agents), 1 if given.quick else given.turns
        for turn, (subject, command) in product(range(turns), every.items()):
            for who in sorted(checkouts, reverse=turn % 2 == 0):
                found += _figures(subject, who, turn, partial(command, checkouts[who]))
    return found


def _figures(subject: str, who: str, turn: int, command: Callable[[], Times]) -> Iterator[Figure]:
    load, used_s = os.getloadavg()[0], _cpu_s()
    times = command()
    cpu_us = 1e6 * (_cpu_s() - used_s)
    for what, seconds in times.items():
        yield Figure(machine(), load, subject, what, who, turn, seconds, client_us=cpu_us)


def _cpu_s() -> float:
    """Processor seconds of all processes that were started here, and of theirs, that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tables(found: Sequence[Figure]) -> str:
    """One row for each command and what it reaches."""
    rows = []
    for subject, what in dict.fromkeys((figure.subject, figure.what) for figure in found):
        now, before = (values(found, subject=subject, what=what, who=who) for who in (NOW, BEFORE))
        paired = len(now) > 1 and len(now) == len(before)
        rows.append(
            [
                subject,
                what,
                *(f"{median(each):.2f}" if each else "" for each in (before, now)),
                mean_ratio(ratios(now, before)) if paired else "",
                *(f"{median(each, 'client_us') / 1e6:.2f}" if each else "" for each in (before, now)),
            ]
        )
    head = ["command", "to its", "before, s", "now, s", "now / before", "CPU before, s", "CPU now, s"]
    return f"{conditions(found)}\n\n{markdown(head, rows)}"


def main() -> None:
    """Measures, or shows what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another revision, to take turns")
    parser.add_argument("--agents", type=int, nargs="+", default=[2, 4], metavar="K")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one turn, to see that it works")
    answer(parser, measure, tables)


if __name__ == "__main__":
    main()
