"""The figures of complexity.py: one run of one variant, a CSV file of them, and the table they make."""

import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from results_files import ResultsError, read_lines

VARIANTS: Final = ("single", "lockstep", "threads", "processes")
PUBLISHED: Final[Mapping[str, str]] = {"threads": "+486 to +501 %", "processes": "+265 to +271 %"}
"""The increases over one agent that the paper's complexity table gives for K = 2 (arXiv 2207.13453)."""


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        run_s: from the first step of an agent to the end of its last one; of the agent that took longest.
        core_wait_s: how much of run_s that agent was ready to run and had no core.
        startup_s: from the start of the process to the first step of the last agent to come.
        cpu_s: processor seconds, of a learner node while its agent trains, of others while any agent does.
        cpu_total_s: processor seconds of all processes from start to end.
        ram_mib: the most resident memory at one time, each page counted once.
        pss_mib, rss_mib: the largest sums over the processes of what the kernel calls so.
        gpu_allocated_mib, gpu_reserved_mib: the most that torch held, summed over processes.
        at_peak: the memory of each process then, its own and that of the files it maps.
        others_cores: the cores that other work on this machine took within run_s.
        load: the machine's load average when the run began.
    """

    algorithm: str
    variant: str
    repeat: int
    agents: int
    steps: int
    updates: int
    run_s: float
    core_wait_s: float
    startup_s: float
    cpu_s: float
    cpu_total_s: float
    ram_mib: float
    pss_mib: float
    rss_mib: float
    gpu_allocated_mib: float | None
    gpu_reserved_mib: float | None
    at_peak: str
    others_cores: float
    load: float

    @property
    def updates_per_s(self) -> float:
        """Updates of all agents together."""
        return self.updates / self.run_s

    @property
    def unhindered_s(self) -> float:
        """The run time less the wait for a core: about what it is where every thread has one."""
        return self.run_s - self.core_wait_s

    @property
    def cores(self) -> float:
        """The cores that all processes together kept busy."""
        return self.cpu_s / self.run_s

    @property
    def updates_per_cpu_s(self) -> float:
        """Updates of all agents together for each second of a core."""
        return self.updates / self.cpu_s


@contextmanager
def results_file(path: Path | None) -> "Iterator[csv.DictWriter[str] | None]":
    """A new CSV file for runs; none without a path.

    Raises:
        ResultsError: it cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w", newline="", encoding="utf-8", buffering=1)
    except OSError as error:
        raise ResultsError(f"cannot write {path}: {error.strerror or error}") from None
    with file:
        writer = csv.DictWriter(file, [field.name for field in fields(Measured)], lineterminator="\n")
        writer.writeheader()
        yield writer


def as_row(run: Measured) -> dict[str, Any]:
    """A run as the cells of a line; floats are rounded to what was measured."""
    return {
        name: f"{value:.3f}" if isinstance(value, float) else value for name, value in asdict(run).items()
    }


def read_results(path: Path) -> list[Measured]:
    """The runs in a CSV file.

    Raises:
        ResultsError: it is not such a file.
    """
    return read_lines(path, Measured)


def increase_percent(value: float, single: float) -> float:
    """How much more than the single agent's, in percent of that."""
    return (value / single - 1) * 100


def increases(runs: Sequence[Measured], *, algorithm: str, variant: str, figure: str) -> list[float]:
    """The increase of a figure over the single agent of the same turn, in percent, turn by turn."""
    by_turn = {
        (run.variant, run.repeat): float(getattr(run, figure)) for run in runs if run.algorithm == algorithm
    }
    return [
        increase_percent(value, by_turn["single", repeat])
        for (found, repeat), value in by_turn.items()
        if found == variant and ("single", repeat) in by_turn
    ]


HEADER: Final = (
    "algorithm",
    "variant",
    "RAM, MiB",
    "over single",
    "GPU, MiB",
    "run time, s",
    "over single",
    "less waits for a core, s",
    "over single",
    "paper",
    "updates/s",
    "cores",
    "updates per CPU s",
    "start-up, s",
)


def table(runs: Sequence[Measured]) -> str:
    """A Markdown table: medians over the turns, with the range of the run times and of the increases."""
    rows = [HEADER, tuple("---" for _ in HEADER)]
    for algorithm in dict.fromkeys(run.algorithm for run in runs):
        for variant in VARIANTS:
            found = [run for run in runs if (run.algorithm, run.variant) == (algorithm, variant)]
            if found:
                rows.append(_row(runs, found))
    return "\n".join(f"| {' | '.join(row)} |" for row in _aligned(rows))


def _row(runs: Sequence[Measured], found: Sequence[Measured]) -> tuple[str, ...]:
    algorithm, variant = found[0].algorithm, found[0].variant

    def median(figure: str, digits: int = 0) -> str:
        return f"{statistics.median(getattr(run, figure) for run in found):,.{digits}f}"

    def over_single(figure: str) -> str:
        if variant == "single":
            return ""
        values = increases(runs, algorithm=algorithm, variant=variant, figure=figure)
        return with_range(values, "+.0f", unit=" %") if values else ""

    on_gpu = found[0].gpu_reserved_mib is not None
    return (
        algorithm,
        variant,
        median("ram_mib"),
        over_single("ram_mib"),
        f"{median('gpu_allocated_mib')} ({median('gpu_reserved_mib')} reserved)" if on_gpu else "n/a",
        with_range([run.run_s for run in found], ".1f"),
        over_single("run_s"),
        median("unhindered_s", 1),
        over_single("unhindered_s"),
        PUBLISHED.get(variant, "") if found[0].agents == 2 else "",
        median("updates_per_s"),
        median("cores", 2),
        median("updates_per_cpu_s"),
        median("startup_s", 1),
    )


def with_range(values: Sequence[float], form: str, *, unit: str = "") -> str:
    """The median, and the range in brackets where there are several values."""
    told = f"{statistics.median(values):{form}}{unit}"
    return told if len(values) == 1 else f"{told} ({min(values):{form}} to {max(values):{form}})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [cell.ljust(width, "-" if cell == "---" else " ") for cell, width in zip(row, widths, strict=True)]
        for row in rows
    ]


NOTE: Final = (
    "paper: the increase over one agent that the complexity table of arXiv 2207.13453 gives for K = 2, on "
    "its authors' machine with their code. Not a target, and not known to count just what is counted here."
)
