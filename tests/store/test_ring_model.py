"""RingBuffer against the plainest thing that does the same: a bounded deque of (serial, agent)."""

from collections import Counter, deque
from itertools import count

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import SCHEMA, rows_of, serials_of

from dase_grpc.store import RingBuffer


@st.composite
def appends(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A capacity, and for each append the agents of its rows; sizes lie around the capacity's edges."""
    capacity = draw(st.integers(1, 9))
    edges = {0, 1, capacity - 1, capacity, capacity + 1, 2 * capacity, 3 * capacity + 1}
    sizes = st.sampled_from(sorted(edges)) | st.integers(0, 2 * capacity)
    agents = sizes.flatmap(lambda size: st.lists(st.integers(0, 3), min_size=size, max_size=size))
    return capacity, draw(st.lists(agents, max_size=10))


@settings(deadline=None, max_examples=200)
@given(appends())
def test_a_ring_is_a_bounded_queue_whatever_the_sizes_of_its_appends(case):
    capacity, chunks = case
    ring, model, brought = RingBuffer(SCHEMA, capacity), deque(maxlen=capacity), Counter()
    serial, rng = count(), np.random.default_rng(0)
    for agents in chunks:
        serials = [next(serial) for _ in agents]
        ring.append(rows_of(serials, agents))
        model.extend(zip(serials, agents, strict=True))
        brought.update(agents)

        present = Counter(agent for _, agent in model)
        assert serials_of(ring.ordered()) == [number for number, _ in model]
        assert SCHEMA.agent_ids(ring.ordered()).tolist() == [agent for _, agent in model]
        assert len(ring) == len(model)
        assert ring.size_by_agent == dict(sorted(present.items()))
        assert ring.evicted_by_agent == dict(sorted((brought - present).items()))
        if model:
            assert set(serials_of(ring.sample(16, rng))) <= {number for number, _ in model}


@settings(deadline=None, max_examples=100)
@given(appends())
def test_how_rows_are_cut_into_appends_does_not_matter(case):
    capacity, chunks = case
    agents = [agent for chunk in chunks for agent in chunk]
    rows = rows_of(range(len(agents)), agents)
    at_once, by_chunks, one_by_one = (RingBuffer(SCHEMA, capacity) for _ in range(3))
    at_once.append(rows)
    start = 0
    for chunk in chunks:
        by_chunks.append(rows[start : start + len(chunk)])
        start += len(chunk)
    for row in rows:
        one_by_one.append(row[np.newaxis])

    for ring in (by_chunks, one_by_one):
        assert np.array_equal(ring.ordered().view(np.uint32), at_once.ordered().view(np.uint32))
        assert ring.size_by_agent == at_once.size_by_agent
        assert ring.evicted_by_agent == at_once.evicted_by_agent
