"""The shared buffer's rows: a ring in memory, first in first out, sampled uniformly."""

from collections import Counter

import numpy as np
import numpy.typing as npt

from dase_grpc.capacity import transitions
from dase_grpc.errors import CapacityError, MalformedError
from dase_grpc.schema import Array, TransitionSchema

MAX_AGENT_ID = 1023


class RingBuffer:
    """Keeps the latest `capacity` transitions as packed rows.

    Single-threaded; nothing blocks. Memory is reserved at once and touched as it fills.

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
        self._size = 0
        self._size_by_agent: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._size

    @property
    def capacity(self) -> int:
        """Transitions the ring can hold."""
        return len(self._rows)

    @property
    def size_by_agent(self) -> dict[int, int]:
        """How many of the transitions present each agent collected."""
        return {agent: count for agent, count in sorted(dict(self._size_by_agent).items()) if count}

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
        counts = self._count(rows)
        dropped = max(0, len(rows) - self.capacity)
        if dropped:
            counts -= self._count(rows[:dropped])
            self._cursor = (self._cursor + dropped) % self.capacity
        self._overwrite(rows[dropped:])
        self._size_by_agent += counts
        self._size = min(self._size + len(rows), self.capacity)

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Draws `count` transitions uniformly, with replacement; a new (count, width) array.

        Raises:
            IndexError: the ring is empty.
        """
        if not self._size:
            raise IndexError("an empty ring cannot be sampled")
        return self._rows.take(rng.integers(self._size, size=count), axis=0)

    def ordered(self) -> Array:
        """A copy of all transitions present, the oldest first, (len, width)."""
        start = self._cursor if self._size == self.capacity else 0
        return np.concatenate([self._rows[start : self._size], self._rows[:start]])

    def _overwrite(self, rows: Array) -> None:
        done = 0
        while done < len(rows):
            part = min(len(rows) - done, self.capacity - self._cursor)
            target = self._rows[self._cursor : self._cursor + part]
            evicted = max(0, min(self._size - self._cursor, part))
            if evicted:
                self._size_by_agent -= self._count(target[:evicted])
            target[:] = rows[done : done + part]
            self._cursor = (self._cursor + part) % self.capacity
            done += part

    def _count(self, rows: Array) -> Counter[int]:
        ids: npt.NDArray[np.int32] = self.schema.agent_ids(rows)
        if not len(ids):
            return Counter()
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > MAX_AGENT_ID:
            raise MalformedError(f"agent ids {low}..{high} are outside 0..{MAX_AGENT_ID}")
        if low == high:
            return Counter({low: len(ids)})
        return Counter({agent: int(n) for agent, n in enumerate(np.bincount(ids)) if n})


def _reserve(schema: TransitionSchema, capacity: int | str) -> Array:
    try:
        count = transitions(capacity, row_bytes=schema.row_bytes)
        return schema.empty(count)
    except (MemoryError, OverflowError):
        gib = count * schema.row_bytes / 2**30
        raise CapacityError(
            f"replay.capacity = {capacity} needs {gib:,.1f} GiB, more than this machine can reserve; lower it"
        ) from None
    except ValueError as error:
        raise CapacityError(f"replay.capacity: {error}") from None
