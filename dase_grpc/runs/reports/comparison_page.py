"""A comparison as one HTML page that needs nothing beside it."""

from collections.abc import Iterator

from dase_grpc.runs.curves import SMOOTHING
from dase_grpc.runs.reports import html
from dase_grpc.runs.reports.compare import Comparison, EnvironmentResults
from dase_grpc.runs.reports.comparison_tables import definitions, runs_table, settings_table, tables
from dase_grpc.runs.reports.figure import is_smoothed, sheet


def document(comparison: Comparison) -> str:
    """The whole page; the same runs give the same text."""
    names = ", ".join(each.name for each in comparison.environments)
    return html.document(
        "Comparison of runs · DASE",
        html.header("Comparison of runs", f"{names} · statistics over runs"),
        html.facts(_facts(comparison)),
        html.section("Learning curves", _picture(comparison)),
        *(html.section(each.name, *_environment(each)) for each in comparison.environments),
        html.section("What the numbers are", *map(html.note, definitions(comparison))),
        html.section("What they cannot say", *(html.note(str(caution)) for caution in comparison.cautions))
        if comparison.cautions
        else html.Markup(""),
        html.section("Runs", *_runs(comparison)),
    )


def _facts(comparison: Comparison) -> dict[str, str]:
    return {
        "Environments": str(len(comparison.environments)),
        "Cells": str(len(comparison.cells)),
        "Runs": str(len(comparison.runs)),
        "Left out": str(len(comparison.left_out)),
    }


def _picture(comparison: Comparison) -> html.Markup:
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


def _environment(each: EnvironmentResults) -> Iterator[html.Markup]:
    for table in tables(each):
        yield html.note(f"{table.title[0].upper()}{table.title[1:]}.")
        yield html.table(table.columns, table.rows, words=table.words)


def _runs(comparison: Comparison) -> Iterator[html.Markup]:
    for table in (runs_table(comparison), settings_table(comparison)):
        if table.rows:
            yield html.note(table.title)
            yield html.table(table.columns, table.rows, words=table.words)
    for left_out in comparison.left_out:
        yield html.note(f"{left_out}.")
