"""A disk that refuses a sync: what it did not take is claimed by nobody, however often it is asked again."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from contracts.sentences import refuses
from replay.buffer.runs_on_disk import join
from store_cases import SCHEMA, identity_of, rows_of, serials_of

from dase_grpc.errors import DataDirectoryError
from dase_grpc.replay.buffer.directory import DataDirectory
from dase_grpc.replay.buffer.durable import DurableStore, inspect


@pytest.fixture
def refusing(monkeypatch):
    """Names of files whose next sync fails, and the ones after it do not, as Linux has it."""
    names, sync = list[str](), os.fdatasync

    def fdatasync(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if name in names:
            names.remove(name)
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return names


def synced(run) -> None:
    for blocking in run.sync():
        blocking()


def unheard(run) -> None:
    """A sync on a thread of which nobody hears any more."""
    with suppress(DataDirectoryError):
        synced(run)


def nothing(run) -> None:
    """The first sync that fails is the last one, of an orderly stop."""


@pytest.mark.parametrize("boot_id", ["another", "b"])
@pytest.mark.parametrize("before", [unheard, nothing])
@pytest.mark.parametrize("name", ["rows", "commits"])
def test_after_a_sync_that_failed_the_next_start_finds_what_the_last_good_one_named(
    runs, refusing, name, before, boot_id
):
    run = runs.start()
    join(run)
    run.store.append("w", 1, rows_of(range(1, 6), 0), agent_id=0)
    synced(run)
    run.store.append("w", 6, rows_of(range(6, 9), 0), agent_id=0)
    refusing.append(name)
    before(run)
    with refuses(DataDirectoryError, str(runs.path / name), "check the disk"):
        run.close()
    runs.started.remove(run)
    assert refusing == []
    found = inspect(runs.path, boot_id=boot_id)
    assert found is not None
    assert (found.transitions, found.machine_stopped) == (5, True)
    again = runs.start(boot_id=boot_id)
    assert serials_of(again.store.ring.ordered()) == [1, 2, 3, 4, 5]
    assert again.store.committed("w", agent_id=0) == 5
    again.store.append("w", 6, rows_of(range(6, 9), 0), agent_id=0)
    runs.close(again)
    assert runs.start(boot_id="a third").store.committed("w", agent_id=0) == 8


@pytest.mark.parametrize("opened", [True, False])
def test_where_the_disk_has_refused_a_lease_the_replay_leases_nothing_more_and_says_so(
    runs, refusing, opened
):
    run = runs.start()
    if opened:
        join(run, wanted=1)
    refusing.append("leases")
    for attempt in (lambda: join(run), lambda: join(run), lambda: synced(run), run.close):
        with refuses(DataDirectoryError, str(runs.path / "leases"), "check the disk"):
            attempt()
    runs.started.remove(run)
    assert [lease.agent_id for lease in run.leases.all()] == [1] * opened
    assert join(runs.start(now=100.0), now=111.0).epoch == 2  # whoever was refused may have had epoch 1


def test_a_last_sync_that_fails_closes_the_files_all_the_same(runs, refusing):
    run = runs.start()
    join(run)
    run.store.append("w", 1, rows_of([1], 0), agent_id=0)
    descriptors = [run.store._rows.descriptor, run.store._commits._file.descriptor]
    refusing.append("rows")
    with pytest.raises(DataDirectoryError):
        run.close()
    runs.started.remove(run)
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.fixture
def store(tmp_path):
    """A small store that foresees few rows, and a start of it on another boot."""
    directory, identity = DataDirectory.open(tmp_path), identity_of(9, spare=2)
    store = DurableStore.create(directory, identity, boot_id="b")
    yield store, lambda: DurableStore.open(directory, identity, boot_id="another")
    directory.close()


def test_where_a_record_that_foresees_more_rows_is_refused_nothing_is_claimed_any_more(store, refusing):
    store, start = store
    store.append("w", 1, rows_of([1, 2], 0), agent_id=0)
    synced(store)
    refusing.append("commits")
    with pytest.raises(DataDirectoryError):
        store.append("w", 3, rows_of(range(3, 40), 0), agent_id=0)
    for attempt in attempts(store):
        with pytest.raises(DataDirectoryError):
            attempt()
    again = start()
    assert again.committed("w", agent_id=0) == again.ring.total == 2
    again.abandon()


def attempts(store) -> list[Callable[[], object]]:
    return [
        lambda: synced(store),
        lambda: store.append("w", store.committed("w", agent_id=0) + 1, rows_of([9] * 40, 0), agent_id=0),
        lambda: store.forget([(0, "w")]),
        store.close,
    ]


def test_a_file_whose_sync_another_caller_heard_fail_is_refused_to_all(store, refusing):
    """Of two syncs at once Linux tells one alone."""
    store, start = store
    store.append("w", 1, rows_of([1], 0), agent_id=0)
    calls = store.sync()
    flush = next(calls)
    refusing.append("rows")
    for _ in range(2):
        with pytest.raises(DataDirectoryError, match="rows"):
            flush()
    with pytest.raises(DataDirectoryError):
        next(calls)
    store.abandon()
    again = start()
    assert (len(again.ring), again.schema) == (0, SCHEMA)
    again.abandon()
