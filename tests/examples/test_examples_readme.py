"""examples/README.md names what is there."""

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_has_one_line_and_every_line_an_example():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^- \[(\S+)\]\((\S+)\): ", text, re.MULTILINE)
    assert sorted(named) == sorted((path.name, path.name) for path in EXAMPLES.glob("*.py"))
