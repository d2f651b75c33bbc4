"""Priorities: one agent's over the shared buffer, and the batches that are drawn in proportion to them."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dase_grpc.replay.buffer.ring import RingBuffer
from dase_grpc.replay.buffer.shares import OTHERS, OWN, OwnIndex, Slots
from dase_grpc.schema import Array

Numbers = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float64]

FAN: Final = 16
"""Children of a node: one cache line of float32."""

TOP: Final = 4096
"""Nodes of the uppermost level, at most: a cumulative sum over them costs less than two levels more."""

_BELOW_ONE: Final = np.nextafter(1.0, 0.0)

FIRST_PRIORITY: Final = 1.0
"""The error of a transition of which none was told; only its ratio to others counts."""

HEAVIEST: Final = 1e30
"""The largest mass: a sum over every slot there can be is finite."""

Ignored = Literal["evicted", "restart", "not_finite"]


class SumTree:
    """float32 masses of `count` slots, all 0 at first; every node holds the sum of its `FAN` children.

    Takes 4.3 bytes a slot. A sum is made anew from the children whenever one of them changes, so it never
    drifts: what it holds is theirs, rounded to float32.
    """

    def __init__(self, count: int) -> None:
        sizes = [max(FAN, -(-count // FAN) * FAN)]
        while sizes[-1] > TOP:
            sizes.append(-(-(sizes[-1] // FAN) // FAN) * FAN)
        self._levels: list[Array] = [np.zeros(size, np.float32) for size in sizes]

    @property
    def leaves(self) -> Array:
        """The masses, at least `count` of them, a view; those beyond are 0."""
        return self._levels[0]

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._levels[-1].sum(dtype=np.float64))

    def put(self, slots: Slots, masses: Array) -> None:
        """Sets masses, finite and not negative; the last one of a slot counts. O(slots)."""
        self._levels[0][slots] = masses
        self._sum_up(slots // FAN)

    def put_range(self, first: int, end: int, masses: Array | float) -> None:
        """Sets the masses of slots first, ..., end - 1; one for all, or (end - first,)."""
        self._levels[0][first:end] = masses
        self._sum_up(np.arange(first // FAN, -(-end // FAN)))

    def draw(self, chances: Chances) -> Slots:
        """The slots in which these shares, (N,) in [0, 1), of the total lie; O(N). The total is above 0."""
        top = np.cumsum(self._levels[-1], dtype=np.float64)
        nodes, rest = _within(top, np.minimum(chances * top[-1], np.nextafter(top[-1], 0.0)))
        for level in self._levels[-2::-1]:
            sums = np.cumsum(level.reshape(-1, FAN)[nodes], axis=1, dtype=np.float64)
            sought = rest * sums[:, -1]
            child = np.count_nonzero(sums <= sought[:, np.newaxis], axis=1)
            rows = np.arange(len(nodes))
            below = np.where(child > 0, sums[rows, child - 1], 0.0)
            rest = np.minimum((sought - below) / (sums[rows, child] - below), _BELOW_ONE)
            nodes = nodes * FAN + child
        return nodes

    def _sum_up(self, nodes: Slots) -> None:
        """Makes the sums of these nodes of the level above the leaves anew, and all above them."""
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            above[nodes] = below.reshape(-1, FAN)[nodes].sum(axis=1)
            nodes = nodes // FAN


def _within(sums: Chances, sought: Chances) -> tuple[Slots, Chances]:
    """In which of the intervals that cumulative sums bound each number lies, and how far in, in [0, 1)."""
    index = np.searchsorted(sums, sought, side="right")
    below = np.where(index > 0, sums[index - 1], 0.0)
    return index, np.minimum((sought - below) / (sums[index] - below), _BELOW_ONE)


@dataclass(frozen=True)
class Prioritisation:
    """How TD errors become probabilities (Schaul et al. 2016, arXiv 1511.05952, section 3.3).

    A transition has the mass (|TD error| + epsilon) ** alpha and is drawn in proportion to it, but for a
    share `uniform` of all draws, which are uniform.
    """

    alpha: float
    epsilon: float
    uniform: float

    def masses(self, errors: Array) -> Array:
        """Masses of (B,) finite errors, positive and finite float32."""
        masses = (np.abs(errors.astype(np.float64)) + self.epsilon) ** self.alpha
        return np.clip(masses, 1 / HEAVIEST, HEAVIEST).astype(np.float32)


class Side(NamedTuple):
    """Transitions that are drawn from together: how many are present, and the sum of their masses."""

    present: int
    mass: float


class Drawn(NamedTuple):
    """Slots of the ring, (B,), and their transitions: the number of each, and how likely it was.

    A probability, float32, is that of one draw from the transition's side; `present` is how many these are.
    """

    slots: Slots
    numbers: Numbers
    probabilities: Array
    present: Numbers


@dataclass(frozen=True)
class DrawnBatch:
    """A batch that was drawn here by priorities: what a learner knows of it, and tells."""

    drawn: Drawn
    priorities: "Priorities"

    @property
    def likelihood(self) -> Array:
        """How many times as likely as by uniform draws from its side each was drawn, (B,) float32."""
        return self.drawn.probabilities * self.drawn.present.astype(np.float32)

    @property
    def largest(self) -> float:
        """The agent's largest mass so far."""
        return self.priorities.largest

    @property
    def mean(self) -> float:
        """The mean mass of the transitions present."""
        return self.priorities.mean()

    @property
    def ignored(self) -> int:
        """How many priorities the agent has told in vain."""
        return self.priorities.ignored.total()

    def tell(self, errors: Array) -> None:
        """Gives the TD errors of the transitions, (B,) float32, back."""
        self.priorities.put(self.drawn.numbers, errors)


class Priorities:
    """Priorities of one agent over a ring that all share; single-threaded.

    A transition that is new has the largest mass so far, so that it is drawn soon. Takes 4.3 bytes for each
    slot of the ring; with an own share, which draws the agent's own and all others' transitions apart, 8.6
    and up to 16 for each transition present.

    Args:
        own_share: how much of a batch is the agent's own; None to draw from all alike.

    Attributes:
        ignored: priorities that were told in vain, by reason.
        largest: the largest mass so far.
    """

    def __init__(
        self, ring: RingBuffer, agent_id: int, how: Prioritisation, *, own_share: float | None = None
    ) -> None:
        self.how = how
        self.own_share = own_share
        self.ignored: Counter[Ignored] = Counter()
        self.largest = float(how.masses(np.full(1, FIRST_PRIORITY, np.float32))[0])
        self._ring = ring
        self._agent_id = agent_id
        self._end = self._first = ring.total - len(ring)
        self._index = None if own_share is None else OwnIndex(ring, agent_id)
        self._trees = [SumTree(ring.slots) for _ in range(1 if own_share is None else 2)]

    @property
    def filled_in(self) -> int:
        """Transitions that were drawn from the other side because theirs was empty."""
        return 0 if self._index is None else self._index.filled_in

    def sides(self) -> list[Side]:
        """All transitions present, or the agent's own and all others': how many, and their masses' sum."""
        self._follow()
        return [Side(*each) for each in zip(self._counts(), (t.total for t in self._trees), strict=True)]

    def draw(
        self, batches: int, batch_size: int, rng: np.random.Generator, *, own: int | None = None
    ) -> Drawn:
        """So many batches, one after the other; with an own share see OwnIndex.deal.

        Raises:
            IndexError: the ring is empty.
        """
        self._follow()
        if self._index is None or self.own_share is None:
            if not len(self._ring):
                raise IndexError("an empty ring cannot be sampled")
            return self.draw_of(0, batches * batch_size, rng)
        first = self._index.deal(self.own_share, batches, batch_size, rng, own=own)
        count = int(np.count_nonzero(first))
        counts = {OWN: count, OTHERS: len(first) - count}
        parts = [self.draw_of(side, wanted, rng) for side, wanted in counts.items() if wanted]
        place = np.empty(len(first), np.int64)
        place[np.argsort(~first, kind="stable")] = np.arange(len(first))
        return Drawn(
            np.concatenate([part.slots for part in parts])[place],
            np.concatenate([part.numbers for part in parts])[place],
            np.concatenate([part.probabilities for part in parts])[place],
            np.concatenate([part.present for part in parts])[place],
        )

    def draw_of(self, side: int, count: int, rng: np.random.Generator) -> Drawn:
        """`count` transitions of one side of `sides`, which must have been called and not be empty."""
        tree, present = self._trees[side], self._counts()[side]
        uniform = np.flatnonzero(rng.random(count) < self.how.uniform) if self.how.uniform else ()
        slots = tree.draw(rng.random(count))
        if len(uniform):
            slots[uniform] = self._uniform(side, len(uniform), rng)
        mass = tree.leaves[slots] / np.float32(tree.total)
        chance = (1 - self.how.uniform) * mass + np.float32(self.how.uniform / present)
        return Drawn(slots, self._ring.numbers_at(slots), chance.astype(np.float32), np.full(count, present))

    def put(self, numbers: Numbers, errors: Array) -> None:
        """Sets the priorities of transitions by their TD errors, (B,) each; O(B).

        What is gone, was never there, or has an error that is not finite is counted instead. Of a transition
        that is named twice the last one counts.
        """
        self._follow()
        here = (numbers >= self._first) & (numbers < self._end)
        finite = np.isfinite(errors)
        self.ignored["evicted"] += int(np.count_nonzero(~here))
        self.ignored["not_finite"] += int(np.count_nonzero(here & ~finite))
        kept = here & finite
        slots, masses = numbers[kept] % self._ring.slots, self.how.masses(errors[kept])
        if not len(slots):
            return
        self.largest = max(self.largest, float(masses.max()))
        self._put(slots, masses)

    def mean(self) -> float:
        """The mean mass of the transitions present; NaN if there are none."""
        sides = self.sides()
        present = sum(side.present for side in sides)
        return sum(side.mass for side in sides) / present if present else math.nan

    def state(self) -> tuple[Array, float]:
        """The masses of the transitions present, the oldest first, and the largest so far."""
        self._follow()
        slots = np.arange(self._first, self._end) % self._ring.slots
        return np.sum([tree.leaves[slots] for tree in self._trees], axis=0, dtype=np.float32), self.largest

    def restore(self, masses: Array, largest: float) -> None:
        """Goes on from what `state` gave of a ring with the same transitions.

        Raises:
            ValueError: they are of another number of transitions.
        """
        self._follow()
        if len(masses) != self._end - self._first:
            raise ValueError(f"{len(masses)} priorities for {self._end - self._first} transitions")
        self._put(np.arange(self._first, self._end) % self._ring.slots, masses)
        self.largest = largest

    def _follow(self) -> None:
        """Takes up what the ring stored and dropped since the last call; O(that)."""
        ring = self._ring
        if self._end == ring.total:
            return
        first = ring.total - len(ring)
        for start, end in ring.slots_of(self._first, min(first, self._end)):
            for tree in self._trees:
                tree.put_range(start, end, 0.0)
        for start, end in ring.slots_of(max(first, self._end), ring.total):
            if self._index is None:
                self._trees[0].put_range(start, end, self.largest)
                continue
            own = ring.ids_at(np.arange(start, end)) == self._agent_id
            for tree, its in zip(self._trees, (own, ~own), strict=True):
                tree.put_range(start, end, np.where(its, np.float32(self.largest), np.float32(0)))
        self._first, self._end = first, ring.total

    def _put(self, slots: Slots, masses: Array) -> None:
        if self._index is None:
            self._trees[0].put(slots, masses)
            return
        own = self._ring.ids_at(slots) == self._agent_id
        self._trees[OWN].put(slots[own], masses[own])
        self._trees[OTHERS].put(slots[~own], masses[~own])

    def _counts(self) -> tuple[int, ...]:
        return (len(self._ring),) if self._index is None else self._index.counts()

    def _uniform(self, side: int, count: int, rng: np.random.Generator) -> Slots:
        if self._index is None:
            return (self._first + rng.integers(len(self._ring), size=count)) % self._ring.slots
        return self._index.own(count, rng) if side == OWN else self._index.others(count, rng)
