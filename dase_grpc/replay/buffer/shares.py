"""Own share: batches that hold a fixed share of one agent's own transitions, the rest of all others'."""

from typing import Final

import numpy as np
import numpy.typing as npt

from dase_grpc.replay.buffer.ring import RingBuffer

Slots = npt.NDArray[np.int64]
Places = npt.NDArray[np.bool_]

OWN, OTHERS = 0, 1
"""The sides that are drawn from apart, where there is an own share."""

_FIRST_ROOM: Final = 1024


class OwnIndex:
    """Which slots of a ring hold an agent's own transitions, and which those of others.

    Reads what has come and gone when it is asked, so a ring that nobody samples by share pays nothing. At
    most 16 bytes for each transition present.

    Attributes:
        filled_in: transitions that were to be drawn from the other side because theirs was empty.
    """

    def __init__(self, ring: RingBuffer, agent_id: int) -> None:
        self._ring = ring
        self._agent_id = agent_id
        self._end = ring.total - len(ring)
        self._evicted = ring.evicted_of(agent_id)
        self._evicted_total = self._end
        self._own, self._others = _Slots(), _Slots()
        self.filled_in = 0

    def counts(self) -> tuple[int, int]:
        """How many transitions present are the agent's own, and how many are others'; O(what is new)."""
        ring = self._ring
        if self._end != ring.total:
            first, gone = ring.total - len(ring), ring.evicted_of(self._agent_id)
            self._own.drop(gone - self._evicted)
            self._others.drop(first - self._evicted_total - (gone - self._evicted))
            self._evicted, self._evicted_total = gone, first
            for start, end in ring.slots_of(max(first, self._end), ring.total):
                slots = np.arange(start, end)
                own = ring.ids_at(slots) == self._agent_id
                self._own.extend(slots[own])
                self._others.extend(slots[~own])
            self._end = ring.total
        return len(self._own), len(self._others)

    def deal(
        self, share: float, batches: int, batch_size: int, rng: np.random.Generator, *, own: int | None = None
    ) -> Places:
        """Which places of so many batches, one after the other, are own; those come first in each.

        `own` says how many in each, else the share does. Where one side is empty all are the other's.

        Raises:
            IndexError: the ring is empty.
        """
        mine, others = self.counts()
        if not mine + others:
            raise IndexError("an empty ring cannot be sampled")
        wanted = own_counts(share, batches, batch_size, rng) if own is None else np.full(batches, own)
        if not (mine and others):
            count, total = int(wanted.sum()), batches * batch_size
            self.filled_in += count if others else total - count
            wanted = np.full(batches, batch_size if mine else 0)
        return (np.arange(batch_size) < wanted[:, np.newaxis]).ravel()

    def own(self, count: int, rng: np.random.Generator) -> Slots:
        """Slots of `count` of the agent's own, uniform with replacement; there are some if any is wanted."""
        return self._own.draw(count, rng)

    def others(self, count: int, rng: np.random.Generator) -> Slots:
        """As `own`, of all others'."""
        return self._others.draw(count, rng)


class OwnShare:
    """Draws batches with `share` of an agent's own transitions, the rest uniform over those of all others.

    The number of own ones is rounded at random, so that the share is exact on average. Where one side is
    empty the other fills in.
    """

    def __init__(self, ring: RingBuffer, agent_id: int, share: float) -> None:
        self._index = OwnIndex(ring, agent_id)
        self._share = share

    @property
    def filled_in(self) -> int:
        """Transitions that were drawn from the other side because theirs was empty."""
        return self._index.filled_in

    def draw(
        self, batches: int, batch_size: int, rng: np.random.Generator, *, own: int | None = None
    ) -> Slots:
        """Slots of so many batches, one after the other; see OwnIndex.deal. O(batch)."""
        first = self._index.deal(self._share, batches, batch_size, rng, own=own)
        count = int(np.count_nonzero(first))
        slots = np.empty(len(first), np.int64)
        slots[first] = self._index.own(count, rng)
        slots[~first] = self._index.others(len(first) - count, rng)
        return slots


def own_counts(share: float, batches: int, batch_size: int, rng: np.random.Generator) -> Slots:
    """How many of each batch are own, rounded up or down at random so that the mean is exact."""
    counts = np.floor(share * batch_size + rng.random(batches)).astype(np.int64)
    return np.minimum(counts, batch_size)  # the sum may be rounded up to one more


class _Slots:
    """Slots, the oldest first: more come at the end, the oldest leave."""

    def __init__(self) -> None:
        self._data = np.empty(_FIRST_ROOM, np.uint32)
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def draw(self, count: int, rng: np.random.Generator) -> Slots:
        if not count:  # nor need there be any
            return np.empty(0, np.int64)
        return self._data[rng.integers(self._start, self._end, size=count)].astype(np.int64)

    def drop(self, count: int) -> None:
        """Takes the oldest out; more than there are where some came and went unseen."""
        self._start = min(self._start + count, self._end)

    def extend(self, slots: Slots) -> None:
        if self._end + len(slots) > len(self._data):
            held = self._data[self._start : self._end]
            room = max(_FIRST_ROOM, 2 * (len(held) + len(slots)))
            if room > len(self._data):
                self._data = np.empty(room, np.uint32)
            self._data[: len(held)] = held.copy()
            self._start, self._end = 0, len(held)
        self._data[self._end : self._end + len(slots)] = slots
        self._end += len(slots)
