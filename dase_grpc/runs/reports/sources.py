"""The runs to compare: found on disk, read, and each reduced to one curve, the mean over its agents."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.curves import Series, returns, shared_curves
from dase_grpc.runs.directory import RUN_FILE, RunDirectory
from dase_grpc.runs.logs import read_evaluations
from dase_grpc.runs.lookup import WHAT_IT_IS, require_folders

LARGEST: Final = 1e100
"""Returns whose squares and sums are numbers still."""


@dataclass(frozen=True)
class SourceRun:
    """One run, the unit of every statistic.

    Attributes:
        path: its folder, as it was found.
        mode: cluster, lockstep, stack or node.
        versions: of the software that made it, as in run.toml.
        curve: over the steps at which all its agents were evaluated, the mean over these agents.
        evaluated: how many of its agents have any evaluation.
        finished: whether each of its agents was evaluated at the run's last step.
    """

    path: Path
    name: str
    mode: str
    config: RunConfig
    versions: Mapping[str, str]
    curve: Series
    evaluated: int
    finished: bool

    @property
    def seed(self) -> int:
        """The run's one seed."""
        return self.config.train.seed

    @property
    def agents(self) -> int:
        """K."""
        return self.config.train.agents


@dataclass(frozen=True)
class LeftOut:
    """A run that takes no part in a comparison, and why, in words that follow its path."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path} is left out: {self.reason}"


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The folders of runs among `paths` and, recursively, inside them; each once, in a fixed order.

    Raises:
        RunDirectoryError: one of the paths is no folder, holds no run, or cannot be read.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        require_folders([path])
        inside = list(_below(path))
        if not inside:
            raise RunDirectoryError(f"{path} holds no run; {WHAT_IT_IS}")
        for run in inside:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_runs(paths: Iterable[Path], *, unfinished: bool = False) -> tuple[list[SourceRun], list[LeftOut]]:
    """Reads the runs that can be compared; the second list says which cannot, and why.

    With `unfinished`, a run that has not reached its last step is used up to where it is.
    """
    runs: list[SourceRun] = []
    left_out: list[LeftOut] = []
    for path in paths:
        try:
            run = _read(path)
            reason = _unusable(run, unfinished=unfinished) or _copied(run, runs)
        except (RunDirectoryError, OSError) as error:
            left_out.append(LeftOut(path, str(error)))
            continue
        if reason:
            left_out.append(LeftOut(path, reason))
        else:
            runs.append(run)
    return runs, left_out


def _below(path: Path) -> Iterable[Path]:
    """A run holds no other runs, so the search ends where it finds one; hidden folders hold none to compare.

    Runs that are being made and tries that an experiment has set aside lie in hidden folders.
    """
    for folder, inner, files in os.walk(path, onerror=_require_readable):
        if RUN_FILE in files:
            inner.clear()
            yield Path(folder)
        else:
            inner[:] = sorted(name for name in inner if not name.startswith("."))


def _require_readable(error: OSError) -> None:
    """A folder that cannot be read may hold runs; one that has gone meanwhile, or is a file, holds none."""
    if isinstance(error, PermissionError):
        raise RunDirectoryError(f"cannot read {error.filename}: {error.strerror}") from None


def _read(path: Path) -> SourceRun:
    run = RunDirectory.open(path)
    agents = [returns(read_evaluations(agent.evaluations.path)) for agent in run.agents()]
    evaluated = [curve for curve in agents if len(curve)]
    shared = shared_curves(evaluated)
    with np.errstate(all="ignore"):  # what is not finite leaves the run out
        mean = shared.value.mean(axis=0) if len(shared.value) else np.empty(0)
    last = min((int(curve.step[-1]) for curve in evaluated), default=0)
    return SourceRun(
        path=path,
        name=run.name,
        mode=str(run.run.get("mode", "")),
        config=run.config,
        versions=run.versions,
        curve=Series(shared.step, mean),
        evaluated=len(evaluated),
        finished=len(evaluated) >= run.config.train.agents and last >= run.config.train.steps,
    )


def _unusable(run: SourceRun, *, unfinished: bool) -> str | None:
    if not len(run.curve):
        return "it has no evaluation yet"
    if not np.isfinite(run.curve.value).all():
        return "it has evaluations that are not finite"
    if np.abs(run.curve.value).max() > LARGEST:
        return f"it has evaluations beyond {LARGEST:g}, of which no statistics can be computed"
    if not (run.finished or unfinished):
        where = f"step {run.curve.step[-1]:,} of {run.config.train.steps:,}"
        if run.evaluated < run.agents:
            where = f"{run.evaluated} of {run.agents} agents have evaluations"
        return f"it has not finished ({where}); --unfinished uses it up to where it is"
    return None


def _copied(run: SourceRun, others: Sequence[SourceRun]) -> str | None:
    """Two lockstep runs of one seed are as equal as a run and its copy: one sample, not two."""
    for other in others:
        if run.config == other.config and _same(run.curve, other.curve):
            return f"its seed, its settings and all its evaluations are those of {other.path}"
    return None


def _same(left: Series, right: Series) -> bool:
    return np.array_equal(left.step, right.step) and np.array_equal(left.value, right.value)
