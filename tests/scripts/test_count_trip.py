"""docs/architecture.md says how many files a transition and a batch pass."""

import re
import sys
from pathlib import Path

import pytest
from children import ran

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "architecture.md"


@pytest.mark.slow
def test_neither_passes_more_files_than_the_page_says():
    done = ran(sys.executable, PROJECT / "scripts" / "count_trip.py", cwd=PROJECT, check=True)
    counted = re.findall(r"^(one \w+, from .* to the gradient): (\d+) files$", done.stdout, re.MULTILINE)
    assert len(counted) == 2
    page = PAGE.read_text(encoding="utf-8").replace("`", "")
    for trip, files in counted:
        (said,) = re.findall(rf"^\| {trip} \| (\d+) \|", page, re.MULTILINE)
        assert int(files) <= int(said), done.stdout
