"""Puts the tables of committed results into docs/performance.md.

python benchmarks/page.py [--results FOLDER] [--page FILE.md]

Each section of the page between `<!-- NAME -->` and `<!-- end of NAME -->` is what that benchmark's `--show`
prints of FOLDER/NAME.csv; one without results stays as it is.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

from dase_grpc.errors import DaseError

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs/results"
PAGE: Final = ROOT / "docs/performance.md"
SECTIONS: Final = (
    "against_reverb",
    "growth",
    "run_time",
    "startup",
    "update_floor",
    "stack",
    "gpu",
    "serving",
)


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
    script = Path(__file__).with_name(f"{name}.py")
    done = subprocess.run(
        [sys.executable, str(script), "--show", str(results)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PageError(done.stderr.strip())
    return done.stdout


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE.md")
    given = parser.parse_args()
    try:
        text = given.page.read_text(encoding="utf-8")
        for name in SECTIONS:
            results = given.results / f"{name}.csv"
            if results.exists():
                text = put(text, name, shown(name, results))
    except (DaseError, OSError) as error:
        sys.exit(str(error))
    given.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
