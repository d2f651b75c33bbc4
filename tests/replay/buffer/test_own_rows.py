"""Sampling from what one agent collected: only its rows, each as likely as any other."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from store_cases import SCHEMA, rows_of, serials_of

from dase_grpc.replay.buffer.ring import RARE, RingBuffer
from dase_grpc.replay.buffer.sampling import Sampling, Source
from dase_grpc.replay.buffer.store import ReplayStore


def ring_of(agents, capacity: int) -> RingBuffer:
    """A ring to which one row of each of these agents was appended, numbered from 0."""
    ring = RingBuffer(SCHEMA, capacity)
    ring.append(rows_of(range(len(agents)), agents))
    return ring


def present_of(ring: RingBuffer, agent_id: int) -> list[int]:
    rows = ring.ordered()
    return serials_of(rows[SCHEMA.agent_ids(rows) == agent_id])


@settings(max_examples=200)
@given(
    capacity=st.integers(1, 40),
    agents=st.lists(st.integers(0, 2), max_size=100),
    count=st.integers(0, 30),
    seed=st.integers(0, 9),
)
def test_only_rows_of_the_agent_that_are_present_are_drawn(capacity, agents, count, seed):
    ring = ring_of(agents, capacity)
    last = deque(enumerate(agents), maxlen=capacity)
    for agent_id in range(4):
        own = {serial for serial, agent in last if agent == agent_id}
        assert ring.count_of(agent_id) == len(own)
        if not own:
            with pytest.raises(IndexError, match=f"no transition of agent {agent_id}"):
                ring.sample_of(agent_id, count, np.random.default_rng(seed))
            continue
        rows = ring.sample_of(agent_id, count, np.random.default_rng(seed))
        assert rows.shape == (count, SCHEMA.width)
        assert set(serials_of(rows)) <= own
        assert set(SCHEMA.agent_ids(rows).tolist()) <= {agent_id}
        again = ring.sample_of(agent_id, count, np.random.default_rng(seed))
        assert again.tobytes() == rows.tobytes()


@pytest.mark.parametrize("spare", [1, 7, 100])
@pytest.mark.parametrize("agents", [[0, 1] * 9, [0, 0, 1] * 30, [1, *[0] * (2 * RARE)]])
def test_the_same_own_rows_are_drawn_however_many_slots_the_ring_has(spare, agents):
    capacity = 4 * RARE if len(agents) > 2 * RARE else 20
    plain = RingBuffer(SCHEMA, capacity)
    spacious = RingBuffer(SCHEMA, capacity, slots=SCHEMA.empty(capacity + spare))
    for serial, agent in enumerate(agents):
        for ring in (plain, spacious):
            ring.append(rows_of([serial], [agent]))
        for agent_id in {0, 1} & set(agents[max(0, serial + 1 - capacity) : serial + 1]):
            drawn = [ring.sample_of(agent_id, 9, np.random.default_rng(serial)) for ring in (plain, spacious)]
            assert drawn[0].tobytes() == drawn[1].tobytes()


RARE_OWN = [1, 1, *[0] * (3 * RARE)]
CASES = {
    "half of the rows": ([0, 1] * 20, 40),
    "after the ring has wrapped around": ([0, 0, 1] * 30, 50),
    "in one block": ([1] * 12 + [0] * 30, 42),
    "all of the rows": ([1] * 30, 40),
    "hardly any of the rows": (RARE_OWN, len(RARE_OWN)),
}


@pytest.mark.parametrize("case", CASES)
def test_each_row_of_the_agent_is_as_likely_as_any_other(case):
    agents, capacity = CASES[case]
    ring, rng = ring_of(agents, capacity), np.random.default_rng(11)
    drawn = np.concatenate([serials_of(ring.sample_of(1, 100, rng)) for _ in range(100)])
    own = present_of(ring, 1)
    counts = [np.count_nonzero(drawn == serial) for serial in own]
    assert sum(counts) == len(drawn) == 10_000
    assert stats.chisquare(counts).pvalue > 0.01


def test_draws_within_a_batch_are_independent():
    ring, rng = ring_of([0, 1, 1, 0, 1, 0, 1], 7), np.random.default_rng(4)
    place = {serial: index for index, serial in enumerate(present_of(ring, 1))}
    pairs = [serials_of(ring.sample_of(1, 2, rng)) for _ in range(3_200)]
    counts = np.bincount([4 * place[first] + place[second] for first, second in pairs], minlength=16)
    assert stats.chisquare(counts).pvalue > 0.01


def test_an_agent_whose_rows_were_all_evicted_has_none_to_draw_from():
    ring = ring_of([1] * 5 + [0] * 10, 10)
    assert ring.count_of(1) == 0
    with pytest.raises(IndexError):
        ring.sample_of(1, 1, np.random.default_rng(0))


def test_a_ring_that_was_never_filled_is_not_read_beyond_its_rows():
    ring = ring_of([1, 0], 1_000)  # fresh memory beyond them looks like rows of agent 0
    assert set(serials_of(ring.sample_of(0, 200, np.random.default_rng(0)))) == {1}


def test_one_row_among_a_million_is_found_at_once():
    ring = ring_of([0] * 200_000 + [1], 200_001)
    assert serials_of(ring.sample_of(1, 4, np.random.default_rng(0))) == [200_000] * 4


def store_of(agents) -> ReplayStore:
    store = ReplayStore(RingBuffer(SCHEMA, 100))
    for serial, agent in enumerate(agents):
        first = store.committed("w", agent_id=agent) + 1
        store.append("w", first, rows_of([serial], agent), agent_id=agent)
    return store


def test_what_an_agent_draws_of_its_own_is_counted_as_such():
    store = store_of([0, 1, 0, 0])
    rows = Source(store, 1, Sampling(own_rows_only=True)).draw(32, np.random.default_rng(0))[0]
    assert set(serials_of(rows)) == {1}
    assert store.traffic.sampled == {(1, 1): 32}
    assert store.traffic.sampled_total == 32


@pytest.mark.parametrize(
    ("agents", "min_size", "of_all", "of_own"),
    [
        ([], 1, "1 more transitions (0 of 1)", "1 more transitions (0 of 1)"),
        ([0, 0], 5, "3 more transitions (2 of 5)", "3 more transitions (2 of 5)"),
        ([0, 0], 2, None, "a transition of agent 1 (2 of others are present)"),
        ([0, 1], 2, None, None),
    ],
)
def test_a_batch_waits_for_min_size_and_for_a_row_to_draw_from(agents, min_size, of_all, of_own):
    store = store_of(agents)
    assert Source(store, 1).shortage(min_size) == of_all
    assert Source(store, 1, Sampling(own_rows_only=True)).shortage(min_size) == of_own
