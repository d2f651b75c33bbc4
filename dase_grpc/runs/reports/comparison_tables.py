"""The files of a comparison: tables as CSV, the picture, and one HTML page."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.files import replace_file, utf8
from dase_grpc.runs.reference import PublishedRow
from dase_grpc.runs.reports import comparison_page, figure
from dase_grpc.runs.reports.compare import Cell, Comparison, EnvironmentResults
from dase_grpc.runs.reports.estimates import Estimate
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
"""Of pairs.csv, which has no row where no environment has two cells."""
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
"""Of published.csv, which has no row where nothing was published for a cell."""


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes all files of a comparison, each all at once, and returns their paths.

    Raises:
        RunDirectoryError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in _contents(comparison):
            replace_file(folder / name, content)
    except OSError as error:
        raise RunDirectoryError(f"cannot write into {folder}: {error.strerror or error}") from None
    return [folder / name for name in FILES]


def _contents(comparison: Comparison) -> Iterable[tuple[str, bytes]]:
    yield from tables(comparison).items()
    drawn = figure.sheet(comparison, inks=PRINT)
    yield "comparison.png", drawn.png_file()
    yield "comparison.svg", drawn.svg_file()
    yield "comparison.html", utf8(comparison_page.document(comparison))


def tables(comparison: Comparison) -> dict[str, bytes]:
    """The CSV files by name: a row per cell, per run, per pair of cells and measure, per published point."""
    return {
        "comparison.csv": _csv(_cells(comparison)),
        "runs.csv": _csv(_runs(comparison)),
        "pairs.csv": _csv(_pairs(comparison), columns=PAIR_COLUMNS),
        "published.csv": _csv(_published(comparison), columns=PUBLISHED_COLUMNS),
    }


def _cells(comparison: Comparison) -> Iterable[dict[str, Any]]:
    for each in comparison.environments:
        for cell in each.cells:
            yield {
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


def _published(comparison: Comparison) -> Iterable[dict[str, Any]]:
    for each in comparison.environments:
        for cell in each.cells:
            if cell.row is not None:
                yield from _beside(each.name, cell, cell.row)


def _beside(environment: str, cell: Cell, row: PublishedRow) -> Iterable[dict[str, Any]]:
    for beside in cell.beside:
        yield {
            "environment": environment,
            "cell": cell.label,
            "runs": len(cell.runs),
            "step": beside.point.step,
            "ours_mean": beside.ours.mean,
            "ours_std": beside.ours.std,
            "published_mean": beside.point.mean,
            "published_std": beside.point.std,
            "published_environment": row.environment,
            "published_method": row.method,
            "published_curves": row.curves,
            "published_cell_rank": row.cell_rank,
        }


def _estimate(name: str, value: Estimate) -> dict[str, Any]:
    interval = value.interval
    return {
        f"{name}_mean": value.mean,
        f"{name}_std": value.std,
        f"{name}_iqm": value.iqm,
        f"{name}_iqm_low": interval.low if interval else "",
        f"{name}_iqm_high": interval.high if interval else "",
    }


def _runs(comparison: Comparison) -> Iterable[dict[str, Any]]:
    for each in comparison.environments:
        for cell in each.cells:
            yield from _runs_of(each, cell)


def _runs_of(each: EnvironmentResults, cell: Cell) -> Iterable[dict[str, Any]]:
    for index, run in enumerate(cell.runs):
        yield {
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


def _pairs(comparison: Comparison) -> Iterable[dict[str, Any]]:
    for each in comparison.environments:
        sizes = {cell.label: len(cell.runs) for cell in each.cells}
        for pair in each.pairs:
            interval = pair.result.interval
            yield {
                "environment": each.name,
                "measure": pair.measure,
                "x": pair.better,
                "y": pair.worse,
                "runs_x": sizes[pair.better],
                "runs_y": sizes[pair.worse],
                "probability_x_higher": pair.result.probability,
                "low": interval.low if interval else "",
                "high": interval.high if interval else "",
            }


def _csv(rows: Iterable[Mapping[str, Any]], *, columns: Sequence[str] = ()) -> bytes:
    """The columns are those of the first row unless they are given."""
    table = [{key: _cell(value) for key, value in row.items()} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return utf8(text.getvalue())


def _cell(value: Any) -> Any:
    """A float so that reading gives the same number back; nothing for what is not a number."""
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else ""
    return value
