"""What a comparison leaves in a folder: tables as CSV, the picture, and one HTML page."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.files import replace_file, utf8
from dase_grpc.runs.reports import comparison_page, figure
from dase_grpc.runs.reports.compare import Cell, Comparison, EnvironmentResults
from dase_grpc.runs.reports.comparison_tables import cells
from dase_grpc.runs.reports.estimates import Estimate, Interval
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
        drawn = figure.sheet(comparison, inks=PRINT)
        contents = {
            **csv_files(comparison),
            "comparison.png": drawn.png_file(),
            "comparison.svg": drawn.svg_file(),
            "comparison.html": utf8(comparison_page.document(comparison)),
        }
        for name in FILES:
            replace_file(folder / name, contents[name])
    except OSError as error:
        raise RunDirectoryError(f"cannot write into {folder}: {error.strerror or error}") from None
    return [folder / name for name in FILES]


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
        for beside in cell.beside if cell.row else ():
            point, ours, row = beside.point, beside.ours, cell.row
            numbers = (point.step, ours.mean, ours.std, point.mean, point.std)
            source = (row.environment, row.method, row.curves, row.cell_rank)
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
