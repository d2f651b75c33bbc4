"""What K agents as processes over gRPC take in time beside one agent: K = 1, 2, 5 and 10.

python benchmarks/run_time.py [--agents 1,2,5,10] [--authors FOLDER] [--results FILE.csv]
python benchmarks/run_time.py --quick
python benchmarks/run_time.py --show FILE.csv

Every agent does the same steps and updates, whatever K is; the single agent is one in one process without a
service. Runs take turns and are measured as complexity.py does it, but for the memory, for looking at it four
times a second takes processes that share two cores 3 % of them; an increase compares runs of one turn.
Where there are fewer cores than agents these share them, so the run time is also given less the wait for a
core, and divided by the agents that share a core. Two agents at once slow each other even where they share
nothing but the machine, so as many single agents, each a process of its own, take turns, too, for each K > 1
that has a core for each: `apart`. FOLDER holds a copy of github.com/baturaysaglam/DASE, whose
single agent then takes turns, too (authors_run.py).
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from complexity import Plan, RunFailedError, machine, measure
from complexity_table import (
    NOTE,
    PUBLISHED,
    Measured,
    as_row,
    increase_percent,
    read_results,
    with_range,
)
from measuring import markdown
from results_files import ResultsError, write_lines

from dase_grpc.errors import DaseError

SINGLE, PROCESSES, APART, AUTHORS = "single", "processes", "apart", "authors"
AUTHORS_RUN: Final = Path(__file__).with_name("authors_run.py")


def measure_all(
    plan: Plan, agents: Sequence[int], *, repeats: int, authors: Path | None = None
) -> Iterator[Measured]:
    """The single agent and each K, in turns that begin with another each time; and the authors' agent."""
    apart = [count for count in agents if 1 < count <= (os.cpu_count() or 1)]
    cells = [
        (SINGLE, 1),
        *((PROCESSES, count) for count in agents),
        *((APART, count) for count in apart),
        *([(AUTHORS, 1)] if authors else []),
    ]
    for variant in (SINGLE, PROCESSES):  # so that no measured run waits for the disk
        warm = Plan(plan.env, 1, warmup=20, updates=20)
        measure(warm, algorithm="td3", variant=variant, repeat=0)
    for repeat in range(repeats):
        first = repeat % len(cells)
        for variant, count in (*cells[first:], *cells[:first]):
            if authors is not None and variant == AUTHORS:
                yield measure_authors(plan, authors, repeat=repeat)
                continue
            if variant == APART:
                yield measure_apart(plan, count, repeat=repeat)
                continue
            each = Plan(plan.env, count, warmup=plan.warmup, updates=plan.updates)
            yield measure(each, algorithm="td3", variant=variant, repeat=repeat, memory=False)


def measure_apart(plan: Plan, count: int, *, repeat: int) -> Measured:
    """Single agents at once that share nothing but the machine, as one run: its time is the slowest one's.

    Raises:
        RunFailedError: one does not run.
    """

    def one(_: int) -> Measured:
        return measure(plan, algorithm="td3", variant=SINGLE, repeat=repeat, memory=False)

    with ThreadPoolExecutor(count) as at_once:
        runs = list(at_once.map(one, range(count)))
    slowest = max(runs, key=lambda run: run.run_s)
    cpu_s = sum(run.cpu_s for run in runs)
    of_the_others = (cpu_s - slowest.cpu_s) / slowest.run_s
    return replace(
        slowest,
        variant=APART,
        agents=count,
        steps=sum(run.steps for run in runs),
        updates=sum(run.updates for run in runs),
        cpu_s=cpu_s,
        cpu_total_s=max(run.cpu_total_s for run in runs),  # the last one to end has counted them all
        others_cores=max(0.0, slowest.others_cores - of_the_others),
        load=min(run.load for run in runs),
    )


def measure_authors(plan: Plan, folder: Path, *, repeat: int) -> Measured:
    """The single agent of the authors' code for as many steps and updates; what is not measured is 0.

    Raises:
        RunFailedError: it does not run.
    """
    load = os.getloadavg()[0]
    options = (
        f"--env={plan.env}",
        f"--warmup={plan.warmup}",
        f"--updates={plan.updates}",
        f"--seed={repeat}",
    )
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, str(AUTHORS_RUN), str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **limits},
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise RunFailedError(f"the authors' agent in {folder} does not run: {why}")
    found = json.loads(done.stdout.splitlines()[-1])
    nothing = {field.name: 0.0 for field in fields(Measured) if field.type in (float, "float")}
    return Measured(
        **{
            **nothing,
            "algorithm": "td3",
            "variant": AUTHORS,
            "repeat": repeat,
            "agents": 1,
            "steps": plan.warmup + plan.updates,
            "gpu_allocated_mib": None,
            "gpu_reserved_mib": None,
            "at_peak": "",
            "load": load,
            **found,
        }
    )


def over(
    runs: Sequence[Measured],
    found: Sequence[Measured],
    seconds: Callable[[Measured], float],
    *,
    variant: str = SINGLE,
    agents: int = 1,
) -> str:
    """By how much more a time is than that of the single agent, or of another cell, in the same turn."""
    other = {run.repeat: seconds(run) for run in runs if (run.variant, run.agents) == (variant, agents)}
    values = [increase_percent(seconds(run), other[run.repeat]) for run in found if run.repeat in other]
    return with_range(values, "+.0f", unit=" %") if values else ""


def per_core_s(run: Measured, cores: int) -> float:
    """The run time as if no two agents had to share a core: divided by how many do."""
    return run.run_s / max(1.0, run.agents / cores)


def table(runs: Sequence[Measured], cores: int) -> str:
    """A line for the single agent and for each K, as Markdown: medians, ranges in brackets."""
    head = (
        "agents",
        "run time, s",
        "over single",
        "over as many apart",
        "less waits for a core",
        "by agents a core",
        "updates/s",
        "updates per CPU s",
        "paper",
    )
    rows = []
    for variant, count in dict.fromkeys((run.variant, run.agents) for run in sorted(runs, key=_order)):
        found = [run for run in runs if (run.variant, run.agents) == (variant, count)]
        alone, shared = variant == SINGLE, variant == PROCESSES
        rows.append(
            (
                name(variant, count),
                with_range([run.run_s for run in found], ".1f"),
                "" if alone else over(runs, found, lambda run: run.run_s),
                over(runs, found, lambda run: run.run_s, variant=APART, agents=count) if shared else "",
                "" if alone else over(runs, found, lambda run: run.unhindered_s),
                "" if alone else over(runs, found, lambda run: per_core_s(run, cores)),
                f"{statistics.median(run.updates_per_s for run in found):,.0f}",
                f"{statistics.median(run.updates_per_cpu_s for run in found):,.0f}",
                PUBLISHED[PROCESSES] if variant == PROCESSES and count == 2 else "",
            )
        )
    return markdown(head, rows)


def name(variant: str, count: int) -> str:
    """What a line of the table is called."""
    names = {SINGLE: "single", AUTHORS: "authors' single", APART: f"{count} singles, apart"}
    return names.get(variant, f"K = {count}")


def _order(run: Measured) -> tuple[int, int]:
    return (SINGLE, AUTHORS, APART, PROCESSES).index(run.variant), run.agents


def tables(runs: Sequence[Measured], where: "Machine") -> str:
    """The table, and what to know about it."""
    loads, others = [run.load for run in runs], [r.others_cores for r in runs if r.variant != AUTHORS]
    return (
        f"{where.name}; load average {min(loads):.1f} to {max(loads):.1f}; other work took "
        f"{min(others):.2f} to {max(others):.2f} cores; medians, ranges in brackets\n\n"
        f"{table(runs, where.cores)}\n\n{NOTE}"
    )


@dataclass(frozen=True)
class Machine:
    """Where runs were measured."""

    name: str
    cores: int


def write_runs(path: Path, runs: Sequence[Measured], where: Machine) -> None:
    """Writes a CSV file, one line for each run.

    Raises:
        ResultsError: it cannot be written.
    """
    rows = [{"machine": where.name, "machine_cores": where.cores, **as_row(run)} for run in runs]
    write_lines(path, list(rows[0]), rows)


def read_runs(path: Path) -> tuple[list[Measured], Machine]:
    """The runs in a CSV file, and where they were measured.

    Raises:
        ResultsError: it is no such file.
    """
    runs = read_results(path)
    with path.open(newline="", encoding="utf-8") as file:
        first = next(csv.DictReader(file))
    try:
        return runs, Machine(first["machine"], int(first["machine_cores"]))
    except KeyError as error:
        raise ResultsError(f"{path} holds no results of this benchmark: {error}") from None


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", default="1,2,5,10", help="each K, separated by commas")
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--warmup", type=int, default=1_000, help="random steps of each agent")
    parser.add_argument("--updates", type=int, default=2_000, help="updates of each agent")
    parser.add_argument("--authors", type=Path, metavar="FOLDER", help="a copy of their code")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one turn of 30 updates, K = 1 and 2")
    parser.add_argument("--results", type=Path, metavar="FILE.csv", help="one line for each run")
    parser.add_argument("--show", type=Path, metavar="FILE.csv", help="print the table of earlier results")
    given = parser.parse_args()
    if given.quick:
        given.env, given.agents, given.warmup = "InvertedPendulum-v5", "1,2", 20
        given.updates, given.turns = 30, 1
    try:
        print(tables(*(read_runs(given.show) if given.show else measure_and_keep(given))))
    except DaseError as error:
        sys.exit(str(error))


def measure_and_keep(given: argparse.Namespace) -> tuple[list[Measured], Machine]:
    """All runs; what there is so far is in the file where one is named."""
    where = Machine(machine(), os.cpu_count() or 1)
    plan = Plan(given.env, 1, given.warmup, given.updates)
    runs: list[Measured] = []
    agents = [int(count) for count in given.agents.split(",")]
    for run in measure_all(plan, agents, repeats=given.turns, authors=given.authors):
        runs.append(run)
        if given.results:
            write_runs(given.results, runs, where)
        print(f"{run.variant} {run.agents} turn {run.repeat + 1}: {run.run_s:.1f} s", file=sys.stderr)
    return runs, where


if __name__ == "__main__":
    main()
