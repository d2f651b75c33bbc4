"""RingBuffer against the plainest thing that does the same: a bounded deque of (serial, agent)."""

from collections import Counter, deque
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import BACKENDS, SCHEMA, ring_on, rows_of, serials_of


@st.composite
def appends(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A capacity, and for each append the agents of its rows; sizes lie around the capacity's edges."""
    capacity = draw(st.integers(1, 9))
    edges = {0, 1, capacity - 1, capacity, capacity + 1, 2 * capacity, 3 * capacity + 1}
    sizes = st.sampled_from(sorted(edges)) | st.integers(0, 2 * capacity)
    agents = sizes.flatmap(lambda size: st.lists(st.integers(0, 3), min_size=size, max_size=size))
    return capacity, draw(st.lists(agents, max_size=10))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100)
@given(case=appends())
def test_a_ring_is_a_bounded_queue_whatever_the_sizes_of_its_appends(backend, case):
    capacity, chunks = case
    ring, model, brought = ring_on(backend, capacity), deque(maxlen=capacity), Counter()
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


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=50)
@given(case=appends())
def test_how_rows_are_cut_into_appends_does_not_matter(backend, case):
    capacity, chunks = case
    agents = [agent for chunk in chunks for agent in chunk]
    rows = rows_of(range(len(agents)), agents)
    at_once, by_chunks, one_by_one = (ring_on(backend, capacity) for _ in range(3))
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


@settings(max_examples=100)
@given(appends())
@pytest.mark.slow
def test_the_same_generator_draws_the_same_rows_wherever_they_lie(case):
    capacity, chunks = case
    rings = [ring_on(backend, capacity) for backend in BACKENDS]
    serial = count()
    for agents in chunks:
        rows = rows_of([next(serial) for _ in agents], agents)
        drawn = set()
        for ring in rings:
            ring.append(rows)
            if len(ring):
                drawn.add(ring.sample(32, np.random.default_rng(capacity)).tobytes())
        assert len(drawn) <= 1
