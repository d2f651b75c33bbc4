"""Priorities and own shares over a ring: against plain arrays, exact in what is likely, by chi-square."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs_on_disk import Runs
from scipy import stats
from store_cases import SCHEMA, ring_on, rows_of, serials_of

from dase_grpc.replay.buffer.priorities import HEAVIEST, Priorities, Prioritisation, SumTree
from dase_grpc.replay.buffer.ring import RingBuffer
from dase_grpc.replay.buffer.sampling import Sampling, Source
from dase_grpc.replay.buffer.shares import OTHERS, OWN, OwnShare


@pytest.fixture(autouse=True, scope="module")
def little_room():
    """Has the lists of slots make room again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dase_grpc.replay.buffer.shares._FIRST_ROOM", 2)
        yield


PLAIN = Prioritisation(alpha=0.6, epsilon=1e-2, uniform=0.0)
MIXED = Prioritisation(alpha=1.0, epsilon=1e-6, uniform=0.25)


def filled(capacity: int, *owners: int, backend: str = "memory") -> RingBuffer:
    """A ring that was given one transition of each of these agents, in order, numbered from 0."""
    ring = ring_on(backend, capacity)
    for number, owner in enumerate(owners):
        ring.append(rows_of([number], owner))
    return ring


class Model:
    """Priorities as a dictionary from a transition's number to its mass."""

    def __init__(self, ring: RingBuffer, how: Prioritisation) -> None:
        self.ring, self.how = ring, how
        self.masses: dict[int, float] = {}
        self.largest = self.mass(1.0)

    def mass(self, error: float) -> float:
        return float(np.float32((abs(np.float32(error)) + self.how.epsilon) ** self.how.alpha))

    def follow(self) -> None:
        present = range(self.ring.total - len(self.ring), self.ring.total)
        self.masses = {number: self.masses.get(number, self.largest) for number in present}

    def put(self, numbers, errors) -> None:
        self.follow()
        for number, error in zip(numbers, errors, strict=True):
            if number in self.masses and math.isfinite(error):
                self.masses[number] = self.mass(error)
                self.largest = max(self.largest, self.mass(error))

    def chances(self, numbers) -> dict[int, float]:
        """How likely each of these is among them."""
        total = math.fsum(self.masses[number] for number in numbers)
        uniform = self.how.uniform
        return {
            number: (1 - uniform) * self.masses[number] / total + uniform / len(numbers) for number in numbers
        }


def sides_of(ring: RingBuffer, agent: int) -> tuple[list[int], list[int]]:
    """The numbers present that are the agent's own, and the others."""
    ids = ring.schema.agent_ids(ring.ordered())
    numbers = np.arange(ring.total - len(ring), ring.total)
    return numbers[ids == agent].tolist(), numbers[ids != agent].tolist()


STEP = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 9), st.integers(0, 2)),
    st.tuples(st.just("put"), st.integers(-2, 40), st.floats(width=32)),
    st.tuples(st.just("draw"), st.integers(1, 4), st.integers(1, 9)),
)


@pytest.mark.slow
@pytest.mark.parametrize("share", [None, 0.3])
@given(steps=st.lists(STEP, max_size=40), capacity=st.integers(1, 23), uniform=st.sampled_from([0.0, 0.25]))
def test_whatever_happens_priorities_are_those_of_a_dictionary(steps, capacity, uniform, share):
    ring, how = filled(capacity), Prioritisation(alpha=0.7, epsilon=1e-3, uniform=uniform)
    model, rng = Model(ring, how), np.random.default_rng(3)
    priorities = Priorities(ring, 1, how, own_share=share)
    for kind, first, second in steps:
        if kind == "append":
            ring.append(rows_of(range(ring.total, ring.total + first), second))
            priorities.sides()
            model.follow()
        elif kind == "put":
            numbers, errors = np.array([first, first + 1]), np.array([second, 0.5], np.float32)
            priorities.put(numbers, errors)
            model.put(numbers.tolist(), errors.tolist())
        elif len(ring):
            drawn = priorities.draw(first, second, rng)
            assert serials_of(ring.rows_at(drawn.slots)) == drawn.numbers.tolist()
            sides = [list(model.masses)] if share is None else sides_of(ring, 1)
            chances = {number: chance for side in sides for number, chance in model.chances(side).items()}
            assert drawn.probabilities == pytest.approx(
                [chances[n] for n in drawn.numbers.tolist()], rel=1e-5
            )
            assert drawn.present.tolist() == [
                len(side) for number in drawn.numbers.tolist() for side in sides if number in side
            ]
    masses, largest = priorities.state()
    assert masses == pytest.approx(list(model.masses.values()), rel=1e-6)
    assert largest == pytest.approx(model.largest, rel=1e-6)


def worn(ring: RingBuffer, priorities: Priorities, *, steps: int) -> None:
    """Has random rows stored and random priorities told, many times."""
    rng = np.random.default_rng(7)
    for _ in range(steps):
        count = int(rng.integers(0, 4))
        ring.append(rows_of(range(ring.total, ring.total + count), int(rng.choice(3, p=[0.2, 0.6, 0.2]))))
        numbers = rng.integers(ring.total - 80, ring.total + 5, size=16)
        priorities.put(numbers, rng.exponential(size=16).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("how", [PLAIN, MIXED])
@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize("steps", [0, 10_000])
def test_transitions_are_drawn_as_often_as_their_masses_say(how, share, steps):
    ring = filled(60, *[0, 1, 1, 2, 1, 1] * 12)
    priorities = Priorities(ring, 0, how, own_share=share)
    worn(ring, priorities, steps=steps)
    sides = priorities.sides()
    drawn = priorities.draw(400, 50, np.random.default_rng(1))
    masses = dict(zip(range(ring.total - 60, ring.total), priorities.state()[0].tolist(), strict=True))
    for side, numbers in enumerate([list(masses)] if share is None else sides_of(ring, 0)):
        chances = [
            (1 - how.uniform) * masses[n] / sides[side].mass + how.uniform / len(numbers) for n in numbers
        ]
        seen = [np.count_nonzero(drawn.numbers == number) for number in numbers]
        assert stats.chisquare(seen, np.array(chances) / sum(chances) * sum(seen)).pvalue > 1e-3
        if share is not None:
            assert sum(seen) == 400 * 25


@pytest.mark.parametrize("share", [0.5, 0.13])
def test_a_share_of_each_batch_is_own_on_average_and_uniform_on_both_sides(share):
    ring = filled(300, *[1] * 40, *[0] * 7, *[1, 2] * 100, *[2] * 80)
    drawn = OwnShare(ring, 0, share).draw(4_000, 25, np.random.default_rng(5)).reshape(4_000, 25)
    own = (ring.ids_at(drawn.ravel()) == 0).reshape(drawn.shape)
    counts = own.sum(axis=1)
    assert set(counts.tolist()) == {math.floor(share * 25), math.ceil(share * 25)}
    assert counts.mean() == pytest.approx(share * 25, abs=4 * 0.5 / math.sqrt(4_000))
    assert (np.diff(own.astype(int), axis=1) <= 0).all()  # its own ones come first in each batch
    for side in (drawn[own], drawn[~own]):
        assert stats.chisquare(np.unique(side, return_counts=True)[1]).pvalue > 1e-3


@pytest.mark.parametrize(("owners", "filled_in"), [([0] * 5, 50), ([1] * 5, 50)])
def test_where_one_side_is_empty_the_other_fills_in_and_is_counted(owners, filled_in):
    ring, rng = filled(9, *owners), np.random.default_rng(0)
    plain, weighed = OwnShare(ring, 0, 0.5), Priorities(ring, 0, PLAIN, own_share=0.5)
    assert len(set(plain.draw(10, 10, rng).tolist())) == 5
    assert len(set(weighed.draw(10, 10, rng).slots.tolist())) == 5
    assert plain.filled_in == weighed.filled_in == filled_in


def test_nothing_is_drawn_from_an_empty_ring():
    ring, rng = filled(9), np.random.default_rng(0)
    with pytest.raises(IndexError, match="empty"):
        OwnShare(ring, 0, 0.5).draw(1, 2, rng)
    with pytest.raises(IndexError, match="empty"):
        Priorities(ring, 0, PLAIN).draw(1, 2, rng)


def test_a_transition_that_comes_is_as_likely_as_the_likeliest_so_far():
    ring = filled(8, 0, 1, 1)
    priorities = Priorities(ring, 0, PLAIN)
    priorities.put(np.array([0, 1, 2]), np.array([0.1, 9.0, 0.3], np.float32))
    priorities.put(np.array([1]), np.array([0.2], np.float32))
    ring.append(rows_of([3], 2))
    masses, largest = priorities.state()
    assert masses[3] == np.float32(largest) == PLAIN.masses(np.array([9.0], np.float32))[0]


def test_priorities_told_in_vain_are_counted_by_reason():
    ring = filled(4, *[0] * 6)
    priorities = Priorities(ring, 0, PLAIN)
    before = priorities.state()[0].tolist()
    priorities.put(np.array([1, 6, 3, 4]), np.array([1, 1, np.nan, -np.inf], np.float32))
    assert priorities.ignored == {"evicted": 2, "not_finite": 2}
    assert priorities.state()[0].tolist() == before


def test_the_largest_errors_and_no_error_leave_every_transition_with_a_chance():
    ring = filled(4, *[0] * 4)
    priorities = Priorities(ring, 0, Prioritisation(alpha=1.0, epsilon=0.0, uniform=0.0))
    priorities.put(np.arange(4), np.array([0, 3e38, -3e38, 1], np.float32))
    masses, _ = priorities.state()
    assert (masses > 0).all()
    assert masses.max() == np.float32(HEAVIEST)
    assert set(priorities.draw(1, 64, np.random.default_rng(0)).slots.tolist()) == {1, 2}


@pytest.mark.parametrize("share", [None, 0.5])
def test_what_goes_on_from_a_state_draws_the_same(share):
    ring = filled(60, *[0, 1, 1, 2, 1, 1] * 12)
    first = Priorities(ring, 0, MIXED, own_share=share)
    worn(ring, first, steps=50)
    second = Priorities(ring, 0, MIXED, own_share=share)
    second.restore(*first.state())
    drawn = [each.draw(3, 8, np.random.default_rng(4)) for each in (first, second)]
    for ours, theirs in zip(*drawn, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    with pytest.raises(ValueError, match="61 priorities for 60"):
        second.restore(np.ones(61, np.float32), 1.0)


def test_an_agent_draws_from_both_sides_apart():
    ring = filled(60, *[0, 1, 1, 2, 1, 1] * 10)
    priorities, rng = Priorities(ring, 0, PLAIN, own_share=0.5), np.random.default_rng(0)
    assert [side.present for side in priorities.sides()] == [10, 50]
    assert set(ring.ids_at(priorities.draw_of(OWN, 40, rng).slots).tolist()) == {0}
    assert set(ring.ids_at(priorities.draw_of(OTHERS, 80, rng).slots).tolist()) == {1, 2}


@pytest.mark.parametrize("count", [1, 15, 16, 17, 4096, 70_000, 1_100_000])
def test_a_tree_of_any_size_finds_the_slot_in_which_a_share_of_the_sum_lies(count):
    rng = np.random.default_rng(count)
    tree, masses = SumTree(count), rng.integers(0, 3, size=count).astype(np.float32)
    masses[-1] = 1
    tree.put(rng.permutation(count), np.zeros(count, np.float32))
    tree.put(np.arange(count), masses)
    assert tree.total == masses.sum(dtype=np.float64)
    edges = np.cumsum(masses, dtype=np.float64)
    sought = rng.integers(0, int(edges[-1]), size=500) + 0.5  # masses are whole numbers: never at an edge
    assert tree.draw(sought / edges[-1]).tolist() == np.searchsorted(edges, sought, side="right").tolist()
    assert tree.draw(np.array([0.0, 1 - 2**-53])).tolist() == [int(np.flatnonzero(masses)[0]), count - 1]


def test_a_range_of_masses_is_as_its_masses_one_by_one():
    ranged, single = SumTree(100_000), SumTree(100_000)
    for tree in (ranged, single):
        tree.put(np.arange(100_000), np.linspace(0, 1, 100_000, dtype=np.float32))
    ranged.put_range(12_345, 67_891, 0.25)
    single.put(np.arange(12_345, 67_891), np.full(67_891 - 12_345, 0.25, np.float32))
    chances = np.random.default_rng(0).random(1_000)
    assert ranged.total == single.total
    assert ranged.draw(chances).tolist() == single.draw(chances).tolist()


@pytest.mark.parametrize("share", [None, 0.5])
def test_after_a_kill_on_disk_every_row_is_new_again_and_the_trees_hold_what_the_rows_say(tmp_path, share):
    runs, sampling = Runs(tmp_path), Sampling(own_share=share, prioritisation=PLAIN)
    run = runs.start(capacity=40)
    run.join("a", wanted=0, run_id="", schema=SCHEMA, now=0.0)
    for agent in (0, 1):
        run.store.append("w", 1, rows_of(range(30), agent), agent_id=agent)
    source = Source(run.store, 0, sampling)
    source.priorities.put(np.arange(20, 60), np.full(40, 9.0, np.float32))
    runs.kill(run)
    again = runs.start(capacity=40)
    source = Source(again.store, 0, sampling)
    masses, largest = source.priorities.state()
    assert masses.tolist() == [np.float32(largest)] * 40 == [PLAIN.masses(np.ones(1, np.float32))[0]] * 40
    own = again.store.ring.count_of(0)
    assert [side.present for side in source.priorities.sides()] == (
        [40] if share is None else [own, 40 - own]
    )
    rows, drawn = source.draw(64, np.random.default_rng(0))
    assert (drawn.numbers >= 20).all()
    assert rows.tobytes() == again.store.ring.rows_at(drawn.slots).tobytes()
    runs.kill(again)
