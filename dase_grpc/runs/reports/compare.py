"""The comparison itself: each cell's statistics over its runs, and every pair of cells of one environment."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import permutations
from pathlib import Path
from typing import Final, Literal

import numpy as np

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.curves import Series, area, around, final_score, settled_score
from dase_grpc.runs.logs import Ints
from dase_grpc.runs.reference import PublishedPoint, PublishedRow, counterpart
from dase_grpc.runs.reports.estimates import FEW, Estimate, Improvement, estimate, improvement
from dase_grpc.runs.reports.sources import (
    Group,
    LeftOut,
    SourceRun,
    described,
    differing,
    find_runs,
    grouped,
    labels,
    read_runs,
)

Measure = Literal["final", "area", "equal_total"]
_SIMULATORS: Final = ("mujoco", "gymnasium")
MEASURES: Final[tuple[Measure, ...]] = ("final", "area", "equal_total")


@dataclass(frozen=True)
class PublishedBeside:
    """A published number and ours, computed the same way at the same step."""

    point: PublishedPoint
    ours: Estimate


@dataclass(frozen=True)
class CellResults:
    """One experiment in one environment, and the statistics over its runs; a run counts once.

    Attributes:
        group: what was run, and the runs by seed.
        label: what tells the cell apart from the others of its environment.
        settings: every setting in which cells of one environment differ, as text.
        steps: (N,) where all the cell's runs were evaluated.
        final: mean of the last 10 evaluations up to the environment's common last step.
        area: under the curve on the environment's common steps, divided by the steps it spans.
        best: the highest evaluation on the common steps.
        equal_total: as `final`, up to the environment's common number of steps of all agents together.
        equal_total_steps: the steps of each agent at which that is.
        row: the published counterpart, if there is one.
        beside: its numbers up to the common last step, ascending.
    """

    group: Group
    label: str
    settings: str
    steps: Ints
    final: Estimate
    area: Estimate
    best: Estimate
    equal_total: Estimate
    equal_total_steps: int
    row: PublishedRow | None
    beside: tuple[PublishedBeside, ...]

    @property
    def runs(self) -> tuple[SourceRun, ...]:
        """The cell's runs, by seed."""
        return self.group.runs


@dataclass(frozen=True)
class EnvironmentResults:
    """All cells of one environment, on common ground.

    Attributes:
        steps: (N,) where all runs were evaluated; its last is the common last step of each agent.
        total_steps: the common number of steps of all agents together.
        cells: in a fixed order.
        pairs: how probably a run of one cell beats one of another: by measure, the one's label, the other's.
    """

    name: str
    steps: Ints
    total_steps: int
    cells: tuple[CellResults, ...]
    pairs: Mapping[tuple[Measure, str, str], Improvement]

    @property
    def last_step(self) -> int:
        """The common last step of each agent."""
        return int(self.steps[-1])

    @property
    def sizes_differ(self) -> bool:
        """Whether the cells differ in K, so that equal steps of each agent are unequal in total."""
        return len({cell.group.agents for cell in self.cells}) > 1

    def pair(self, better: str, worse: str, measure: Measure = "final") -> Improvement:
        """How probably a run of one cell beats a run of another, by their labels."""
        return self.pairs[measure, better, worse]


@dataclass(frozen=True)
class Caution:
    """What numbers cannot say, once for all that it holds for.

    Attributes:
        where: a line for each environment, with the cells or numbers that are meant.
    """

    text: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return "\n  ".join([f"{self.text}:", *self.where])


@dataclass(frozen=True)
class Comparison:
    """Runs compared over their seeds.

    Attributes:
        environments: in alphabetical order.
        left_out: runs that were found and take no part.
        cautions: what the numbers cannot say, each once.
    """

    environments: tuple[EnvironmentResults, ...]
    left_out: tuple[LeftOut, ...]
    cautions: tuple[Caution, ...]

    @property
    def cells(self) -> list[CellResults]:
        """The cells of all environments."""
        return [cell for each in self.environments for cell in each.cells]

    @property
    def runs(self) -> list[SourceRun]:
        """The runs of all cells."""
        return [run for cell in self.cells for run in cell.runs]


def compare(paths: Iterable[Path | str], *, unfinished: bool = False) -> Comparison:
    """Compares runs; each path is a run's folder or one that contains such folders, however deep.

    With `unfinished`, runs that have not reached their last step are used up to where they are.

    Raises:
        RunDirectoryError: a path holds no run, none of the runs can be compared, or those of one
            environment were evaluated at no common step.
    """
    runs, left_out = read_runs(find_runs(map(Path, paths)), unfinished=unfinished)
    if not runs:
        which = f"none of the {len(left_out)} runs" if len(left_out) > 1 else "the run"
        can = "can" if len(left_out) > 1 else "cannot"
        raise RunDirectoryError(f"{which} {can} be compared; {left_out[0]}")
    groups = grouped(runs)
    names = dict(zip(map(id, groups), labels(groups), strict=True))
    keys = differing(groups)
    environments = tuple(
        _environment(name, [group for group in groups if group.environment == name], names, keys)
        for name in sorted({group.environment for group in groups})
    )
    return Comparison(environments, tuple(left_out), _cautions(environments))


def on(run: SourceRun, steps: Ints) -> Series:
    """The run's curve at these steps, all of which it has."""
    return Series(steps, run.curve.value[np.isin(run.curve.step, steps)])


def _environment(
    name: str, groups: Sequence[Group], names: dict[int, str], keys: Sequence[str]
) -> EnvironmentResults:
    steps = _common([run for group in groups for run in group.runs])
    if not len(steps):
        raise RunDirectoryError(
            f"the runs in {name} were evaluated at no common step; compare runs with the same eval.every"
        )
    total = min(group.agents * int(_common(group.runs)[-1]) for group in groups)
    cells = tuple(
        _cell(group, names[id(group)], described(group, keys), steps=steps, total=total) for group in groups
    )
    pairs = {
        (measure, x.label, y.label): improvement(getattr(x, measure).values, getattr(y, measure).values)
        for measure in MEASURES
        for x, y in permutations(cells, 2)
    }
    return EnvironmentResults(name, steps, total, cells, pairs)


def _cell(group: Group, label: str, settings: str, *, steps: Ints, total: int) -> CellResults:
    own = _common(group.runs)
    within = own[: max(1, int((own * group.agents <= total).sum()))]
    row = counterpart(group.runs[0].config)
    curves = [on(run, steps) for run in group.runs]
    return CellResults(
        group=group,
        label=label,
        settings=settings,
        steps=own,
        final=estimate([final_score(curve) for curve in curves]),
        area=estimate([area(curve) for curve in curves]),
        best=estimate([float(curve.value.max()) for curve in curves]),
        equal_total=estimate([final_score(on(run, within)) for run in group.runs]),
        equal_total_steps=int(within[-1]),
        row=row,
        beside=_beside(row, [on(run, own) for run in group.runs], last_step=int(steps[-1])),
    )


def _beside(
    row: PublishedRow | None, curves: Sequence[Series], *, last_step: int
) -> tuple[PublishedBeside, ...]:
    if row is None:
        return ()
    found = []
    for point in row.until(last_step):
        ours = [_as_published(curve, point, final=point == row.final) for curve in curves]
        if np.isfinite(ours).all():
            found.append(PublishedBeside(point, estimate(ours)))
    return tuple(found)


def _as_published(curve: Series, point: PublishedPoint, *, final: bool) -> float:
    if not final:
        return around(curve, point.step)
    until = curve.step <= point.step
    return final_score(Series(curve.step[until], curve.value[until]))


def _common(runs: Sequence[SourceRun]) -> Ints:
    """The steps at which all these runs were evaluated."""
    return reduce(np.intersect1d, [run.curve.step for run in runs])


def _cautions(environments: Sequence[EnvironmentResults]) -> tuple[Caution, ...]:
    found: dict[str, dict[str, list[str]]] = {}
    for each in environments:
        told = [*_about_lengths(each), *_about_versions(each)]
        told += [caution for cell in each.cells for caution in _about_cell(each, cell)]
        for text, meant in told:
            found.setdefault(text, {}).setdefault(each.name, []).append(meant)
    return tuple(
        Caution(text, tuple(f"{name}: {'; '.join(meant)}" for name, meant in where.items()))
        for text, where in found.items()
    )


def _about_lengths(each: EnvironmentResults) -> Iterable[tuple[str, str]]:
    lengths = {int(run.curve.step[-1]) for cell in each.cells for run in cell.runs}
    if len(lengths) > 1:
        text = "the runs do not reach equally far and are compared up to the last step that all share"
        yield text, f"step {each.last_step:,}; they reach from {min(lengths):,} to {max(lengths):,}"


def _about_versions(each: EnvironmentResults) -> Iterable[tuple[str, str]]:
    """What simulates decides the returns as much as what learns does."""
    for name in _SIMULATORS:
        found = {run.versions[name] for cell in each.cells for run in cell.runs if name in run.versions}
        if len(found) > 1:
            yield f"the runs were made with several versions of {name}", ", ".join(sorted(found))


def _about_cell(each: EnvironmentResults, cell: CellResults) -> Iterable[tuple[str, str]]:
    count = len(cell.runs)
    if count == 1:
        yield "1 run, so no interval", cell.label
    elif count < FEW:
        yield f"fewer than {FEW} runs, so an interval that means little", cell.label
    if len({run.seed for run in cell.runs}) < count:
        yield "several runs have the same seed, so their networks began equal", cell.label
    start = cell.runs[0].config.start_steps
    scores = [("the final score", each.steps)]
    if each.sizes_differ:
        scores.append(("the score at equal total steps", cell.steps[cell.steps <= cell.equal_total_steps]))
    for words, steps in scores:
        if settled_score(on(cell.runs[0], steps), start_steps=start) is None:
            text = f"{words} is taken soon after the random steps, from an agent that had hardly learned"
            yield text, f"{cell.label} (up to step {steps[-1]:,}, {start:,} of them random)"
