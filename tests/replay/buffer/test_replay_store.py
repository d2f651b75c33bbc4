"""ReplayStore: every sequence number of a writer is stored exactly once, whatever is resent."""

from collections.abc import Iterator

import numpy as np
import pytest
from contracts.sentences import assert_one_sentence, refuses
from store_cases import BACKENDS, SCHEMA, WIDER, rows_of, serials_of, store_on

from dase_grpc.errors import MalformedError, SequenceGapError, TooManyWritersError
from dase_grpc.replay.buffer.sampling import Source
from dase_grpc.replay.buffer.store import ReplayStore


@pytest.fixture(params=list(BACKENDS))
def store(request) -> Iterator[ReplayStore]:
    with store_on(request.param, 8, max_writers=2) as opened:
        yield opened


def stored(store: ReplayStore) -> list[int]:
    return serials_of(store.ring.ordered())


@pytest.mark.parametrize(("first", "serials"), [(1, [1, 2, 3]), (2, [2, 3]), (1, [1, 2]), (3, [3]), (3, [])])
def test_rows_already_committed_are_skipped(store, first, serials):
    store.append("w", 1, rows_of([1, 2, 3], 0), agent_id=0)
    store.append("w", first, rows_of(serials, 0), agent_id=0)
    assert stored(store) == [1, 2, 3]
    assert store.committed("w", agent_id=0) == 3
    assert store.traffic.inserted == {0: 3}


def test_a_sequence_gap_is_refused_and_names_the_expected_number(store):
    store.append("w", 1, rows_of([1, 2], 0), agent_id=0)
    with refuses(SequenceGapError, "'w'", "row 4", "resend from 3"):
        store.append("w", 4, rows_of([4], 0), agent_id=0)
    assert stored(store) == [1, 2]


def test_rows_are_numbered_from_one(store):
    with pytest.raises(MalformedError, match="row 0") as refusal:
        store.append("w", 0, rows_of([0], 0), agent_id=0)
    assert_one_sentence(refusal.value)
    assert store.committed("w", agent_id=0) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", ["observation", "action", "next_observation", "reward", "bootstrap"])
def test_a_row_that_is_not_finite_is_refused_by_itself_and_its_number_is_used_up(store, bad, column):
    rows = rows_of([1, 2, 3], 0)
    rows[1, SCHEMA.columns[column]] = bad
    assert store.append("w", 1, rows, agent_id=0) == 1
    assert stored(store) == [1, 3]
    assert store.committed("w", agent_id=0) == 3
    assert store.append("w", 1, rows, agent_id=0) == 0  # a resend is not counted twice
    assert store.traffic.refused == {(0, "not_finite"): 1}
    assert store.traffic.inserted == {0: 2}


def test_integer_columns_whose_bits_are_a_nan_are_no_reason_to_refuse(store):
    rows = rows_of([1], 0)
    rows[:, SCHEMA.columns["policy_version"].start].view(np.uint32)[:] = 0x7FC0_0000
    assert store.append("w", 1, rows, agent_id=0) == 0
    assert len(store.ring) == 1


def test_rows_of_another_agent_are_refused_and_nothing_is_stored(store):
    rows = rows_of([1, 2, 3], [0, 1, 0])
    rows[0, 0] = np.nan
    with refuses(MalformedError, "'w'", "0"):
        store.append("w", 1, rows, agent_id=0)
    assert len(store.ring) == 0
    assert store.committed("w", agent_id=0) == 0
    assert not store.traffic.inserted
    assert not store.traffic.refused


@pytest.mark.parametrize(
    ("rows", "agent_id"), [(rows_of([1, 2], 5_000), 5_000), (rows_of([1, 2], 0, WIDER), 0)]
)
def test_rows_that_the_ring_refuses_leave_no_trace(store, rows, agent_id):
    rows[0, 0] = np.nan
    with pytest.raises(MalformedError):
        store.append("w", 1, rows, agent_id=agent_id)
    assert store.committed("w", agent_id=agent_id) == 0
    assert not store.traffic.inserted
    assert not store.traffic.refused


def test_an_agent_that_cannot_be_brings_no_writer(store):
    for agent_id in (-1, 1024):
        with refuses(MalformedError, str(agent_id), "0..1023"):
            store.append("w", 1, rows_of([], 0), agent_id=agent_id)
    store.append("w", 1, rows_of([1], 1023), agent_id=1023)
    assert stored(store) == [1]


def test_the_name_of_a_writer_has_a_limit(store):
    with refuses(MalformedError, "512 bytes"):
        store.append("ä" * 257, 1, rows_of([1], 0), agent_id=0)
    store.append("ä" * 256, 1, rows_of([1], 0), agent_id=0)
    assert store.committed("ä" * 256, agent_id=0) == 1


def test_a_full_table_takes_no_new_writer_but_serves_the_old_ones(store):
    store.append("a", 1, rows_of([1], 0), agent_id=0)
    store.append("b", 1, rows_of([2], 0), agent_id=0)
    with refuses(TooManyWritersError, "'c'", "2 writers"):
        store.append("c", 1, rows_of([3], 0), agent_id=0)
    store.append("b", 2, rows_of([4], 0), agent_id=0)
    assert stored(store) == [1, 2, 4]


def test_two_agents_may_have_a_writer_of_the_same_name_and_neither_loses_a_row(store):
    assert store.append("actor", 1, rows_of([1, 2], 0), agent_id=0) == 0
    assert store.append("actor", 1, rows_of([101], 1), agent_id=1) == 0
    assert stored(store) == [1, 2, 101]
    assert [store.committed("actor", agent_id=agent_id) for agent_id in (0, 1)] == [2, 1]
    with pytest.raises(TooManyWritersError):
        store.append("actor", 1, rows_of([201], 2), agent_id=2)


def test_evictions_are_counted_by_the_agent_whose_transitions_left(store):
    store.append("a", 1, rows_of(range(1, 7), 0), agent_id=0)
    store.append("b", 1, rows_of(range(101, 106), 1), agent_id=1)
    assert stored(store) == [4, 5, 6, *range(101, 106)]
    assert store.ring.evicted_by_agent == {0: 3}


def test_sampling_counts_who_drew_whose_transitions(store):
    store.append("a", 1, rows_of([1], 0), agent_id=0)
    store.append("b", 1, rows_of([101], 7), agent_id=7)
    drawn = Source(store, 7).draw(100, np.random.default_rng(0))[0]
    own = np.count_nonzero(SCHEMA.agent_ids(drawn) == 7)
    assert store.traffic.sampled == {(7, 0): 100 - own, (7, 7): own}
    assert store.traffic.sampled_total == 100
    assert store.schema is SCHEMA
