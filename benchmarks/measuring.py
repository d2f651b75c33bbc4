"""What benchmarks of the replay share: rounds that take turns, results as a CSV file, the machine."""

import argparse
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from results_files import read_lines, write_lines

from dase_grpc.errors import DaseError

TASKS: Final[Mapping[str, tuple[int, int]]] = {"narrow": (17, 6), "wide": (348, 17)}
"""Observation and action components: HalfCheetah's, and Humanoid's."""

_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Round:
    """What was done in a round, how long it took, and the processor seconds of client and server."""

    events: int
    seconds: float
    client_s: float
    server_s: float


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        machine: the processor, its cores and versions.
        load: the machine's load average then.
        subject: what it is about: a task, or what grows and how far.
        what: what was measured.
        who: whose value it is.
        turn: which round; those of one turn were measured one right after the other.
        client_us, server_us: processor time per event, 0 where that is not what was measured.
    """

    machine: str
    load: float
    subject: str
    what: str
    who: str
    turn: int
    value: float
    client_us: float = 0.0
    server_us: float = 0.0


@dataclass(frozen=True)
class Entry:
    """Who takes part in a comparison, and how it does a round of so many seconds."""

    who: str
    play: Callable[[float], Round]


def take_turns(
    entries: Sequence[Entry], *, subject: str, what: str, turns: int, seconds: float
) -> list[Figure]:
    """Events per second of each entry, turn by turn, in another order each time; a first turn warms up."""
    found, named = [], machine()
    for turn in range(-1, turns):
        first = max(turn, 0) % len(entries)
        for entry in (*entries[first:], *entries[:first]):
            load = os.getloadavg()[0]
            done = entry.play(seconds)
            if turn >= 0:
                found.append(
                    Figure(
                        named,
                        load,
                        subject,
                        what,
                        entry.who,
                        turn,
                        done.events / done.seconds,
                        1e6 * done.client_s / done.events,
                        1e6 * done.server_s / done.events,
                    )
                )
    return found


# --- what is made of figures --------------------------------------------------------------------------------


def values(figures: Iterable[Figure], **wanted: Any) -> list[Figure]:
    """Those whose fields are as wanted."""
    return [
        figure
        for figure in figures
        if all(getattr(figure, field) == value for field, value in wanted.items())
    ]


def median(figures: Sequence[Figure], field: str = "value") -> float:
    """The median of a field."""
    return float(statistics.median(getattr(figure, field) for figure in figures))


def ratios(mine: Sequence[Figure], its: Sequence[Figure]) -> list[float]:
    """The values of one over those of another, by turns."""
    by_turn = {figure.turn: figure.value for figure in its}
    return [figure.value / by_turn[figure.turn] for figure in mine]


def mean_ratio(found: Sequence[float]) -> str:
    """The geometric mean and its 95 % interval, of independent log-normal ratios."""
    logarithms = np.log(found)
    mean, error = logarithms.mean(), logarithms.std(ddof=1) / math.sqrt(len(found))
    low, middle, high = np.exp(mean + np.array([-1.96, 0.0, 1.96]) * error)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def write_figures(path: Path, figures: Iterable[Figure]) -> None:
    """Writes a CSV file, one line for each, that gives the same numbers again to the last digit.

    Raises:
        ResultsError: it cannot be written.
    """
    write_lines(path, [field.name for field in fields(Figure)], map(asdict, figures))


def read_figures(path: Path) -> list[Figure]:
    """The figures in a CSV file.

    Raises:
        ResultsError: it is no such file.
    """
    return read_lines(path, Figure)


def answer(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Sequence[Figure]],
    tables: Callable[[Sequence[Figure]], str],
) -> None:
    """Measures, or reads what was measured; keeps it where a file is named, and prints."""
    parser.add_argument("--results", type=Path, metavar="FILE.csv", help="one line for each figure")
    parser.add_argument("--show", type=Path, metavar="FILE.csv", help="print the tables of earlier results")
    given = parser.parse_args()
    try:
        found = read_figures(given.show) if given.show else measure(given)
        if given.results:
            write_figures(given.results, found)
        print(tables(found))
    except DaseError as error:
        sys.exit(str(error))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def conditions(figures: Sequence[Figure]) -> str:
    """On which machine figures were measured, and how busy that was."""
    loads, machines = [figure.load for figure in figures], {figure.machine for figure in figures}
    turns = 1 + max(figure.turn for figure in figures)
    return (
        f"{'; '.join(sorted(machines))}; load average {min(loads):.1f} to {max(loads):.1f}; "
        f"medians of {turns} turns"
    )


# --- processes ----------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """Processor seconds of a process, of all its threads."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/smaps_rollup has no Rss")


def processor() -> str:
    """Its name."""
    return next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )


def machine() -> str:
    """The processor, its cores and the Python."""
    return f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"
