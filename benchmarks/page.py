"""Puts the tables of committed results into docs/performance.md and docs/scale.md.

python benchmarks/page.py [--results FOLDER] [--docs FOLDER]

Each section of a page between `<!-- NAME -->` and `<!-- end of NAME -->` is what that benchmark's `--show`
prints of NAME.csv among the results; one without results stays as it is.
"""

import argparse
import importlib
import io
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Final

from dase_grpc.errors import DaseError

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs/results"
DOCS: Final = ROOT / "docs"
PAGES: Final[Mapping[str, Sequence[str]]] = {
    "performance.md": (
        "against_reverb",
        "large_pages",
        "growth",
        "run_time",
        "run_time_many",
        "startup",
        "update_floor",
        "subnormals",
        "stack",
        "gpu",
        "serving",
    ),
    "scale.md": ("scale",),
}
"""The sections of each page."""

SCRIPTS: Final[Mapping[str, str]] = {"run_time_many": "run_time"}
"""The benchmarks of sections that have another name."""


class PageError(DaseError):
    """The page cannot take a section."""


def put(page: str, name: str, tables: str) -> str:
    """The page with another text in a section.

    Raises:
        PageError: it has no such section.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise PageError(f"the page has no section between {begin} and {end}; add both lines to it")
    return f"{before}{begin}\n{tables.strip()}\n{end}{after}"


def shown(name: str, results: Path) -> str:
    """What a benchmark prints of its results.

    Raises:
        PageError: it cannot read them.
    """
    script = SCRIPTS.get(name, name)
    printed, given = io.StringIO(), sys.argv
    sys.argv = [script, "--show", str(results)]
    try:
        with redirect_stdout(printed):
            importlib.import_module(script).main()
    except SystemExit as ended:
        if ended.code:
            raise PageError(str(ended.code)) from None
    finally:
        sys.argv = given
    return printed.getvalue()


def filled(page: str, names: Sequence[str], results: Path) -> str:
    """The page with the tables of those of its sections that there are results for.

    Raises:
        PageError: it lacks a section, or results cannot be read.
    """
    for name in names:
        found = results / f"{name}.csv"
        if found.exists():
            page = put(page, name, shown(name, found))
    return page


def main() -> None:
    """Writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="FOLDER")
    given = parser.parse_args()
    try:
        for name, sections in PAGES.items():
            page: Path = given.docs / name
            text = filled(page.read_text(encoding="utf-8"), sections, given.results)
            page.write_text(text, encoding="utf-8")
    except (DaseError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
