"""Several appends that are committed as one: all of them outlive the process, or none."""

import pytest
from store_cases import identity_of, rows_of, serials_of

from dase_grpc.replay.buffer.directory import DataDirectory
from dase_grpc.replay.buffer.durable import DurableStore

CAPACITY = 6


@pytest.fixture
def started(tmp_path):
    """Starts the store on one directory, as after a kill; `spare` counts the first time."""
    open_ones = []

    def start(spare=5):
        for store, directory in open_ones:
            store.abandon()
            directory.close()
        open_ones.clear()
        directory = DataDirectory.open(tmp_path)
        found = directory.identity()
        if found is None:
            store = DurableStore.create(directory, identity_of(CAPACITY, spare=spare), boot_id="b")
        else:
            store = DurableStore.open(directory, found, boot_id="b")
        open_ones.append((store, directory))
        return store

    yield start
    for store, directory in open_ones:
        store.abandon()
        directory.close()


def put(store, *serials):
    """Appends one row for each serial number, one by one, without a commit."""
    for serial in serials:
        rows = rows_of([serial], 0)
        store.append("writer", serial, rows, agent_id=0, commit=False)


def held(store):
    return serials_of(store.ring.ordered())


def test_what_was_not_committed_is_not_there_after_a_kill(started):
    store = started()
    put(store, 1, 2)
    store.commit()
    put(store, 3, 4)
    assert held(store) == [1, 2, 3, 4]
    store = started()
    assert (held(store), store.committed("writer", agent_id=0)) == ([1, 2], 2)


def test_a_commit_is_for_all_writers(started):
    store = started()
    put(store, 1)
    store.append("other", 1, rows_of([9], 1), agent_id=1)
    store = started()
    assert held(store) == [1, 9]
    assert [store.committed("writer", agent_id=0), store.committed("other", agent_id=1)] == [1, 1]


def test_a_commit_without_an_append_writes_nothing(started):
    store = started()
    put(store, 1)
    store.commit()
    number = store._commits.commits.number
    store.commit()
    assert store._commits.commits.number == number


@pytest.mark.parametrize("spare", [1, 2, 5])
def test_rows_that_are_not_committed_never_lie_on_committed_ones(started, spare):
    store = started(spare)
    for last in range(1, 4 * CAPACITY):
        put(store, last)
        committed = last - store._uncommitted
        assert store._uncommitted <= spare
        store = started() if last % 7 == 0 else store
        if last % 7 == 0:
            assert held(store) == list(range(max(1, committed - CAPACITY + 1), committed + 1))
            put(store, *range(committed + 1, last + 1))


def test_a_sync_commits_first(started):
    store = started()
    put(store, 1, 2)
    for blocking in store.sync():
        blocking()
    assert held(started()) == [1, 2]


def test_a_repeated_row_is_stored_once_whether_it_was_committed_or_not(started):
    store = started()
    put(store, 1, 2)
    put(store, 2, 3)
    store.commit()
    assert held(store) == [1, 2, 3]
