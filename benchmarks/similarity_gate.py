"""Runs the similarity gate: does a measure keep bad peers out (flip) and let useful ones in (random)?

python benchmarks/similarity_gate.py --measure jeffreys --measure isolated --seeds 0,1,2 --jobs 2
python benchmarks/similarity_gate.py --set dps.floor=true --set dps.scope=agent --seeds 0,1,2

A measure is one of the divergences, or the --set flags together; with neither, the default one. All runs
are in lockstep, Pendulum-v1, small networks; a score is the mean of agent 0's last three evaluations.

flip: K = 3, agents 1 and 2 in a Pendulum whose torque has the opposite sign, 10 000 steps.
random: K = 4, agents 1 to 3 act uniformly at random, 9 000 steps.

Each finished run is a line of the CSV file (--results), and what is there already is not run again.
"""

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Event
from typing import Any, Final

import gymnasium
import numpy as np

from dase_grpc.config import DIVERGENCES, DpsConfig, EnvConfig, RunConfig, parse_assignments, resolve
from dase_grpc.errors import DaseError, DivergedError
from dase_grpc.launch.lockstep import Peer, open_lockstep, run_lockstep
from dase_grpc.learning.envs import Environment
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.evaluations import read_evaluations
from dase_grpc.schema import Array

COLUMNS: Final = ("half", "measure", "seed", "steps", "score")
LAST: Final = 3
SETTINGS: Final[Mapping[str, Any]] = {
    "env": {"id": "Pendulum-v1"},
    "agent": {
        "hidden": [64, 64],
        "batch_size": 64,
        "actor_lr": 1e-3,
        "critic_lr": 1e-3,
        "start_steps": 1_000,
    },
    "eval": {"every": 1_000, "episodes": 10},
    "train": {"checkpoint_every": 1_000_000},
}


class Reversed(gymnasium.ActionWrapper[Array, Array, Array]):
    """Turns every action round."""

    def action(self, action: Array) -> Array:
        """The opposite action; the bounds must be symmetric."""
        return np.negative(action)


def reversed_pendulum() -> Environment:
    """Pendulum-v1 with torque of the opposite sign."""
    return Reversed(gymnasium.make("Pendulum-v1"))


@dataclass(frozen=True)
class Half:
    """One half of the gate: its peers, its length, and the score a measure must exceed."""

    agents: int
    steps: int
    peer: Peer
    threshold: float


HALVES: Final[Mapping[str, Half]] = {
    "flip": Half(3, 10_000, Peer(env=EnvConfig(id="similarity_gate:reversed_pendulum")), -800.0),
    "random": Half(4, 9_000, Peer(random=True), -450.0),
}


@dataclass(frozen=True)
class Cell:
    """One run of the gate."""

    half: str
    measure: str
    seed: int
    steps: int


def label(settings: Mapping[str, Any]) -> str:
    """What tells a measure from others: its `dps` settings that are not the default, as JSON."""
    chosen = resolve({"dps": settings}).dps.model_dump()
    default = DpsConfig().model_dump()
    changed = {key: value for key, value in chosen.items() if value != default[key]}
    return json.dumps({"divergence": chosen["divergence"], **changed})


def configuration(cell: Cell) -> RunConfig:
    """The run's configuration."""
    train = {"agents": HALVES[cell.half].agents, "steps": cell.steps, "seed": cell.seed}
    return resolve(SETTINGS, {"dps": json.loads(cell.measure), "train": train})


def play(cell: Cell) -> float:
    """Trains and scores one cell; a run whose networks diverge scores minus infinity."""
    half = HALVES[cell.half]
    config = configuration(cell)
    peers = dict.fromkeys(range(1, half.agents), half.peer)
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        directory = RunDirectory.create(Path(folder), "run", config, mode="lockstep")
        try:
            with open_lockstep(config, directory, peers=peers) as run:
                run_lockstep(run, Event(), lambda: None)
        except DivergedError:
            return float("-inf")
        returns = read_evaluations(directory.agent(0).evaluations.path).return_mean
    return float(np.mean(returns[-LAST:]))


# --- results ----------------------------------------------------------------------------------------------


def read_results(path: Path) -> dict[Cell, float]:
    """The finished cells of a CSV file; none where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {
            Cell(row["half"], row["measure"], int(row["seed"]), int(row["steps"])): float(row["score"])
            for row in csv.DictReader(file)
        }


def append_result(path: Path, cell: Cell, score: float) -> None:
    """Adds a finished cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(COLUMNS)
        writer.writerow((cell.half, cell.measure, cell.seed, cell.steps, f"{score:.3f}"))


def run_missing(cells: Iterable[Cell], path: Path, *, jobs: int) -> dict[Cell, float]:
    """Runs the cells that the file lacks over `jobs` processes and notes each; returns all results."""
    done = read_results(path)
    missing = [cell for cell in dict.fromkeys(cells) if cell not in done]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(play, cell): cell for cell in missing}
        for future in as_completed(running):
            cell = running[future]
            done[cell] = future.result()
            append_result(path, cell, done[cell])
            print(f"{cell.half:7} {cell.measure} seed {cell.seed}: {done[cell]:.0f}", file=sys.stderr)
    return done


def table(measures: Sequence[str], seeds: Sequence[int], results: Mapping[Cell, float]) -> str:
    """One line per measure and half, and whether the measure passes both."""
    lines = [f"{'measure':40} {'half':7} {'mean':>7} {'std':>6}  {'passes':7} scores by seed"]
    for measure in measures:
        for name, half in HALVES.items():
            cells = [Cell(name, measure, seed, half.steps) for seed in seeds]
            scores = [results[cell] for cell in cells if cell in results]
            if not scores:
                continue
            mean = statistics.fmean(scores)
            spread = f"{statistics.stdev(scores):6.0f}" if len(scores) > 1 else f"{'-':>6}"
            verdict = "yes" if mean > half.threshold else "NO"
            each = " ".join(f"{score:.0f}" for score in scores)
            lines.append(f"{measure:40} {name:7} {mean:7.0f} {spread}  {verdict:7} {each}")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--measure", action="append", default=[], choices=DIVERGENCES, help="repeatable")
    parser.add_argument("--set", action="append", default=[], metavar="dps.KEY=VALUE", help="repeatable")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--half", action="append", choices=tuple(HALVES), help="only this one")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="processes")
    parser.add_argument("--results", type=Path, default=Path("similarity_gate.csv"), metavar="FILE")
    return parser.parse_args()


def _measures(given: argparse.Namespace) -> list[str]:
    """One measure for each --measure, with the --set flags on top of it.

    Raises:
        ConfigError: a flag that is no setting of `dps`.
    """
    extra = parse_assignments(given.set)
    resolve(extra)
    chosen = [{"divergence": name} for name in given.measure] or [{}]
    return list(dict.fromkeys(label({**each, **extra.get("dps", {})}) for each in chosen))


def main() -> None:
    """Runs what is missing and prints the table."""
    given = _arguments()
    try:
        measures = _measures(given)
    except DaseError as error:
        sys.exit(str(error))
    seeds = [int(seed) for seed in given.seeds.split(",")]
    halves = given.half or tuple(HALVES)
    cells = [
        Cell(half, measure, seed, HALVES[half].steps)
        for seed in seeds
        for measure in measures
        for half in halves
    ]
    results = run_missing(cells, given.results, jobs=given.jobs)
    print(table(measures, seeds, results))


if __name__ == "__main__":
    main()
