"""A comparison's tables, as texts for a reader and as CSV, and its files in a folder."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.curves import FINAL, SMOOTHING
from dase_grpc.runs.files import replace_file, utf8
from dase_grpc.runs.reports import html
from dase_grpc.runs.reports.compare import CellResults, Comparison, EnvironmentResults
from dase_grpc.runs.reports.comparison_plot import comparison_sheet, is_smoothed
from dase_grpc.runs.reports.estimates import (
    BOOTSTRAP_SEED,
    CONFIDENCE,
    FEW,
    RESAMPLES,
    Estimate,
    Interval,
)
from dase_grpc.runs.reports.figures import PRINT
from dase_grpc.runs.reports.html import Table, number

CSV_FILES: Final = ("comparison.csv", "runs.csv", "pairs.csv", "published.csv")
FILES: Final = (*CSV_FILES, "comparison.png", "comparison.svg", "comparison.html")
CAUTION: Final = "†"
"""Marks an interval of so few runs that it means little."""
_TIGHT: Final = "\u00a0"
"""A space at which no line is wrapped."""
_PAIR_COLUMNS: Final = "environment measure x y runs_x runs_y probability_x_higher low high"
_PUBLISHED_COLUMNS: Final = (
    "environment cell runs step ours_mean ours_std published_mean published_std "
    "published_environment published_method published_curves published_cell_rank"
)
_DEFINITIONS: Final = (
    "One run is one sample: the agents of a run are averaged first, since they share a buffer and are not "
    "independent; all statistics are over runs.",
    f"Final score: mean of the last {FINAL} evaluations up to the common last step.",
    "Area: under the learning curve on the common steps, by the trapezoidal rule, divided by the steps that "
    "it spans.",
    f"IQM: the interquartile mean over runs (a quarter of them, rounded down, left out at each end, so below "
    f"4 runs it is the mean); in brackets its {CONFIDENCE * 100:g} % confidence interval by the percentile "
    f"bootstrap over runs ({RESAMPLES:,} resamples, seed {BOOTSTRAP_SEED}). {CAUTION} marks an interval of "
    f"fewer than {FEW} runs: it means little.",
    "Best: the highest evaluation on the common steps, one per run; it grows with noise and with the number "
    "of evaluations.",
)
_EQUAL_TOTAL: Final = (
    "At equal total steps: the final score at the step at which the K agents of a run have together made as "
    "many environment steps as those of every other cell, so an agent among K has made 1/K of them."
)
_IMPROVEMENT: Final = (
    "Probability of improvement: P(X > Y) + ½ P(X = Y), the probability that a run of the first cell ends "
    "higher than one of the second, by final score; 0.5 says nothing either way."
)
_PUBLISHED: Final = (
    "As published: mean ± standard deviation over 10 seeds of the 11 evaluations around a step, or of the "
    "last 10 at 1M; ours the same way, where the runs go far enough (Saglam et al. "
    "2022, arXiv 2207.13453; from the authors' released curves, MIT license). Their environments are Gym v2 "
    "and v3 with MuJoCo 1.50 and Box2D 2.3.10: a comparison, not a target. The rank says how many of the 30 "
    "single and K = 2 curves of the published cell are independent."
)


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes all files of a comparison, each all at once, and returns their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = comparison_sheet(comparison, inks=PRINT)
        contents = {
            **csv_files(comparison),
            "comparison.png": drawn.png_file(),
            "comparison.svg": drawn.svg_file(),
            "comparison.html": utf8(page(comparison)),
        }
        for name in FILES:
            replace_file(folder / name, contents[name])
    except OSError as error:
        raise RunDirectoryError(f"cannot write into {folder}: {error.strerror or error}") from None
    return [folder / name for name in FILES]


def page(comparison: Comparison) -> str:
    """The whole page; the same runs give the same text."""
    counted = {
        "Environments": comparison.environments,
        "Cells": comparison.cells,
        "Runs": comparison.runs,
        "Left out": comparison.left_out,
    }
    names = ", ".join(each.name for each in comparison.environments)
    return html.page(
        "comparison.html",
        title="Comparison of runs",
        heading="Comparison of runs",
        subtitle=f"{names} · statistics over runs",
        facts={name: str(len(each)) for name, each in counted.items()},
        comparison=comparison,
        curves=comparison_sheet(comparison).svg(),
        all_smoothed=all(map(is_smoothed, comparison.environments)),
        smoothing=SMOOTHING,
        tables=tables,
        definitions=definitions(comparison),
        runs=(_runs(comparison), _settings(comparison)),
    )


def definitions(comparison: Comparison) -> list[str]:
    """What the numbers of the tables are."""
    where_shown = {
        _EQUAL_TOTAL: any(each.sizes_differ for each in comparison.environments),
        _IMPROVEMENT: any(each.pairs for each in comparison.environments),
        _PUBLISHED: any(cell.beside for cell in comparison.cells),
    }
    return [*_DEFINITIONS, *(sentence for sentence, shown in where_shown.items() if shown)]


def tables(each: EnvironmentResults) -> Iterator[Table]:
    """An environment's tables: scores, chances, what was published; those that say something."""
    digits = _digits(each)
    yield _scores(each, digits)
    if each.sizes_differ:
        yield _equal_total(each, digits)
    if each.pairs:
        yield _chances(each)
    if any(cell.beside for cell in each.cells):
        yield _published(each, digits)


def csv_files(comparison: Comparison) -> dict[str, bytes]:
    """The CSV files by name: a row per cell, per run, per pair of cells and measure, per published point."""
    of_cells = [_cell_record(each, cell) for each, cell in _cells(comparison)]
    runs = [_run_record(*each) for each in _each_run(comparison)]
    columns = (of_cells[0], runs[0], _PAIR_COLUMNS.split(), _PUBLISHED_COLUMNS.split())
    rows = (
        map(dict.values, of_cells),
        map(dict.values, runs),
        _pair_rows(comparison),
        _point_rows(comparison),
    )
    return dict(zip(CSV_FILES, map(_csv, columns, rows), strict=True))


def _cells(comparison: Comparison) -> Iterator[tuple[EnvironmentResults, CellResults]]:
    return ((each, cell) for each in comparison.environments for cell in each.cells)


def _each_run(comparison: Comparison) -> Iterator[tuple[EnvironmentResults, CellResults, int]]:
    """Every run by its number in its cell."""
    return ((each, cell, index) for each, cell in _cells(comparison) for index in range(len(cell.runs)))


def _runs(comparison: Comparison) -> Table:
    rows = [
        (
            str((run := cell.runs[index]).path),
            each.name,
            _name(cell),
            str(run.seed),
            f"{run.curve.step[-1]:,}{'' if run.finished else ' (unfinished)'}",
            number(cell.final.values[index], _digits(each)),
            number(cell.area.values[index], _digits(each)),
        )
        for each, cell, index in _each_run(comparison)
    ]
    columns = ("", "environment", "cell", "seed", "last step", "final score", "area")
    return Table("The runs:", columns, rows, words=(0, 1, 2))


def _settings(comparison: Comparison) -> Table:
    rows = [(_name(cell), each.name, cell.settings) for each, cell in _cells(comparison) if cell.settings]
    title = "The settings in which cells of one environment differ:"
    return Table(title, ("", "environment", "settings"), rows, words=(0, 1, 2))


def _scores(each: EnvironmentResults, digits: int) -> Table:
    rows = [
        (
            _name(cell),
            _of_runs(cell),
            _lines(cell.final, digits),
            _lines(cell.area, digits),
            _spread(cell.best.mean, cell.best.std, digits),
        )
        for cell in each.cells
    ]
    title = f"up to step {each.last_step:,} of each agent, {len(each.steps):,} common evaluations"
    return Table(title, ("", "runs", "final score", "area", "best"), rows)


def _equal_total(each: EnvironmentResults, digits: int) -> Table:
    rows = [
        (_name(cell), f"{cell.equal_total_steps:,}", _lines(cell.equal_total, digits)) for cell in each.cells
    ]
    title = f"at equal total steps, {each.total_steps:,} of all agents of a run together"
    return Table(title, ("", "steps of each agent", "final score"), rows)


def _chances(each: EnvironmentResults) -> Table:
    """Each pair once, the one that is more likely higher first."""
    rows = []
    for x, y in combinations(each.cells, 2):
        first, second = (x, y) if each.pair(x.label, y.label).probability >= 0.5 else (y, x)
        result = each.pair(first.label, second.label)
        interval = _brackets(result.interval, 2, min(len(x.runs), len(y.runs)))
        rows.append((_name(first), _name(second), f"{result.probability:.2f}", interval))
    title = "probability that a run of the first ends above one of the second"
    return Table(title, ("", "over", "probability", f"{CONFIDENCE * 100:g} %"), rows, words=(0, 1))


def _published(each: EnvironmentResults, digits: int) -> Table:
    rows = [
        (
            _name(cell),
            "1M, final" if beside.point.step >= 1_000_000 else f"{beside.point.step // 1_000}k",
            _spread(beside.ours.mean, beside.ours.std, digits),
            _spread(beside.point.mean, beside.point.std, digits),
            cell.row.method,
            _origin(cell.row.cell_rank, combined=cell.row.combined),
        )
        for cell in each.cells
        if cell.row is not None
        for beside in cell.beside
    ]
    (environment,) = {cell.row.environment for cell in each.cells if cell.row}
    columns = ("", "around step", "ours", "as published", "published as", "its curves")
    title = f"beside what was published for {environment}, at the same step"
    return Table(title, columns, rows, words=(0, 4, 5))


def _name(cell: CellResults) -> str:
    """The cell's label, to be wrapped at its commas only."""
    return cell.label.replace(" ", _TIGHT).replace(f",{_TIGHT}", ", ")


def _origin(rank: str, *, combined: bool) -> str:
    """What a published row's curves are worth."""
    own = "combination: carries no information of its own" if combined else "own"
    return f"{own}; rank{_TIGHT}{rank}" if rank else own


def _of_runs(cell: CellResults) -> str:
    unfinished = sum(not run.finished for run in cell.runs)
    return f"{len(cell.runs)} ({unfinished} unfinished)" if unfinished else str(len(cell.runs))


def _lines(value: Estimate, digits: int) -> str:
    """Mean and standard deviation; under them the interquartile mean and its interval."""
    mean = _spread(value.mean, value.std, digits)
    if value.interval is None:
        return mean
    interval = _brackets(value.interval, digits, len(value.values))
    return f"{mean}\nIQM{_TIGHT}{number(value.iqm, digits)} {interval}"


def _spread(mean: float, std: float, digits: int) -> str:
    """The mean, and its standard deviation where there is one."""
    return number(mean, digits) + (f"{_TIGHT}±{_TIGHT}{number(std, digits)}" if math.isfinite(std) else "")


def _brackets(interval: Interval | None, digits: int, runs: int) -> str:
    """An interval, marked where it comes from few runs; nothing where there is none."""
    if interval is None:
        return ""
    mark = CAUTION if runs < FEW else ""
    return f"[{number(interval.low, digits)},{_TIGHT}{number(interval.high, digits)}]{mark}"


def _digits(each: EnvironmentResults) -> int:
    """Decimals that all scores in an environment get: none where any is in the hundreds."""
    largest = max(abs(value.mean) for cell in each.cells for value in (cell.final, cell.area, cell.best))
    return 0 if largest >= 100 else 1 if largest >= 10 else 2


def _cell_record(each: EnvironmentResults, cell: CellResults) -> dict[str, Any]:
    return {
        "environment": each.name,
        "cell": cell.label,
        "algorithms": cell.group.algorithms,
        "method": cell.group.method,
        "agents": cell.group.agents,
        "buffer": cell.group.buffer,
        "settings": cell.settings,
        "runs": len(cell.runs),
        "seeds": " ".join(str(run.seed) for run in cell.runs),
        "unfinished": sum(not run.finished for run in cell.runs),
        "step": each.last_step,
        **_estimate("final", cell.final),
        **_estimate("area", cell.area),
        "best_mean": cell.best.mean,
        "best_std": cell.best.std,
        "total_steps": each.total_steps,
        "equal_total_step": cell.equal_total_steps,
        **_estimate("equal_total", cell.equal_total),
    }


def _estimate(name: str, value: Estimate) -> Mapping[str, float]:
    low, high = _ends(value.interval)
    named = {"mean": value.mean, "std": value.std, "iqm": value.iqm, "iqm_low": low, "iqm_high": high}
    return {f"{name}_{key}": each for key, each in named.items()}


def _run_record(each: EnvironmentResults, cell: CellResults, index: int) -> dict[str, Any]:
    run = cell.runs[index]
    return {
        "environment": each.name,
        "cell": cell.label,
        "seed": run.seed,
        "path": str(run.path),
        "name": run.name,
        "mode": run.mode,
        "agents": run.agents,
        "finished": str(run.finished).lower(),
        "last_step": int(run.curve.step[-1]),
        "step": each.last_step,
        **{key: getattr(cell, key).values[index] for key in ("final", "area", "best")},
        "equal_total_step": cell.equal_total_steps,
        "equal_total": cell.equal_total.values[index],
    }


def _pair_rows(comparison: Comparison) -> Iterator[Sequence[Any]]:
    for each in comparison.environments:
        runs = {cell.label: len(cell.runs) for cell in each.cells}
        for (measure, x, y), found in each.pairs.items():
            yield each.name, measure, x, y, runs[x], runs[y], found.probability, *_ends(found.interval)


def _point_rows(comparison: Comparison) -> Iterator[Sequence[Any]]:
    for each, cell in _cells(comparison):
        if (row := cell.row) is None:
            continue
        source = (row.environment, row.method, row.curves, row.cell_rank)
        for beside in cell.beside:
            point, ours = beside.point, beside.ours
            numbers = (point.step, ours.mean, ours.std, point.mean, point.std)
            yield each.name, cell.label, len(cell.runs), *numbers, *source


def _ends(interval: Interval | None) -> tuple[float, float]:
    return (interval.low, interval.high) if interval else (math.nan, math.nan)


def _csv(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> bytes:
    """A float so that reading gives the same number back; nothing for what is not a number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        [("" if not math.isfinite(v) else repr(v)) if isinstance(v, float) else v for v in row]
        for row in rows
    )
    return utf8(text.getvalue())
