"""The paper's published results, which ship with the package (origin and license: published/README.md)."""

import csv
import functools
import re
from dataclasses import dataclass
from importlib import resources
from operator import attrgetter
from typing import Final, Literal

from pydantic import TypeAdapter

from dase_grpc.config.algorithms import SIMILARITY, DpdConfig, DpsConfig
from dase_grpc.config.presets import paper_preset, preset
from dase_grpc.config.resolve import RunConfig, resolve

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
_FINAL_STEP: Final = 1_000_000
_METHODS: Final = {
    ("jeffreys", 2): "dase-k2",
    ("jeffreys", 5): "dase-k5",
    ("jeffreys", 10): "dase-k10",
    ("kl", 2): "dase-k2-kl",
    ("none", 2): "dase-k2-uncorrected",
}
_COLLECTED_AND_DRAWN: Final = attrgetter(
    *("train.explore", "train.actors", "train.updates_per_step", "train.overlap"),
    *("replay.own_share", "replay.sampling"),
)
"""How transitions are collected and drawn: in the paper one for each update, uniformly."""
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

    @property
    def combined(self) -> bool:
        """Whether its curves carry no information of their own."""
        return self.curves == "combination"

    @property
    def final(self) -> PublishedPoint:
        """The mean of the last 10 evaluations, at the last step."""
        return PublishedPoint(_FINAL_STEP, self.final_mean, self.final_std)

    def until(self, step: int) -> list[PublishedPoint]:
        """The points up to a step, the final one included, ascending."""
        return [point for point in (*self.points, self.final) if point.step <= step]


_ROWS: Final = TypeAdapter(PublishedRow)


def counterpart(config: RunConfig) -> PublishedRow | None:
    """What was published for the experiment that this configuration repeats; None where nothing was.

    It has the paper's settings for every agent, for evaluation, for the similarity and for what is collected
    and drawn, the defaults for distillation, the exact buffer capacity and the unchanged environment; only
    the environment's version is of today.
    """
    paper = resolve(preset(paper_preset(config.agent.algorithm, config.env.id)))
    agents = {config.for_agent(agent_id).agent for agent_id in range(config.train.agents)}
    if agents != {paper.agent} or config.eval != paper.eval or config.dpd != DpdConfig():
        return None
    if config.method == "dase" and config.dps != DpsConfig(divergence=config.dps.divergence):
        return None
    if _COLLECTED_AND_DRAWN(config) != _COLLECTED_AND_DRAWN(paper):
        return None
    method = published_method(config)
    return next((row for row in comparable(config) if row.method == method), None)


def comparable(config: RunConfig) -> list[PublishedRow]:
    """What was published for the same algorithm, buffer and (unchanged) environment."""
    capacity = config.replay.capacity
    if not isinstance(capacity, int) or config.env.kwargs or len(config.algorithms) > 1:
        return []
    return published(config.agent.algorithm, config.env.id, capacity)


def published_method(config: RunConfig) -> str | None:
    """What the published table calls the run's way of sharing; None for a way that is not in it."""
    if config.method != "dase":
        return config.method
    if config.dps.measure != SIMILARITY:
        return None
    return _METHODS.get((config.dps.divergence, config.train.agents))


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
    points = [
        {"step": step, "mean": values[f"return_{name}"], "std": values[f"std_{name}"]}
        for name, step in _STEPS.items()
    ]
    return _ROWS.validate_python({**values, "environment": values["env"], "points": points})
