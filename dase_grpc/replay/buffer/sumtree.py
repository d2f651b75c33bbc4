"""SumTree: masses of slots and sums of them, by which slots are drawn in proportion to their mass."""

from typing import Final

import numpy as np
import numpy.typing as npt

from dase_grpc.schema import Array

Slots = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float64]

FAN: Final = 16
"""Children of a node: one cache line of float32."""

TOP: Final = 4096
"""Nodes of the uppermost level, at most: a cumulative sum over them costs less than two levels more."""

_BELOW_ONE: Final = np.nextafter(1.0, 0.0)


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

    def put_range(self, first: int, end: int, mass: float) -> None:
        """Sets the masses of slots first, ..., end - 1."""
        self._levels[0][first:end] = mass
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
