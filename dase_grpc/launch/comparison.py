"""`dase compare`: reads runs, writes the comparison's files, and shows its tables on the terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dase_grpc.launch.console import say
from dase_grpc.runs.reports import comparison_words
from dase_grpc.runs.reports.compare import Comparison, EnvironmentResults, compare
from dase_grpc.runs.reports.comparison_tables import write_comparison
from dase_grpc.runs.reports.estimates import Estimate
from dase_grpc.runs.reports.html import number


def compare_here(
    paths: Sequence[Path], folder: Path, *, unfinished: bool, console: Console, warnings: Console
) -> None:
    """Compares runs: tables and the names of the files to `console`, what to be careful about to `warnings`.

    Raises:
        RunDirectoryError: there is nothing to compare, or the files cannot be written.
    """
    comparison = compare(paths, unfinished=unfinished)
    for left_out in comparison.left_out:
        say(warnings, f"warning: {left_out}")
    written = write_comparison(comparison, folder)
    for table in tables(comparison):
        console.print(table)
    for sentence in notes(comparison):
        say(console, sentence)
    for sentence in comparison.cautions:
        say(warnings, f"caution: {sentence}")
    for path in written:
        say(console, str(path))


def tables(comparison: Comparison) -> Iterable[Group]:
    """The tables of each environment: scores, probabilities of improvement, what was published."""
    for each in comparison.environments:
        yield _scores(each)
        if len(each.cells) > 1:
            yield _chances(each)
        if any(cell.beside for cell in each.cells):
            yield _published(each)


def notes(comparison: Comparison) -> list[str]:
    """What the tables' numbers are."""
    sentences = [
        comparison_words.UNIT,
        comparison_words.FINAL_SCORE,
        comparison_words.AREA,
        comparison_words.INTERVAL,
    ]
    if any(each.sizes_differ for each in comparison.environments):
        sentences.append(comparison_words.EQUAL_TOTAL)
    if any(len(each.cells) > 1 for each in comparison.environments):
        sentences.append(f"Probability of improvement: {comparison_words.IMPROVEMENT}")
    if any(cell.beside for cell in comparison.cells):
        sentences.append(comparison_words.PUBLISHED)
    return sentences


def _scores(each: EnvironmentResults) -> Group:
    digits = comparison_words.digits(each)
    columns = ["", "runs", "final score", "area", "best"]
    if each.sizes_differ:
        columns.append(f"final at {each.total_steps:,}\ntotal steps")
    rows = []
    for cell in each.cells:
        row = [
            cell.label,
            comparison_words.of_runs(cell),
            _lines(cell.final, digits),
            _lines(cell.area, digits),
        ]
        row.append(comparison_words.spread(cell.best, digits))
        rows.append([*row, _lines(cell.equal_total, digits)] if each.sizes_differ else row)
    return _table(f"{each.name}, up to step {each.last_step:,} of each agent", columns, rows)


def _lines(value: Estimate, digits: int) -> str:
    """Mean and standard deviation; under them the interquartile mean and its interval."""
    mean = comparison_words.spread(value, digits)
    if value.interval is None:
        return mean
    interval = comparison_words.brackets(value.interval, digits, len(value.values))
    return f"{mean}\nIQM {number(value.iqm, digits)}\n{interval}"


def _chances(each: EnvironmentResults) -> Group:
    rows = []
    for x in each.cells:
        row = [x.label]
        for y in each.cells:
            runs = min(len(x.runs), len(y.runs))
            row.append("" if x is y else comparison_words.chance(each.pair(x.label, y.label), runs))
        rows.append(row)
    title = f"{each.name}: probability that a run of the row ends higher than one of the column"
    return _table(title, ["", *(cell.label for cell in each.cells)], rows)


def _published(each: EnvironmentResults) -> Group:
    digits = comparison_words.digits(each)
    rows = []
    for cell in each.cells:
        if cell.row is None:
            continue
        for beside in cell.beside:
            row = [
                cell.label,
                comparison_words.step(beside.point.step),
                comparison_words.spread(beside.ours, digits),
            ]
            row += [
                comparison_words.published(beside.point, digits),
                f"{cell.row.environment}\n{cell.row.method}",
            ]
            rows.append([*row, comparison_words.origin(cell.row)])
    return _table(
        f"{each.name}: ours beside the published numbers, at the same step",
        ["", "around step", "ours", "as published", "published as", "its curves"],
        rows,
    )


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Group:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, name in enumerate(columns):
        table.add_column(Text(name), justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return Group(Text(title, style="bold"), table)
