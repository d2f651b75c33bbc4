"""A data directory that is only looked at, and how much disk it takes."""

import errno
import os
from pathlib import Path

import pytest
from contracts.sentences import assert_one_sentence, refuses
from store_cases import SCHEMA, rows_of

from dase_grpc.errors import DataDirectoryError
from dase_grpc.replay.buffer.durable import inspect, reserved_bytes
from dase_grpc.replay.buffer.run import SharedRun

CAPACITY = 10


def begun(path: Path, *, rows: int = 0) -> SharedRun:
    """A run on disk that one agent has joined, and stored some rows in."""
    run = SharedRun("run", capacity=CAPACITY, min_size=1, seed=0, ttl_s=10.0)
    run.keep_in(path, boot_id="b", now=0.0)
    run.join("node", wanted=0, run_id="run", schema=SCHEMA, now=0.0)
    if rows:
        run.store.append("w", 1, rows_of(range(rows), 0), agent_id=0)
    return run


def test_where_there_is_no_buffer_nothing_is_found_and_nothing_is_made(tmp_path):
    assert inspect(tmp_path / "none", boot_id="b") is None
    assert list(tmp_path.iterdir()) == []


def test_a_buffer_is_seen_while_a_replay_works_on_it_and_nothing_changes(tmp_path):
    run = begun(tmp_path, rows=CAPACITY + 3)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    found = inspect(tmp_path, boot_id="b")
    assert found is not None
    assert (found.transitions, found.writers, found.machine_stopped) == (CAPACITY, 1, False)
    assert found.identity.run_id == "run"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    run.close()


@pytest.fixture
def others(monkeypatch):
    """Makes files as they are for others than their owner: read-only, and the leases not even that."""
    opened = os.open

    def as_another(path, flags, *mode, **named):
        if flags & os.O_RDWR or Path(path).name == "leases":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *mode, **named)

    return lambda: monkeypatch.setattr(os, "open", as_another)


def test_a_buffer_that_may_only_be_read_is_seen_as_it_is_but_cannot_be_gone_on_with(tmp_path, others):
    begun(tmp_path, rows=4).close()
    others()
    found = inspect(tmp_path, boot_id="b")
    assert found is not None
    assert (found.transitions, found.writers) == (4, 1)
    with refuses(DataDirectoryError, "rows cannot be opened (Permission denied); let this user in"):
        inspect(tmp_path, boot_id="b", to_go_on=True)


def test_after_the_machine_has_stopped_what_was_synced_is_told(tmp_path):
    run = begun(tmp_path, rows=4)
    run.close()  # syncs
    found = inspect(tmp_path, boot_id="another")
    assert found is not None
    assert (found.transitions, found.machine_stopped) == (4, True)


@pytest.mark.parametrize("name", ["buffer.json", "rows", "commits", "leases"])
def test_a_file_that_is_damaged_is_named(tmp_path, name):
    begun(tmp_path, rows=4).close()
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - 9)
    with pytest.raises(DataDirectoryError, match=name) as caught:
        inspect(tmp_path, boot_id="b")
    assert_one_sentence(caught.value)


def test_the_footprint_is_the_size_of_the_files_but_for_some_text(tmp_path):
    begun(tmp_path).close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    text = sum(sizes.pop(name, 0) for name in ("buffer.json", "settings.json", "lock"))
    assert sum(sizes.values()) == reserved_bytes(SCHEMA, CAPACITY)
    assert text < 4_096
