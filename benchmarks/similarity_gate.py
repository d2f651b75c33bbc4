"""Runs the similarity gate: does a measure keep bad peers out (flip) and let useful ones in (random)?

python benchmarks/similarity_gate.py --measure jeffreys --measure isolated --seeds 0,1,2 --jobs 2
python benchmarks/similarity_gate.py --set dps.floor=true --set dps.scope=agent --seeds 0,1,2
python benchmarks/similarity_gate.py --seeds 10,11,12,13,14 --results gate.csv --summary

A measure is a named one, the --set flags together, or both; with neither, the default one. All runs are in
lockstep, Pendulum-v1, small networks; a score is the mean of agent 0's last three evaluations.

flip: K = 3, agents 1 and 2 in a Pendulum whose torque has the opposite sign, 10 000 steps.
random: K = 16, agents 1 to 15 act uniformly at random, 9 000 steps.

Each finished run is a line of the CSV file (--results), and what is there already is not run again. The
last line says whether the gate holds: the default passes both halves, `none` fails flip and `isolated`
fails random, over the same seeds. It exits with 1 where it does not hold, and with 0 also where one of the
three has not been run.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Final

import gymnasium
import numpy as np
from similarity_measures import (
    NAMED,
    SMALL_AGENT,
    append_row,
    chosen,
    interval,
    label,
    number,
    read_rows,
    run_missing,
    settings_of,
    short,
)

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.config.sections import EnvConfig
from dase_grpc.errors import DaseError, DivergedError
from dase_grpc.launch.lockstep import open_lockstep, run_lockstep
from dase_grpc.learning.envs.make import Environment
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_evaluations
from dase_grpc.schema import Array

LAST: Final = 3
VERDICT: Final = 3
"""A half is passed or failed with the mean over at least so many seeds."""

SETTINGS: Final[Mapping[str, Any]] = {
    "env": {"id": "Pendulum-v1"},
    "agent": {**SMALL_AGENT},
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
class Peer:
    """An agent that is not as the run's configuration says, to see what its transitions do to the others.

    Attributes:
        env: the environment it explores and is evaluated in, of the same sizes and bounds as the run's,
            under whose schema its transitions are stored. None is the run's.
        random: it acts uniformly at random and never updates; its policy is evaluated at both ends only.
    """

    env: EnvConfig | None = None
    random: bool = False

    def configured(self, config: RunConfig) -> RunConfig:
        """What it makes of an agent's own configuration; only its learner sees it, run.toml does not."""
        agent, evaluation = config.agent, config.eval
        if self.random:
            agent = agent.model_copy(update={"start_steps": config.train.steps + 1})
            evaluation = evaluation.model_copy(update={"every": config.train.steps})
        env = self.env or config.env
        return config.model_copy(update={"env": env, "agent": agent, "eval": evaluation})


@dataclass(frozen=True)
class Half:
    """One half of the gate: its peers, its length, and the score a measure must exceed."""

    agents: int
    steps: int
    peer: Peer
    threshold: float


HALVES: Final[Mapping[str, Half]] = {
    "flip": Half(3, 10_000, Peer(env=EnvConfig(id="similarity_gate:reversed_pendulum")), -800.0),
    # With K = 4, 16 own rows of a batch are enough to learn alone: docs/similarity.md
    "random": Half(16, 9_000, Peer(random=True), -450.0),
}
EXPECTED: Final = (
    (label({}), "flip", True),
    (label({}), "random", True),
    (label(NAMED["none"]), "flip", False),
    (label(NAMED["isolated"]), "random", False),
)
"""Measure, half, and whether it has to pass for the gate to tell anything."""


@dataclass(frozen=True)
class Cell:
    """One run of the gate."""

    half: str
    measure: str
    seed: int
    steps: int
    agents: int


def configuration(cell: Cell) -> RunConfig:
    """The run's configuration."""
    train = {"agents": cell.agents, "steps": cell.steps, "seed": cell.seed}
    return resolve(SETTINGS, settings_of(cell.measure), {"train": train})


def play(cell: Cell) -> float:
    """Trains and scores one cell; a run whose networks diverge scores minus infinity."""
    half = HALVES[cell.half]
    config = configuration(cell)
    first, *others = (config.for_agent(agent_id) for agent_id in range(cell.agents))
    configs = [first, *map(half.peer.configured, others)]
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        directory = RunDirectory.create(Path(folder), "run", config, mode="lockstep")
        try:
            with open_lockstep(config, directory, configs=configs) as run:
                run_lockstep(run, Event(), lambda: None)
        except DivergedError:
            return float("-inf")
        returns = read_evaluations(directory.agent(0).evaluations.path).return_mean
    return float(np.mean(returns[-LAST:]))


# --- results ----------------------------------------------------------------------------------------------


def read_results(path: Path) -> dict[Cell, float]:
    """The finished cells of a CSV file; none where there is no file."""
    return {
        Cell(row["half"], row["measure"], int(row["seed"]), int(row["steps"]), int(row["agents"])): float(
            row["score"]
        )
        for row in read_rows(path)
    }


def append_result(path: Path, cell: Cell, score: float) -> None:
    """Adds a finished cell."""
    append_row(path, {**asdict(cell), "score": f"{score:.3f}"})


@dataclass(frozen=True)
class Verdict:
    """A measure's scores in one half, in the order of the seeds; there is at least one."""

    measure: str
    half: str
    scores: Sequence[float]

    @property
    def mean(self) -> float:
        """The score that is compared with the half's threshold."""
        return statistics.fmean(self.scores)

    @property
    def passes(self) -> bool:
        """Whether the mean is above the threshold."""
        return self.mean > HALVES[self.half].threshold

    def line(self) -> str:
        """A line of the table."""
        spread = number(statistics.stdev(self.scores)) if len(self.scores) > 1 else "–"
        bounds = interval(self.scores)
        between = "–" if bounds is None else f"{number(bounds[0])} to {number(bounds[1])}"
        verdict = "–" if len(self.scores) < VERDICT else "passes" if self.passes else "fails"
        return (
            f"| `{short(self.measure)}` | {self.half} | {number(self.mean)} | {spread} | {between} "
            f"| {len(self.scores)} | {verdict} |"
        )


def verdicts(
    measures: Sequence[str],
    seeds: Sequence[int],
    results: Mapping[Cell, float],
    *,
    halves: Mapping[str, Half] = HALVES,
) -> list[Verdict]:
    """Each measure's in each half, without those that have no score yet."""
    found = []
    for measure in measures:
        for name, half in halves.items():
            cells = [Cell(name, measure, seed, half.steps, half.agents) for seed in seeds]
            scores = [results[cell] for cell in cells if cell in results]
            found += [Verdict(measure, name, scores)] if scores else []
    return found


def table(found: Sequence[Verdict]) -> str:
    """A Markdown table; intervals are 95 % bootstrap intervals of the mean over seeds."""
    head = [
        "| measure | half | mean | std | 95 % interval | seeds | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *(verdict.line() for verdict in found)])


def judgement(seeds: Sequence[int], results: Mapping[Cell, float]) -> tuple[bool | None, str]:
    """Whether the gate holds, None where that is not known, and a sentence that says so."""
    by_kind = {
        (each.measure, each.half): each for each in verdicts([m for m, _, _ in EXPECTED], seeds, results)
    }
    missing = [
        f"{short(measure)} ({half}) of {count} of {len(seeds)} seeds"
        for measure, half, _ in EXPECTED
        if (count := len(seeds) - (len(by_kind[measure, half].scores) if (measure, half) in by_kind else 0))
    ]
    if missing:
        return None, f"The gate is not judged: no run of {', '.join(missing)}."
    wrong = [
        f"{short(measure)} {'fails' if must_pass else 'passes'} {half} "
        f"with {number(by_kind[measure, half].mean)}"
        for measure, half, must_pass in EXPECTED
        if by_kind[measure, half].passes != must_pass
    ]
    if wrong:
        return False, f"The gate does not hold: {', and '.join(wrong)}."
    return True, "The gate holds: the default passes both halves, none fails flip, isolated fails random."


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--measure", action="append", default=[], choices=tuple(NAMED), help="repeatable")
    parser.add_argument("--set", action="append", default=[], metavar="dps.KEY=VALUE", help="repeatable")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--half", action="append", choices=tuple(HALVES), help="only this one")
    parser.add_argument("--steps", type=int, help="another length than the halves' own, to see its effect")
    parser.add_argument("--agents", type=int, help="another K than the halves' own, to see its effect")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="processes")
    parser.add_argument("--results", type=Path, default=Path("similarity_gate.csv"), metavar="FILE")
    parser.add_argument("--summary", action="store_true", help="print the table of FILE and run nothing")
    return parser.parse_args()


def main() -> None:
    """Runs what is missing, prints the table and the verdict."""
    given = _arguments()
    try:
        measures = chosen(given.measure, given.set)
    except DaseError as error:
        sys.exit(str(error))
    seeds = [int(seed) for seed in given.seeds.split(",")]
    halves = {
        name: replace(half, steps=given.steps or half.steps, agents=given.agents or half.agents)
        for name, half in HALVES.items()
        if name in (given.half or HALVES)
    }
    results = read_results(given.results)
    if given.summary:
        measures = list(dict.fromkeys(cell.measure for cell in results))
    else:
        cells = [
            Cell(name, measure, seed, half.steps, half.agents)
            for seed in seeds
            for measure in measures
            for name, half in halves.items()
        ]
        note = partial(append_result, given.results)
        results = run_missing(cells, results, play=play, note=note, jobs=given.jobs)
    print(table(verdicts(measures, seeds, results, halves=halves)))
    if given.steps or given.agents:
        return  # the gate is judged by its own settings
    holds, sentence = judgement(seeds, results)
    print(f"\n{sentence}")
    sys.exit(holds is False)


if __name__ == "__main__":
    main()
