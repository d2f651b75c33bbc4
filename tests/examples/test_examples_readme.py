"""examples/README.md names what is there."""

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_has_one_line_and_every_line_an_example():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^- \[(\S+)\]\((\S+)\): ", text, re.MULTILINE)
    there = [path for kind in ("*.py", "*.ipynb", "experiments/*.toml") for path in EXAMPLES.glob(kind)]
    names = [str(path.relative_to(EXAMPLES)) for path in there]
    assert sorted(named) == sorted(zip(names, names, strict=True))
