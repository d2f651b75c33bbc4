"""Which similarity helps where λ of the paper is near 0: MuJoCo tasks with three or more action dimensions.

python benchmarks/similarity_study.py --results study.csv                  runs the built-in list
python benchmarks/similarity_study.py --measure floor --set dps.normalise=true --task Hopper-v5 --seeds 0,1
python benchmarks/similarity_study.py --results study.csv --summary        prints the tables, runs nothing

Two agents (and one alone, `single`), lockstep, small networks, 10 000 steps each. The final score is the
mean of the last five evaluations of both agents; the area is that under their mean learning curve, divided
by the steps. Cells run seed by seed, all measures and tasks of one before the next. Each finished run is a
line of the CSV file (--results), and what is there already is not run again.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Final, Self

import numpy as np
from similarity_measures import (
    NAMED,
    SMALL_AGENT,
    append_row,
    chosen,
    label,
    read_rows,
    run_missing,
    settings_of,
    short,
    small,
    with_interval,
)

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.errors import DaseError, DivergedError
from dase_grpc.launch.lockstep import open_lockstep, run_lockstep
from dase_grpc.runs.curves import Series, area, column
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_evaluations, read_metrics

LAST: Final = 5
STEPS: Final = 10_000
TASKS: Final = ("Hopper-v5", "Walker2d-v5")
SINGLE: Final = "single"
BUILT_IN: Final = (
    "isolated",
    "jeffreys",
    "none",
    "transition",
    "normalise",
    SINGLE,
    "js",
    "floor+normalise",
    "transition+normalise",
    "shrinkage",
    "floor",
    "kl",
)
"""Measures that can differ with one peer: scope `agent` is the pool, and no group has few rows."""
REFERENCES: Final = ("isolated", "jeffreys")
SETTINGS: Final[Mapping[str, Any]] = {
    "agent": {**SMALL_AGENT},
    "eval": {"every": 1_000, "episodes": 3},
    "train": {"checkpoint_every": 1_000_000, "log_every": 500, "threads": 1},
}


@dataclass(frozen=True)
class Cell:
    """One run; `measure` is a label of `similarity_measures`, that of the default for a single agent."""

    task: str
    agents: int
    measure: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """The measure's short name."""
        return SINGLE if self.agents == 1 else short(self.measure)


@dataclass(frozen=True)
class Result:
    """What a run came to; the last three are medians over both agents' records, NaN for one agent.

    A run whose networks diverge scores minus infinity.
    """

    final: float
    area: float
    similarity_weight: float = float("nan")
    external_share: float = float("nan")
    effective_batch: float = float("nan")

    @classmethod
    def of(cls, run: RunDirectory) -> Self:
        """Reads a finished run.

        Raises:
            RunDirectoryError: one of its files is damaged.
        """
        evaluations = [read_evaluations(agent.evaluations.path) for agent in run.agents()]
        curve = np.mean([each.return_mean for each in evaluations], axis=0)
        score = cls(float(curve[-LAST:].mean()), area(Series(evaluations[0].step, curve)))
        if len(evaluations) == 1:
            return score
        records = [record for agent in run.agents() for record in read_metrics(agent.metrics.path)]
        keys = ("similarity_weight", "external_share", "effective_batch")
        medians = [float(np.median(column(records, key).value)) for key in keys]
        return cls(score.final, score.area, *medians)


def configuration(cell: Cell) -> RunConfig:
    """The run's configuration."""
    train = {"agents": cell.agents, "steps": cell.steps, "seed": cell.seed}
    return resolve(SETTINGS, settings_of(cell.measure), {"env": {"id": cell.task}, "train": train})


def play(cell: Cell) -> Result:
    """Trains and scores one cell."""
    config = configuration(cell)
    with tempfile.TemporaryDirectory(prefix="study-") as folder:
        directory = RunDirectory.create(Path(folder), "run", config, mode="lockstep")
        try:
            with open_lockstep(config, directory) as run:
                run_lockstep(run, Event(), lambda: None)
        except DivergedError:
            return Result(float("-inf"), float("-inf"))
        return Result.of(directory)


# --- results ----------------------------------------------------------------------------------------------


def read_results(path: Path) -> dict[Cell, Result]:
    """The finished cells of a CSV file; none where there is no file."""
    return {
        Cell(row["task"], int(row["agents"]), row["measure"], int(row["seed"]), int(row["steps"])): Result(
            *(float(row[field.name]) for field in fields(Result))
        )
        for row in read_rows(path)
    }


def append_result(path: Path, cell: Cell, result: Result) -> None:
    """Adds a finished cell."""
    numbers = {name: f"{value:.6g}" for name, value in asdict(result).items()}
    append_row(path, {**asdict(cell), **numbers})


def table(task: str, results: Mapping[Cell, Result]) -> str:
    """A Markdown table of one task: every measure's scores, and its differences by seed to two others.

    Intervals are 95 % bootstrap intervals over seeds.
    """
    cells = {cell: result for cell, result in results.items() if cell.task == task}
    by_name: dict[str, dict[int, Result]] = {}
    for cell, result in cells.items():
        by_name.setdefault(cell.name, {})[cell.seed] = result
    references = [name for name in REFERENCES if name in by_name]
    head = [
        "measure",
        "seeds",
        "final",
        "area",
        *(f"final − `{name}`" for name in references),
        *(f"area − `{name}`" for name in references),
        "λ",
        "external share",
        "effective batch",
    ]
    lines = [_line(head), _line(["---"] * len(head))]
    for name in sorted(by_name, key=lambda name: -_mean(by_name[name], "final")):
        runs = by_name[name]
        lines.append(
            _line(
                [
                    f"`{name}`",
                    str(len(runs)),
                    with_interval([run.final for run in runs.values()]),
                    with_interval([run.area for run in runs.values()]),
                    *(_difference(runs, by_name[other], "final") for other in references),
                    *(_difference(runs, by_name[other], "area") for other in references),
                    *_shares(runs),
                ]
            )
        )
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mean(runs: Mapping[int, Result], key: str) -> float:
    return float(np.mean([getattr(run, key) for run in runs.values()]))


def _difference(runs: Mapping[int, Result], others: Mapping[int, Result], key: str) -> str:
    """By seed, over the seeds that both have."""
    if runs is others:
        return "–"
    shared = sorted(runs.keys() & others.keys())
    return with_interval([getattr(runs[seed], key) - getattr(others[seed], key) for seed in shared])


def _shares(runs: Mapping[int, Result]) -> list[str]:
    """Medians over the seeds of what the records say."""
    values = [[run.similarity_weight, run.external_share, run.effective_batch] for run in runs.values()]
    if not np.isfinite(values).all():
        return ["–", "–", "–"]
    weight, share, batch = np.median(values, axis=0)
    return [small(weight), small(share), f"{batch:.0f}"]


# --- command line -----------------------------------------------------------------------------------------


def cells_of(given: argparse.Namespace) -> list[Cell]:
    """The cells asked for, seed by seed.

    Raises:
        ConfigError: a flag that is no setting of `dps`.
    """
    names = given.measure or ([] if given.set else list(BUILT_IN))
    alone = (1, label({}))
    if given.set:
        measured = chosen([name for name in names if name != SINGLE], given.set)
        order = [*((2, measure) for measure in measured), *([alone] if SINGLE in names else [])]
    else:
        order = [alone if name == SINGLE else (2, label(NAMED[name])) for name in names]
    return [
        Cell(task, agents, measure, int(seed), given.steps)
        for seed in given.seeds.split(",")
        for agents, measure in order
        for task in given.task or TASKS
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--measure", action="append", default=[], choices=(*NAMED, SINGLE), help="repeatable")
    parser.add_argument("--set", action="append", default=[], metavar="dps.KEY=VALUE", help="repeatable")
    parser.add_argument("--task", action="append", metavar="ID", help="repeatable")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="separated by commas")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each agent")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="processes")
    parser.add_argument("--results", type=Path, default=Path("similarity_study.csv"), metavar="FILE")
    parser.add_argument("--summary", action="store_true", help="print the tables of FILE and run nothing")
    return parser.parse_args()


def main() -> None:
    """Runs what is missing and prints a table for each task."""
    given = _arguments()
    try:
        cells = cells_of(given)
    except DaseError as error:
        sys.exit(str(error))
    results = read_results(given.results)
    if not given.summary:
        note = partial(append_result, given.results)
        results = run_missing(cells, results, play=play, note=note, jobs=given.jobs)
    for task in dict.fromkeys(cell.task for cell in results):
        print(f"{task}\n\n{table(task, results)}\n")


if __name__ == "__main__":
    main()
