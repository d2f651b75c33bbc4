"""A comparison as one HTML page that needs nothing beside it."""

from collections.abc import Iterable, Sequence

from dase_grpc.runs.curves import SMOOTHING
from dase_grpc.runs.reports import comparison_words, html
from dase_grpc.runs.reports.compare import Cell, Comparison, EnvironmentResults
from dase_grpc.runs.reports.figure import is_smoothed, sheet

SEVERAL = 2


def document(comparison: Comparison) -> str:
    """The whole page; the same runs give the same text."""
    names = ", ".join(each.name for each in comparison.environments)
    return html.document(
        "Comparison of runs · DASE",
        html.header("Comparison of runs", f"{names} · statistics over runs"),
        html.facts(_facts(comparison)),
        html.section("Learning curves", _picture(comparison)),
        *(html.section(each.name, *_environment(each)) for each in comparison.environments),
        html.section("What the numbers are", *_definitions(comparison)),
        html.section("What they cannot say", *map(html.note, comparison.cautions))
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


def _environment(each: EnvironmentResults) -> Iterable[html.Markup]:
    digits = comparison_words.digits(each)
    yield html.note(
        f"Up to step {each.last_step:,} of each agent, the last that all runs share "
        f"({len(each.steps):,} common evaluations)."
    )
    yield html.table(
        ("", "runs", "final score", "IQM [95 %]", "area", "IQM [95 %]", "best evaluation"),
        [_scores(cell, digits) for cell in each.cells],
    )
    if each.sizes_differ:
        yield html.note(f"At equal total steps: {each.total_steps:,} of all agents of a run together.")
        yield html.table(
            ("at equal total steps", "steps of each agent", "final score", "IQM [95 %]"),
            [_equal_total(cell, digits) for cell in each.cells],
        )
    if len(each.cells) >= SEVERAL:
        yield html.note(f"Probability of improvement: {comparison_words.IMPROVEMENT}")
        yield html.table(("row over column", *(cell.label for cell in each.cells)), _chances(each))
    if any(cell.beside for cell in each.cells):
        (published_for,) = {cell.row.environment for cell in each.cells if cell.row}
        yield html.note(comparison_words.PUBLISHED)
        yield html.table(
            (f"beside {published_for}", "around step", "ours", "as published", "published as", "its curves"),
            [row for cell in each.cells for row in _published(cell, digits)],
        )


def _scores(cell: Cell, digits: int) -> Sequence[str]:
    return (
        cell.label,
        comparison_words.of_runs(cell),
        comparison_words.spread(cell.final, digits),
        comparison_words.robust(cell.final, digits),
        comparison_words.spread(cell.area, digits),
        comparison_words.robust(cell.area, digits),
        comparison_words.spread(cell.best, digits),
    )


def _equal_total(cell: Cell, digits: int) -> Sequence[str]:
    return (
        cell.label,
        f"{cell.equal_total_steps:,}",
        comparison_words.spread(cell.equal_total, digits),
        comparison_words.robust(cell.equal_total, digits),
    )


def _chances(each: EnvironmentResults) -> list[list[str]]:
    return [
        [
            x.label,
            *(
                ""
                if x is y
                else comparison_words.chance(each.pair(x.label, y.label), min(len(x.runs), len(y.runs)))
                for y in each.cells
            ),
        ]
        for x in each.cells
    ]


def _published(cell: Cell, digits: int) -> Iterable[Sequence[str]]:
    if cell.row is None:
        return
    for beside in cell.beside:
        yield (
            cell.label,
            comparison_words.step(beside.point.step),
            comparison_words.spread(beside.ours, digits),
            comparison_words.published(beside.point, digits),
            cell.row.method,
            comparison_words.origin(cell.row),
        )


def _definitions(comparison: Comparison) -> list[html.Markup]:
    sentences = [
        comparison_words.UNIT,
        comparison_words.FINAL_SCORE,
        comparison_words.AREA,
        comparison_words.INTERVAL,
        comparison_words.BEST,
    ]
    if any(each.sizes_differ for each in comparison.environments):
        sentences.append(comparison_words.EQUAL_TOTAL)
    return [html.note(sentence) for sentence in sentences]


def _runs(comparison: Comparison) -> Iterable[html.Markup]:
    rows = [
        (
            str(run.path),
            each.name,
            cell.label,
            str(run.seed),
            f"{run.curve.step[-1]:,}{'' if run.finished else ' (unfinished)'}",
            html.number(cell.final.values[index], comparison_words.digits(each)),
            html.number(cell.area.values[index], comparison_words.digits(each)),
        )
        for each in comparison.environments
        for cell in each.cells
        for index, run in enumerate(cell.runs)
    ]
    yield html.table(("", "environment", "cell", "seed", "last step", "final score", "area"), rows)
    if any(cell.settings for cell in comparison.cells):
        yield html.note("The settings in which cells of one environment differ:")
        yield html.table(
            ("", "environment", "settings"),
            [(cell.label, cell.group.environment, cell.settings) for cell in comparison.cells],
        )
    for left_out in comparison.left_out:
        yield html.note(f"{left_out}.")
