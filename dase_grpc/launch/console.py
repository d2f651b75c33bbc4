"""A command's console: its sentences, how it was called, and the tables of `dase compare`."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, zip_longest
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from dase_grpc.runs.reports.html import Table as Compared

Verdict = Literal["good", "note", "bad"]
STYLES: Final[Mapping[Verdict, str]] = {"good": "green", "note": "yellow", "bad": "bold red"}
"""How a table shows each verdict on what was looked at."""

_GAP: Final = "  "


class PatientConsole(Console):
    """A console whose reader may go away: training goes on without one."""

    def on_broken_pipe(self) -> None:
        """Shows nothing any more, now that nobody reads it."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def plain_table(*columns: str, rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table without lines; nothing in a cell is markup."""
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def say(console: Console, text: str) -> None:
    """Prints a line as it is, however long; nothing in it is markup."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def program(command: Sequence[str]) -> str:
    """How this program was called, so that a line with another of its commands can be pasted.

    command is sys.argv; what the shell finds by its name alone is named by that.
    """
    called = Path(command[0] if command else "dase")
    if called.name == "__main__.py":
        return f"{_as_found(Path(sys.executable))} -m dase_grpc"
    return _as_found(called)


def _as_found(called: Path) -> str:
    found = shutil.which(called.name)
    if called.name == str(called) or (found is not None and Path(found) == called):
        return called.name
    return shlex.quote(str(called))


def pasted(path: Path) -> str:
    """A path as an argument in a line that can be pasted; none is taken for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def compare_here(
    paths: Sequence[Path], folder: Path, *, unfinished: bool, console: Console, warnings: Console
) -> None:
    """Compares runs: tables and names of files to `console`, what to be careful about to `warnings`."""
    # matplotlib takes a while to import, and other commands do without it
    from dase_grpc.runs.reports.compare import compare
    from dase_grpc.runs.reports.comparison_tables import definitions, tables, write_comparison

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
            say(warnings, "\n".join(_words_wrapped(line, warnings.width, subsequent_indent="    ")))
    for path in written:
        say(console, str(path))


_words_wrapped = partial(wrap, break_long_words=False, break_on_hyphens=False)


def lines(table: "Compared", width: int) -> Iterator[str]:
    """The table in lines of at most `width` characters; only a single word that is longer stands out.

    Columns for which there is no room follow below, beside the first column once more.
    """
    columns = list(zip(table.columns, *table.rows, strict=True))
    words = [index in table.words for index in range(len(columns))]
    shown = 1
    while shown < len(columns):
        ends = accumulate(len(_GAP) + _least(column) for column in (columns[0], *columns[shown:]))
        end = shown + max(1, sum(end - len(_GAP) <= width for end in ends) - 1)
        block = [columns[0], *columns[shown:end]]
        yield from _block(block, _widths(block, width), [words[0], *words[shown:end]])
        shown = end
        yield ""


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
    parts = (part for line in text.split("\n") for part in _words_wrapped(line, max(1, width)))
    return [part.replace("\u00a0", " ") for part in parts]
