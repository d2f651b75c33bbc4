"""`dase compare`: reads runs, writes the comparison's files, and shows its tables on the terminal."""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from textwrap import fill, wrap
from typing import Final

from rich.console import Console
from rich.text import Text

from dase_grpc.launch.console import say
from dase_grpc.runs.reports.compare import compare
from dase_grpc.runs.reports.comparison_tables import definitions, tables, write_comparison
from dase_grpc.runs.reports.html import Table

_GAP: Final = "  "


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
    for each in comparison.environments:
        for table in tables(each):
            console.print(Text(f"{each.name}: {table.title}", style="bold"))
            for line in lines(table, console.width):
                say(console, line)
    for sentence in definitions(comparison):
        console.print(Text(sentence))
    for caution in comparison.cautions:
        for line in f"caution: {caution}".split("\n"):
            say(
                warnings,
                fill(
                    line,
                    warnings.width,
                    subsequent_indent="    ",
                    break_long_words=False,
                    break_on_hyphens=False,
                ),
            )
    for path in written:
        say(console, str(path))


def lines(table: Table, width: int) -> Iterator[str]:
    """The table in lines of at most `width` characters; only a single word that is longer stands out.

    Columns for which there is no room follow below, beside the first column once more.
    """
    first, *rest = zip(table.columns, *table.rows, strict=True)
    words = [index in table.words for index in range(len(table.columns))]
    shown = 1
    while rest:
        count = max(1, _fitting([first, *rest], width))
        block = [first, *rest[:count]]
        yield from _block(block, _widths(block, width), [words[0], *words[shown : shown + count]])
        rest, shown = rest[count:], shown + count
        yield ""


def _fitting(columns: Sequence[Sequence[str]], width: int) -> int:
    """How many of the columns after the first fit beside it."""
    ends = accumulate(len(_GAP) + _least(column) for column in columns)
    return sum(end - len(_GAP) <= width for end in ends) - 1


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """As wide as the longest word, or, from left to right, as the longest line where there is room."""
    widths = [_least(column) for column in columns]
    spare = max(0, width - sum(widths) - len(_GAP) * (len(widths) - 1))
    for index, column in enumerate(columns):
        longest = max(len(line) for text in column for line in text.split("\n"))
        if (more := longest - widths[index]) <= spare:
            widths[index] += more
            spare -= more
    return widths


def _least(column: Sequence[str]) -> int:
    return max(len(word) for text in column for word in re.split("[ \n]", text))


def _block(columns: Sequence[Sequence[str]], widths: Sequence[int], words: Sequence[bool]) -> Iterator[str]:
    for number, row in enumerate(zip(*columns, strict=True)):
        cells = [_wrapped(text, width) for text, width in zip(row, widths, strict=True)]
        for texts in zip_longest(*cells, fillvalue=""):
            yield _GAP.join(
                text.ljust(width) if left else text.rjust(width)
                for text, width, left in zip(texts, widths, words, strict=True)
            ).rstrip()
        if number == 0:
            yield "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))


def _wrapped(text: str, width: int) -> list[str]:
    """The text's lines, none longer than `width` but for single words."""
    return [
        part.replace("\u00a0", " ")
        for line in text.split("\n")
        for part in wrap(line, max(1, width), break_long_words=False, break_on_hyphens=False)
    ]
