"""The shared buffer's rows: a ring of slots, first in first out, sampled uniformly."""

import os
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from dase_grpc.config.texts import transitions
from dase_grpc.errors import CapacityError, MalformedError
from dase_grpc.progress import MAX_AGENT_ID
from dase_grpc.schema import Array, TransitionSchema

Numbers = npt.NDArray[np.int64]

_COLUMN_BYTES: Final = np.dtype(np.float32).itemsize

RARE: Final = 64
"""An agent with less than one in this many transitions is sampled from the list of its own instead."""


class RingBuffer:
    """Keeps the latest `capacity` transitions as packed rows.

    Single-threaded; nothing blocks. Memory is reserved at once and touched as it fills. Transition number k,
    counted from 0 over the ring's whole life, lies in slot k modulo the number of slots.

    Args:
        capacity: transitions, or a size in bytes such as "512MiB"; a CapacityError where it is unreadable or
            more than this machine can reserve.
        slots: where the rows lie, at least `capacity` of them; without it, memory for `capacity` rows.

    Attributes:
        total: transitions stored, ever; the number of the next one.
    """

    def __init__(self, schema: TransitionSchema, capacity: int | str, *, slots: Array | None = None) -> None:
        self.schema = schema
        self._slots = _reserve(capacity, schema.width) if slots is None else slots
        self.capacity = len(self._slots) if slots is None else int(capacity)
        self.total = 0
        self._size = 0
        self._present: Numbers = np.zeros(MAX_AGENT_ID + 1, np.int64)
        self._evicted: Numbers = np.zeros(MAX_AGENT_ID + 1, np.int64)

    def __len__(self) -> int:
        return self._size

    @property
    def slots(self) -> int:
        """How many slots there are, at least `capacity`."""
        return len(self._slots)

    @property
    def size_by_agent(self) -> dict[int, int]:
        """How many of the transitions present each agent collected."""
        return _positive(self._present)

    @property
    def evicted_by_agent(self) -> dict[int, int]:
        """How many transitions of each agent have made room for newer ones, ever."""
        return _positive(self._evicted)

    def append(self, rows: Array) -> None:
        """Stores (N, width) float32 rows, in order; the oldest make room. O(N).

        Raises:
            MalformedError: another shape or dtype, or an agent id outside 0..1023; nothing is stored.
        """
        if rows.dtype != np.float32 or rows.ndim != 2 or rows.shape[1] != self.schema.width:
            raise MalformedError(
                f"rows of shape {rows.shape} and type {rows.dtype} are not "
                f"(N, {self.schema.width}) float32 transitions"
            )
        self._require_agents(rows)
        dropped = max(0, len(rows) - self.capacity)
        leaving = min(self._size, max(0, self._size + len(rows) - self.capacity))
        self._add(rows)
        for part in (rows[:dropped], *self._views(self.total - self._size, leaving)):
            self._evict(part)
        self._write(self.total + dropped, rows[dropped:])
        self.total += len(rows)
        self._size = min(self._size + len(rows), self.capacity)

    def take_over(self, parts: Iterable[Array], *, first: int) -> None:
        """Fills an empty ring with the rows that another held, the oldest first, which was number `first`.

        The same generator then draws the same transitions from both.
        """
        self.total = first
        for rows in parts:
            self.append(rows)
        count = self.total - first
        if count != min(self.total, self.capacity):
            raise MalformedError(
                f"{count} transitions from number {first} on are not what a ring of {self.capacity} holds"
            )

    def sample(self, count: int, rng: np.random.Generator, *, out: Array | None = None) -> Array:
        """Draws `count` transitions uniformly, with replacement: a new (count, width) array, or `out`."""
        return self.rows_at(self.draw(count, rng) + self._oldest(), out=out)

    def draw(self, count: int, rng: np.random.Generator) -> Numbers:
        """What `sample` draws: the 0th, 1st, ... oldest transitions, as numbers from 0 to len."""
        if not self._size:
            raise IndexError("an empty ring cannot be sampled")
        return rng.integers(self._size, size=count)

    def count_of(self, agent_id: int) -> int:
        """How many of the transitions present this agent collected."""
        return int(self._present[agent_id]) if 0 <= agent_id <= MAX_AGENT_ID else 0

    def evicted_of(self, agent_id: int) -> int:
        """How many transitions of this agent have made room for newer ones, ever."""
        return int(self._evicted[agent_id])

    def slots_of(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The slots of transitions first, ..., end - 1 in order, as ranges [start, stop)."""
        if first < end:
            start, count = first % len(self._slots), end - first
            yield start, min(start + count, len(self._slots))
            if start + count > len(self._slots):
                yield 0, start + count - len(self._slots)

    def ids_at(self, slots: Numbers) -> npt.NDArray[np.int32]:
        """Who collected what lies in these slots; numbers of transitions present are slots as well."""
        # take() would copy the whole column first, which is not contiguous
        return self.schema.agent_ids(self._slots)[slots % len(self._slots)]

    def numbers_at(self, slots: Numbers) -> Numbers:
        """Which transitions lie in these slots: the youngest numbers that these can have."""
        return slots + (self.total - 1 - slots) // len(self._slots) * len(self._slots)

    def rows_at(self, slots: Numbers, *, out: Array | None = None) -> Array:
        """Copies of the transitions in these slots; a new (len, width) array, or `out`."""
        rows: Array = self._slots.take(slots, axis=0, out=out, mode="wrap")
        return rows

    def sample_of(
        self, agent_id: int, count: int, rng: np.random.Generator, *, out: Array | None = None
    ) -> Array:
        """Draws `count` of one agent's transitions, as `sample` does from all.

        By rejection: draws from all and keeps those of the agent until there are enough, about
        len / count_of draws for each. O(count), or O(len) for an agent with hardly any.
        """
        return self.rows_at(self.draw_of(agent_id, count, rng) + self._oldest(), out=out)

    def draw_of(self, agent_id: int, count: int, rng: np.random.Generator) -> Numbers:
        """What `sample_of` draws, as `draw` does."""
        present = self.count_of(agent_id)
        if not present:
            raise IndexError(f"the ring holds no transition of agent {agent_id}")
        if present * RARE < self._size:
            own = self._of(agent_id, np.arange(self._size))
            return own[rng.integers(len(own), size=count)]
        kept, missing = [np.empty(0, np.int64)], count
        while missing:
            drawn = rng.integers(self._size, size=missing * self._size // present + 1)
            kept.append(self._of(agent_id, drawn)[:missing])
            missing -= len(kept[-1])
        return np.concatenate(kept)

    def ordered(self) -> Array:
        """A copy of all transitions present, the oldest first, (len, width)."""
        return np.concatenate(self.slices())

    def slices(self) -> tuple[Array, Array]:
        """All transitions present, the oldest first, as two views which the next `append` changes."""
        return self._views(self.total - self._size, self._size)

    def _of(self, agent_id: int, drawn: Numbers) -> Numbers:
        """Those of `drawn` that are transitions of this agent."""
        own: Numbers = drawn[self.ids_at(drawn + self._oldest()) == agent_id]
        return own

    def _oldest(self) -> int:
        """The slot of the oldest transition; the others follow, around the end."""
        return (self.total - self._size) % len(self._slots)

    def _views(self, first: int, count: int) -> tuple[Array, Array]:
        """The slots of transitions first, ..., first + count - 1, in order, as two views."""
        start = first % len(self._slots)
        head = self._slots[start : start + count]
        return head, self._slots[: count - len(head)]

    def _write(self, first: int, rows: Array) -> None:
        """Puts at most `capacity` rows where transitions first, first + 1, ... lie."""
        head, tail = self._views(first, len(rows))
        head[:] = rows[: len(head)]
        tail[:] = rows[len(head) :]

    def _require_agents(self, rows: Array) -> None:
        ids = self.schema.agent_ids(rows)
        # As unsigned numbers the negative ones are large, so one pass finds both.
        if len(ids) and ids.view(np.uint32).max() > MAX_AGENT_ID:
            raise MalformedError(f"agent ids {ids.min()}..{ids.max()} are outside 0..{MAX_AGENT_ID}")

    def _add(self, rows: Array) -> None:
        """Counts rows as present."""
        counts = np.bincount(self.schema.agent_ids(rows))
        self._present[: len(counts)] += counts

    def _evict(self, rows: Array) -> None:
        """Counts rows that were present as gone."""
        if len(rows):
            counts = np.bincount(self.schema.agent_ids(rows))
            self._present[: len(counts)] -= counts
            self._evicted[: len(counts)] += counts


def _positive(counts: Numbers) -> dict[int, int]:
    return {agent: count for agent, count in enumerate(counts.tolist()) if count}


def require_reservable(capacity: int | str, *, row_bytes: int) -> None:
    """Checks that memory for a ring of such rows can be reserved, as the ring does; none is taken."""
    _reserve(capacity, row_bytes // _COLUMN_BYTES)


def transitions_in(capacity: int | str, *, row_bytes: int) -> int:
    """How many transitions a capacity is; a CapacityError where it is unreadable."""
    try:
        return transitions(capacity, row_bytes=row_bytes)
    except ValueError as error:
        raise CapacityError(f"replay.capacity: {error}") from None


def _reserve(capacity: int | str, width: int) -> Array:
    row_bytes = width * _COLUMN_BYTES
    count = transitions_in(capacity, row_bytes=row_bytes)
    try:
        return np.empty((count, width), np.float32)
    except (MemoryError, ValueError):  # NumPy's ValueError: more bytes than an address can count
        held = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        raise CapacityError(
            f"replay.capacity = {capacity} needs {count * row_bytes / 2**30:,.1f} GiB, more than this "
            f"machine can reserve, which has {held / 2**30:,.1f} GiB of memory; lower it"
        ) from None
