"""The shared buffer's rows: a ring in memory, first in first out, sampled uniformly."""

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from dase_grpc.capacity import transitions
from dase_grpc.errors import CapacityError, MalformedError
from dase_grpc.schema import Array, TransitionSchema

Counts = npt.NDArray[np.int64]

MAX_AGENT_ID = 1023

RARE: Final = 64
"""An agent with less than one in this many transitions is sampled from the list of its own instead."""


class RingBuffer:
    """Keeps the latest `capacity` transitions as packed rows.

    Single-threaded; nothing blocks. Memory is reserved at once and touched as it fills. Transition number k,
    counted from 0 over the ring's whole life, lies at place k modulo the capacity.

    Args:
        schema: the layout of the rows.
        capacity: transitions, or a size in bytes such as "512MiB".

    Raises:
        CapacityError: the capacity is unreadable or more than this machine can reserve.
    """

    def __init__(self, schema: TransitionSchema, capacity: int | str) -> None:
        self.schema = schema
        self._rows = _reserve(schema, capacity)
        self._cursor = 0
        self._total = 0
        self._size = 0
        self._present: Counts = np.zeros(MAX_AGENT_ID + 1, np.int64)
        self._evicted: Counts = np.zeros(MAX_AGENT_ID + 1, np.int64)

    def __len__(self) -> int:
        return self._size

    @property
    def capacity(self) -> int:
        """Transitions the ring can hold."""
        return len(self._rows)

    @property
    def total(self) -> int:
        """Transitions stored, ever; the number of the next one."""
        return self._total

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
        self._require_rows(rows)
        dropped = max(0, len(rows) - self.capacity)
        self._cursor = (self._cursor + dropped) % self.capacity
        evicted = self._overwrite(rows[dropped:])
        if dropped:
            evicted += self._count(rows[:dropped])
        self._evicted += evicted
        self._present += self._count(rows) - evicted
        self._size = min(self._size + len(rows), self.capacity)
        self._total += len(rows)

    def restore(self, parts: Iterable[Array], *, first: int) -> None:
        """Fills an empty ring with the rows that another held, the oldest first, which was number `first`.

        The same generator then draws the same transitions from both.

        Raises:
            MalformedError: as `append`, or they are not what a ring of this capacity holds.
        """
        self._total = first
        for rows in parts:
            self._require_rows(rows)
            self._size += len(rows)
            if self._size > self.capacity:
                break
            start = self._total % self.capacity
            head = self._rows[start : start + len(rows)]
            head[:] = rows[: len(head)]
            self._rows[: len(rows) - len(head)] = rows[len(head) :]
            self._present += self._count(rows)
            self._total += len(rows)
        self._cursor = self._total % self.capacity
        if self._size != min(self._total, self.capacity):
            raise MalformedError(
                f"{self._size} transitions from number {first} on are not what a ring of {self.capacity} "
                f"holds"
            )

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Draws `count` transitions uniformly, with replacement; a new (count, width) array.

        Raises:
            IndexError: the ring is empty.
        """
        if not self._size:
            raise IndexError("an empty ring cannot be sampled")
        return self._rows.take(rng.integers(self._size, size=count), axis=0)

    def count_of(self, agent_id: int) -> int:
        """How many of the transitions present this agent collected."""
        return int(self._present[agent_id]) if 0 <= agent_id <= MAX_AGENT_ID else 0

    def sample_of(self, agent_id: int, count: int, rng: np.random.Generator) -> Array:
        """Draws `count` of one agent's transitions uniformly, with replacement; a new (count, width) array.

        By rejection: draws from all and keeps those of the agent until there are enough, about
        len / count_of draws for each. O(count), or O(len) for an agent with hardly any.

        Raises:
            IndexError: none of the agent's is present.
        """
        present = self.count_of(agent_id)
        if not present:
            raise IndexError(f"the ring holds no transition of agent {agent_id}")
        ids = self.schema.agent_ids(self._rows[: self._size])
        if present * RARE < self._size:
            own = np.flatnonzero(ids == agent_id)
            return self._rows.take(own[rng.integers(len(own), size=count)], axis=0)
        kept, missing = [np.empty(0, np.int64)], count
        while missing:
            drawn = rng.integers(self._size, size=missing * self._size // present + 1)
            own = drawn[ids[drawn] == agent_id][:missing]
            kept.append(own)
            missing -= len(own)
        return self._rows.take(np.concatenate(kept), axis=0)

    def ordered(self) -> Array:
        """A copy of all transitions present, the oldest first, (len, width)."""
        return np.concatenate(self.slices())

    def slices(self) -> tuple[Array, Array]:
        """All transitions present, the oldest first, as two views which the next `append` changes."""
        start = self._cursor if self._size == self.capacity else 0
        return self._rows[start : self._size], self._rows[:start]

    def _overwrite(self, rows: Array) -> Counts:
        """Writes at most `capacity` rows at the cursor and moves it; returns what was there, by agent."""
        evicted = np.zeros(MAX_AGENT_ID + 1, np.int64)
        while len(rows):
            target = self._rows[self._cursor : self._cursor + len(rows)]
            present = self._size - self._cursor
            if present > 0:
                evicted += self._count(target[:present])
            target[:] = rows[: len(target)]
            self._cursor = (self._cursor + len(target)) % self.capacity
            rows = rows[len(target) :]
        return evicted

    def _require_rows(self, rows: Array) -> None:
        if rows.dtype != np.float32 or rows.ndim != 2 or rows.shape[1] != self.schema.width:
            raise MalformedError(
                f"rows of shape {rows.shape} and type {rows.dtype} are not "
                f"(N, {self.schema.width}) float32 transitions"
            )
        self._require_agents(rows)

    def _require_agents(self, rows: Array) -> None:
        ids = self.schema.agent_ids(rows)
        # As unsigned numbers the negative ones are large, so one pass finds both.
        if len(ids) and ids.view(np.uint32).max() > MAX_AGENT_ID:
            raise MalformedError(f"agent ids {ids.min()}..{ids.max()} are outside 0..{MAX_AGENT_ID}")

    def _count(self, rows: Array) -> Counts:
        return np.bincount(self.schema.agent_ids(rows), minlength=MAX_AGENT_ID + 1)


def _positive(counts: Counts) -> dict[int, int]:
    return {agent: count for agent, count in enumerate(counts.tolist()) if count}


def _reserve(schema: TransitionSchema, capacity: int | str) -> Array:
    try:
        count = transitions(capacity, row_bytes=schema.row_bytes)
    except ValueError as error:
        raise CapacityError(f"replay.capacity: {error}") from None
    try:
        return schema.empty(count)
    except (MemoryError, ValueError):  # NumPy's ValueError: more bytes than an address can count
        gib = count * schema.row_bytes / 2**30
        raise CapacityError(
            f"replay.capacity = {capacity} needs {gib:,.1f} GiB, more than this machine can reserve; lower it"
        ) from None
