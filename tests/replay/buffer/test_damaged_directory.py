"""Data directories that are damaged, and disks that are full."""

import json
import os
from pathlib import Path

import pytest
from contracts.sentences import refuses
from replay.buffer.runs_on_disk import join
from store_cases import rows_of

from dase_grpc.errors import DataDirectoryError


def changed_identity(path: Path, **changes: object) -> None:
    file = path / "buffer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def closed(runs) -> Path:
    """A directory in which a writer has stored a row."""
    run = runs.start()
    join(run)
    run.store.append("the-writer", 1, rows_of([1], 0), agent_id=0)
    runs.close(run)
    return runs.path


def test_another_format_is_refused_with_both_versions(runs, closed):
    changed_identity(closed, format=7)
    with refuses(DataDirectoryError, "format 7", "format 1"):
        runs.start()


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: changed_identity(path, capacity=11),
        lambda path: (path / "buffer.json").write_text("{"),
        lambda path: (path / "buffer.json").write_text("[1]"),
        lambda path: (path / "buffer.json").write_bytes(b"\xff"),
        lambda path: shorten(path / "rows"),
        lambda path: (path / "rows").unlink(),
        lambda path: shorten(path / "commits"),
        lambda path: (path / "commits").write_bytes(bytes((path / "commits").stat().st_size)),
        lambda path: shorten(path / "leases"),
    ],
)
def test_a_damaged_directory_is_refused_in_one_sentence_and_can_be_tried_again(runs, closed, damage):
    damage(closed)
    for _ in range(2):
        with refuses(DataDirectoryError, str(closed)):
            runs.start()


def test_a_damaged_name_of_a_writer_is_refused(runs, closed):
    commits = closed / "commits"
    commits.write_bytes(commits.read_bytes().replace(b"the-writer", b"THE-writer"))
    with refuses(DataDirectoryError, "commits", "damaged"):
        runs.start()
