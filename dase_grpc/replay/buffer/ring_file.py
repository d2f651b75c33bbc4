"""A ring whose slots are a file, and its handle: what other processes need to read the rows in place.

**When a row that was read in place counts.** A reader maps the rows and the state of the ring, gathers the
rows of the numbers that it was given, and only then looks at the state. The state holds `begun`: all
transitions before this number may have been written, or be in writing. Transition k lies in slot k modulo
`slots`, which is next written to by transition k + slots. So a gathered row k is whole and the right one
if, after the gather, begun <= k + slots.

Two orders make that true. *The row was there*: the service gives a number only after the row was put, and
the number reaches the reader through a socket, which orders all that came before. *Nothing overwrote it
unnoticed*: the writer stores `begun`, then a fence, then the bytes of rows; the reader loads the bytes,
then a fence, then `begun`. If a load saw a byte of transition k + slots, the load of `begun` sees a number
above k + slots. This is the second half of a sequence lock; the first half is not needed, because a slot's
next writer is known.

**What is assumed.** `begun` is eight aligned bytes, which NumPy stores and loads at once, so it is never
torn. Bytes reach the file by memcpy, and the compiler moves neither across calls into NumPy and the
interpreter. The fence is a lock of the interpreter that is released and then taken again: a semaphore or an
atomic exchange, which POSIX and C say synchronise memory. On x86 both are locked instructions, which
neither loads nor stores pass, those that go past the caches included; on 64-bit ARM a store-release that a
load-acquire follows, which are not reordered, and nothing passes both. It was run on x86 alone.

**When the service has died.** Another one may go on with the same rows on disk, and knows nothing of this
state. A process that ends lets its files go before the lock of its data directory, so a reader that still
finds the state under /proc after the gather knows that no other service has written a row.

Numbers are drawn from the latest `capacity` of `slots` transitions. The slots between are the guard: so
many rows may come between a draw and its gather before a batch has to be drawn again.
"""

import os
import secrets
import threading
from typing import Final

import numpy as np

from dase_grpc.replay.buffer.ledger import Committed
from dase_grpc.replay.buffer.mapped import MappedFile
from dase_grpc.replay.buffer.ring import Numbers, RingBuffer, require_reservable, transitions_in
from dase_grpc.schema import Array, TransitionSchema

SPARE_BYTES: Final = 4 * 2**20
"""Room for as many uncommitted rows as one message can bring; the guard of rows that are read in place."""

NONCE_BYTES: Final = 16
BEGUN_AT: Final = 64
"""Where `begun` lies in the state: on a cache line of its own."""

STATE_BYTES: Final = 4096

_BARRIER: Final = threading.Lock()


def fence() -> None:
    """Keeps loads and stores before the call from happening after it, and those after it before."""
    with _BARRIER:
        pass
    with _BARRIER:  # released above, taken here: only the two together let nothing pass in either direction
        pass


class RingHandle:
    """The state of a ring in memory that others can map; `rows` are the ring's. One thread's.

    Attributes:
        pid: the process that holds the files open.
        nonce: random; what the state begins with.
    """

    def __init__(self, rows: MappedFile, *, begun: int) -> None:
        self._state = MappedFile.in_memory(STATE_BYTES)
        self._rows = rows
        self.pid = os.getpid()
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._state.put(0, self.nonce)
        self._begun = np.frombuffer(self._state.bytes, np.int64, 1, BEGUN_AT)
        self._begun[0] = begun

    @property
    def state_fd(self) -> int:
        """The descriptor of the state."""
        return self._state.descriptor

    @property
    def rows_fd(self) -> int:
        """The descriptor of the rows."""
        return self._rows.descriptor

    def begin(self, end: int) -> None:
        """Says that transitions before number `end` may be in writing; call it before their first byte."""
        self._begun[0] = end
        fence()

    def close(self) -> None:
        """Takes the state from under /proc: what is read from now on does not count."""
        self._state.close()


class MappedRing(RingBuffer):
    """A ring whose slots are a file."""

    def __init__(self, schema: TransitionSchema, capacity: int, file: MappedFile) -> None:
        super().__init__(
            schema, capacity, slots=np.frombuffer(file.bytes, np.float32).reshape(-1, schema.width)
        )
        self._file = file
        self._handle: RingHandle | None = None

    def handle(self) -> RingHandle:
        """What others need to read rows in place; made when it is first asked for. Linux only."""
        if self._handle is None:
            self._handle = RingHandle(self._file, begun=self.total)
        return self._handle

    def restore(self, state: Committed) -> None:
        """Goes on from a commit."""
        agents = len(state.present)
        self.total, self._size = state.head.tolist()
        self._present[:agents] = state.present
        self._evicted[:agents] = state.inserted - state.present

    def shorten(self, size: int) -> None:
        """Lets the oldest go until `size` are left, whatever their slots hold. One pass over the rest."""
        self._evicted += self._present
        self._present[:] = 0
        self._size = size
        for part in self.slices():
            self._add(part)
        self._evicted -= self._present

    def present(self, agents: int) -> Numbers:
        """Transitions present of the first `agents` agent ids, a view."""
        return self._present[:agents]

    def close(self) -> None:
        """Ends the handle, then closes the file."""
        if self._handle is not None:
            self._handle.close()
        self._file.close()

    def _write(self, first: int, rows: Array) -> None:
        if not len(rows):
            return
        if self._handle is not None:
            self._handle.begin(first + len(rows))
        start = first % len(self._slots) * self.schema.row_bytes
        data = np.ascontiguousarray(rows).data.cast("B")
        room = self._slots.nbytes - start
        self._file.put(start, data[:room])
        if len(data) > room:
            self._file.put(0, data[room:])


def ring_in_memory(schema: TransitionSchema, capacity: int | str) -> RingBuffer:
    """An empty ring in memory, which other processes of the machine can read in place where that is Linux.

    Raises:
        CapacityError: the capacity is unreadable, or more than this machine can reserve.
    """
    if not can_map():
        return RingBuffer(schema, capacity)
    require_reservable(capacity, row_bytes=schema.row_bytes)
    count = transitions_in(capacity, row_bytes=schema.row_bytes)
    slots = count + spare_slots(schema)
    try:
        file = MappedFile.in_memory(slots * schema.row_bytes)
    except OSError:  # a sandbox without such files, or a limit on their size
        return RingBuffer(schema, capacity)
    return MappedRing(schema, count, file)


def spare_slots(schema: TransitionSchema) -> int:
    """Rows that lie beside the capacity, for those that are not committed yet."""
    return max(1, SPARE_BYTES // schema.row_bytes)


def handle_of(ring: RingBuffer) -> RingHandle | None:
    """What others need to read the rows of a ring in place; None where they cannot."""
    if not isinstance(ring, MappedRing) or not can_map():
        return None
    try:
        return ring.handle()
    except OSError:  # see ring_in_memory
        return None


def can_map() -> bool:
    """Whether this machine has memory that is a file."""
    return hasattr(os, "memfd_create")
