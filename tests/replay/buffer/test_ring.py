"""RingBuffer, in memory and on file: first in first out, sampled uniformly, sized in transitions or bytes."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from contracts.sentences import assert_one_sentence, refuses
from scipy import stats
from store_cases import BACKENDS, SCHEMA, WIDER, ring_on, rows_of, serials_of

from dase_grpc.errors import CapacityError, MalformedError
from dase_grpc.replay.buffer.ring import RingBuffer, require_reservable
from dase_grpc.schema import LEAST_ROW_BYTES, TransitionSchema


@pytest.fixture(params=list(BACKENDS))
def new_ring(request) -> Callable[[int], RingBuffer]:
    return lambda capacity: ring_on(request.param, capacity)


@pytest.fixture
def full_ring(new_ring) -> Callable[..., RingBuffer]:
    def make(*, capacity: int, appended: int) -> RingBuffer:
        ring = new_ring(capacity)
        ring.append(rows_of(range(appended), 0))
        return ring

    return make


def test_a_new_ring_is_empty_and_knows_its_capacity(new_ring):
    ring = new_ring(5)
    assert (len(ring), ring.capacity, ring.size_by_agent, ring.evicted_by_agent) == (0, 5, {}, {})
    assert ring.ordered().shape == (0, SCHEMA.width)


def test_a_ring_of_one_transition_holds_the_latest(full_ring):
    ring = full_ring(capacity=1, appended=7)
    assert serials_of(ring.ordered()) == [6]
    assert serials_of(ring.sample(3, np.random.default_rng(0))) == [6, 6, 6]


@pytest.mark.parametrize("appended", [0, 2, 4, 7])
def test_slices_are_the_transitions_in_order_without_a_copy(full_ring, appended):
    ring = full_ring(capacity=4, appended=appended)
    older, newer = ring.slices()
    assert [*serials_of(older), *serials_of(newer)] == serials_of(ring.ordered())
    assert older.base is newer.base is not None


def test_what_is_appended_and_what_is_handed_out_are_copies(new_ring):
    ring = new_ring(4)
    rows = rows_of(range(4), 0)
    ring.append(rows)
    rows[:] = -1
    ring.ordered()[:] = -2
    drawn = ring.sample(8, np.random.default_rng(0))
    kept = drawn.copy()
    ring.sample(8, np.random.default_rng(1))[:] = -3
    assert np.array_equal(drawn, kept)
    assert serials_of(ring.ordered()) == [0, 1, 2, 3]


def test_rows_that_are_not_contiguous_are_stored_all_the_same(new_ring):
    ring = new_ring(4)
    ring.append(rows_of(range(6), 0)[::2])
    assert serials_of(ring.ordered()) == [0, 2, 4]


def test_every_bit_of_a_row_is_kept(new_ring):
    row = SCHEMA.empty(1)
    row.view(np.uint32)[0, :-2] = 0x7FC0_1234  # a NaN with a payload
    row.view(np.uint32)[0, -2:] = (1023, 0xFFFF_FFFF)
    ring = new_ring(2)
    ring.append(row)
    assert ring.ordered().tobytes() == row.tobytes()
    assert ring.sample(1, np.random.default_rng(0)).tobytes() == row.tobytes()


@pytest.mark.parametrize("appended", [30, 50, 73])
def test_sampling_is_uniform_over_all_transitions_present(full_ring, appended):
    ring = full_ring(capacity=50, appended=appended)
    rng = np.random.default_rng(7)
    drawn = np.concatenate([serials_of(ring.sample(256, rng)) for _ in range(100)])
    present = serials_of(ring.ordered())
    counts = [np.count_nonzero(drawn == serial) for serial in present]
    assert sum(counts) == len(drawn)  # nothing but what is stored
    assert stats.chisquare(counts).pvalue > 0.01


def test_draws_within_a_batch_are_independent(full_ring):
    ring = full_ring(capacity=8, appended=8)
    rng = np.random.default_rng(3)
    pairs = np.array([serials_of(ring.sample(2, rng)) for _ in range(6_400)])
    counts = np.bincount(pairs[:, 0] * 8 + pairs[:, 1], minlength=64)
    assert stats.chisquare(counts).pvalue > 0.01


def test_an_empty_ring_cannot_be_sampled(new_ring):
    with pytest.raises(IndexError, match="empty"):
        new_ring(4).sample(1, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("capacity", "transitions"),
    [
        (36, 36),
        ("36", 36),
        ("36b", 1),
        ("71 B", 1),
        ("1kb", 27),
        ("1KiB", 28),
        ("0.5 MiB", 14_563),
        (" 2mb ", 55_555),
        ("0.001GB", 27_777),
    ],
)
def test_a_capacity_is_a_number_of_transitions_or_a_size_in_bytes(capacity, transitions):
    assert SCHEMA.row_bytes == 36
    assert RingBuffer(SCHEMA, capacity).capacity == transitions


@pytest.mark.parametrize(
    "capacity", [10**14, 10**18, 10**20, 2**63, "1000000GiB", "999999999999TiB", "9" * 30, "9" * 29 + "b"]
)
def test_a_capacity_beyond_this_machine_is_refused_with_the_memory_it_would_need(capacity):
    with pytest.raises(CapacityError) as refusal:
        RingBuffer(SCHEMA, capacity)
    assert_one_sentence(refusal.value, "replay.capacity", str(capacity), "GiB", "lower it")
    assert re.search(r"which has [\d,.]+ GiB of memory", str(refusal.value))
    with pytest.raises(CapacityError, match=r"which has [\d,.]+ GiB of memory"):
        require_reservable(capacity, row_bytes=LEAST_ROW_BYTES)


def test_no_transition_is_smaller_than_the_smallest():
    smallest = TransitionSchema("any", 1, 1, (-1.0,), (1.0,))
    assert smallest.row_bytes == LEAST_ROW_BYTES
    require_reservable(10, row_bytes=LEAST_ROW_BYTES)


@pytest.mark.parametrize(
    "capacity",
    [0, -1, "0", "0b", "35b", "", "many", "5 parsecs", "1.5", 1.5, "1e6", "--5", "²", "٣", "9" * 400 + "b"],
)
def test_a_capacity_that_is_no_size_or_holds_nothing_is_refused(capacity):
    with refuses(CapacityError, "replay.capacity"):
        RingBuffer(SCHEMA, capacity)


@pytest.mark.parametrize(
    "rows",
    [
        rows_of([5], 0)[0],
        rows_of([5], 0)[np.newaxis],
        rows_of([5], 0, WIDER),
        rows_of([5], 0)[:, :-1],
        rows_of([5], 0).astype(np.float64),
        rows_of([5], 0).view(np.int32),
        rows_of([5], 0).astype(">f4"),
    ],
    ids=["one row", "a batch of batches", "too wide", "too narrow", "float64", "int32", "big-endian"],
)
def test_rows_of_another_shape_or_type_are_refused_and_nothing_is_stored(full_ring, rows):
    ring = full_ring(capacity=4, appended=3)
    with refuses(MalformedError, str(rows.dtype), "float32"):
        ring.append(rows)
    assert serials_of(ring.ordered()) == [0, 1, 2]


@pytest.mark.parametrize("agents", [[0, -1], [1024, 0], [0, 2**31 - 1], [0, -(2**31)]])
def test_rows_of_an_impossible_agent_are_refused_and_nothing_is_stored(full_ring, agents):
    ring = full_ring(capacity=4, appended=3)
    with refuses(MalformedError, str(min(agents)), str(max(agents)), "0..1023"):
        ring.append(rows_of([5, 6], agents))
    assert serials_of(ring.ordered()) == [0, 1, 2]
    assert (ring.size_by_agent, ring.evicted_by_agent) == ({0: 3}, {})


def test_the_first_and_the_last_agent_id_are_accepted(new_ring):
    ring = new_ring(4)
    ring.append(rows_of([1, 2, 3], [0, 1023, 1023]))
    assert ring.size_by_agent == {0: 1, 1023: 2}


@pytest.mark.parametrize("appended", [0, 3, 5, 6, 9, 10, 23])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_restored_ring_holds_draws_and_evicts_as_the_one_it_stands_for(full_ring, appended, pieces):
    ring = full_ring(capacity=5, appended=appended)
    restored = RingBuffer(SCHEMA, 5)
    restored.take_over(np.array_split(ring.ordered(), pieces), first=appended - len(ring))
    for number in range(7):
        assert (restored.total, len(restored)) == (ring.total, len(ring))
        assert restored.size_by_agent == ring.size_by_agent
        assert serials_of(restored.ordered()) == serials_of(ring.ordered())
        if len(ring):
            drawn = [serials_of(each.sample(20, np.random.default_rng(number))) for each in (ring, restored)]
            assert drawn[0] == drawn[1]
        for each in (ring, restored):
            each.append(rows_of([100 + number], 1))


@pytest.mark.parametrize(("count", "first"), [(3, 1), (4, 5), (6, 0), (6, 7)])
def test_rows_that_no_ring_of_this_capacity_could_hold_are_refused(count, first):
    with refuses(MalformedError, "a ring of 5 holds"):
        RingBuffer(SCHEMA, 5).take_over([rows_of(range(count), 0)], first=first)


def test_rows_of_another_width_are_not_restored():
    with pytest.raises(MalformedError, match="float32 transitions"):
        RingBuffer(SCHEMA, 5).take_over([rows_of([1], 0, WIDER)], first=0)
