"""Files of a comparison in a folder: tables as CSV, the picture, and one HTML page."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.curves import SMOOTHING
from dase_grpc.runs.files import replace_file, utf8
from dase_grpc.runs.reports import html
from dase_grpc.runs.reports.compare import Cell, Comparison, EnvironmentResults
from dase_grpc.runs.reports.comparison_tables import cells, definitions, runs_table, settings_table, tables
from dase_grpc.runs.reports.estimates import Estimate, Interval
from dase_grpc.runs.reports.figure import is_smoothed, sheet
from dase_grpc.runs.reports.figures import PRINT

FILES: Final = (
    "comparison.csv",
    "runs.csv",
    "pairs.csv",
    "published.csv",
    "comparison.png",
    "comparison.svg",
    "comparison.html",
)
PAIR_COLUMNS: Final = (
    "environment",
    "measure",
    "x",
    "y",
    "runs_x",
    "runs_y",
    "probability_x_higher",
    "low",
    "high",
)
PUBLISHED_COLUMNS: Final = (
    "environment",
    "cell",
    "runs",
    "step",
    "ours_mean",
    "ours_std",
    "published_mean",
    "published_std",
    "published_environment",
    "published_method",
    "published_curves",
    "published_cell_rank",
)


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes all files of a comparison, each all at once, and returns their paths.

    Raises:
        RunDirectoryError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = sheet(comparison, inks=PRINT)
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
    names = ", ".join(each.name for each in comparison.environments)
    return html.page(
        "comparison.html",
        title="Comparison of runs",
        heading="Comparison of runs",
        subtitle=f"{names} · statistics over runs",
        facts=_facts(comparison),
        curves=_picture(comparison),
        environments={each.name: tuple(tables(each)) for each in comparison.environments},
        definitions=definitions(comparison),
        cautions=comparison.cautions,
        runs=(runs_table(comparison), settings_table(comparison)),
        left_out=comparison.left_out,
    )


def _facts(comparison: Comparison) -> dict[str, str]:
    return {
        "Environments": str(len(comparison.environments)),
        "Cells": str(len(comparison.cells)),
        "Runs": str(len(comparison.runs)),
        "Left out": str(len(comparison.left_out)),
    }


def _picture(comparison: Comparison) -> Markup:
    smooth = (
        f"a centred moving average over {SMOOTHING} evaluations"
        if all(map(is_smoothed, comparison.cells))
        else f"from {2 * SMOOTHING} evaluations on smoothed by a centred moving average over {SMOOTHING}"
    )
    published = any(cell.row for cell in comparison.cells)
    return html.figure(
        sheet(comparison).svg(),
        f"Mean over runs, {smooth}; the band is half a standard deviation over runs. Left by the steps of "
        f"each agent, as the paper does; right by those of all agents of a run together. A dashed upright "
        f"line stands where the comparison ends, if runs go on behind it."
        + (" Marks: as published, with half a standard deviation; hollow: combination." if published else ""),
        otherwise="There is no curve.",
    )


def csv_files(comparison: Comparison) -> dict[str, bytes]:
    """The CSV files by name: a row per cell, per run, per pair of cells and measure, per published point."""
    of_cells = [_cell_record(each, cell) for each, cell in cells(comparison)]
    runs = [
        _run_record(each, cell, index) for each, cell in cells(comparison) for index in range(len(cell.runs))
    ]
    return {
        "comparison.csv": _csv(tuple(of_cells[0]), (record.values() for record in of_cells)),
        "runs.csv": _csv(tuple(runs[0]), (record.values() for record in runs)),
        "pairs.csv": _csv(PAIR_COLUMNS, _pair_rows(comparison)),
        "published.csv": _csv(PUBLISHED_COLUMNS, _published_rows(comparison)),
    }


def _cell_record(each: EnvironmentResults, cell: Cell) -> dict[str, Any]:
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


def _estimate(name: str, value: Estimate) -> dict[str, Any]:
    low, high = _ends(value.interval)
    keys = ("mean", "std", "iqm", "iqm_low", "iqm_high")
    values = (value.mean, value.std, value.iqm, low, high)
    return {f"{name}_{key}": each for key, each in zip(keys, values, strict=True)}


def _run_record(each: EnvironmentResults, cell: Cell, index: int) -> dict[str, Any]:
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
        "final": cell.final.values[index],
        "area": cell.area.values[index],
        "best": cell.best.values[index],
        "equal_total_step": cell.equal_total_steps,
        "equal_total": cell.equal_total.values[index],
    }


def _pair_rows(comparison: Comparison) -> Iterator[Sequence[Any]]:
    for each in comparison.environments:
        runs = {cell.label: len(cell.runs) for cell in each.cells}
        for pair in each.pairs:
            x, y, result = pair.better, pair.worse, pair.result
            ends = _ends(result.interval)
            yield each.name, pair.measure, x, y, runs[x], runs[y], result.probability, *ends


def _published_rows(comparison: Comparison) -> Iterator[Sequence[Any]]:
    for each, cell in cells(comparison):
        if (row := cell.row) is None:
            continue
        source = (row.environment, row.method, row.curves, row.cell_rank)
        for beside in cell.beside:
            point, ours = beside.point, beside.ours
            numbers = (point.step, ours.mean, ours.std, point.mean, point.std)
            yield each.name, cell.label, len(cell.runs), *numbers, *source


def _ends(interval: Interval | None) -> tuple[float, float]:
    return (interval.low, interval.high) if interval else (math.nan, math.nan)


def _csv(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> bytes:
    """A float so that reading gives the same number back; nothing for what is not a number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        [("" if not math.isfinite(v) else repr(v)) if isinstance(v, float) else v for v in row]
        for row in rows
    )
    return utf8(text.getvalue())
