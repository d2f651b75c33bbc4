"""The tables of docs/similarity.md are what the commands beside them print from the committed results."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/similarity.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python (benchmarks/\S+ .*--summary.*)$", TEXT, re.MULTILINE)


def test_there_is_a_command_for_each_table():
    # The first table of the page lists the halves of the gate.
    assert len(COMMANDS) == len(set(COMMANDS)) >= 5
    assert len(re.findall(r"^\| measure ", TEXT, re.MULTILINE)) == len(COMMANDS) + 1  # the study prints two


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_has_what_the_command_prints(command, script, called, monkeypatch):
    program, *arguments = shlex.split(command)
    monkeypatch.chdir(ROOT)
    printed = called(script(Path(program).stem), *arguments)
    lines = [line for line in printed.splitlines() if line]
    assert len(lines) > 2
    for line in lines:
        assert line in TEXT
