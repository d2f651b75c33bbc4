"""The paper's published results, which ship with the package (origin and license: published/README.md)."""

import csv
import functools
import re
from dataclasses import dataclass
from importlib import resources
from typing import Final, Literal

TABLE: Final = "dase_reference_results.csv"
_STEPS: Final = {"50k": 50_000, "100k": 100_000, "200k": 200_000, "300k": 300_000, "500k": 500_000}
# Only names whose task is the same; the version there is Gym 0.17's.
_PUBLISHED_NAME: Final = {
    "Ant": "Ant-v2",
    "BipedalWalker": "BipedalWalker-v3",
    "HalfCheetah": "HalfCheetah-v2",
    "Hopper": "Hopper-v2",
    "Humanoid": "Humanoid-v2",
    "LunarLanderContinuous": "LunarLanderContinuous-v2",
    "Swimmer": "Swimmer-v2",
    "Walker2d": "Walker2d-v2",
}
_VERSIONED: Final = re.compile(r"(\w+)-v\d+")


@dataclass(frozen=True)
class PublishedPoint:
    """The return around one step: mean of 11 evaluations, mean and standard deviation over the seeds."""

    step: int
    mean: float
    std: float


@dataclass(frozen=True)
class PublishedRow:
    """One method's results in one cell, as published.

    Attributes:
        method: "single", "dpd", "dase-k2", "dase-k5", "dase-k10", "dase-k2-kl", "dase-k2-uncorrected".
        curves: "combination" curves are exact linear combinations of others, so no evidence of their own.
        cell_rank: "r/30", how many of the cell's 30 single and K = 2 curves are independent; may be empty.
    """

    study: str
    buffer: int
    algorithm: str
    environment: str
    method: str
    agents: int
    seeds: int
    final_mean: float
    final_std: float
    points: tuple[PublishedPoint, ...]
    curves: Literal["own", "combination"]
    cell_rank: str


def published(algorithm: str, environment: str, capacity: int) -> list[PublishedRow]:
    """What was published for this algorithm, task and exact buffer capacity; most often nothing.

    The version in a Gymnasium id is not compared, since none of today's is the published one:
    a comparison, never a target.
    """
    match = _VERSIONED.fullmatch(environment)
    name = _PUBLISHED_NAME.get(match[1]) if match else None
    wanted = (algorithm.upper(), name, capacity)
    return [row for row in _table() if (row.algorithm, row.environment, row.buffer) == wanted]


@functools.cache
def _table() -> tuple[PublishedRow, ...]:
    file = resources.files("dase_grpc.runs") / "published" / TABLE
    lines = file.read_text(encoding="utf-8").splitlines()
    return tuple(_row(values) for values in csv.DictReader(lines))


def _row(values: dict[str, str]) -> PublishedRow:
    return PublishedRow(
        study=values["study"],
        buffer=int(values["buffer"]),
        algorithm=values["algorithm"],
        environment=values["env"],
        method=values["method"],
        agents=int(values["agents"]),
        seeds=int(values["seeds"]),
        final_mean=float(values["final_mean"]),
        final_std=float(values["final_std"]),
        points=tuple(
            PublishedPoint(step, float(values[f"return_{name}"]), float(values[f"std_{name}"]))
            for name, step in _STEPS.items()
        ),
        curves="combination" if values["curves"] == "combination" else "own",
        cell_rank=values["cell_rank"],
    )
