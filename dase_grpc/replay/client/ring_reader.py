"""Ring reader: the ring of a replay on this machine, mapped to be read in place, and what of it counts.

Why a row that was gathered is whole and the right one: replay/buffer/ring_file.py.
"""

import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dase_grpc.replay.buffer.large_pages import LargePages
from dase_grpc.replay.buffer.ring_file import BEGUN_AT, NONCE_BYTES, STATE_BYTES, fence
from dase_grpc.replay.wire.packed import Frame
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.schema import Array, TransitionSchema

Numbers = npt.NDArray[np.int64]

GATHERED_BYTES: Final = 256 * 2**10
"""Small batches are gathered together up to this size, so that it is looked once what of them counts."""

log = logging.getLogger("dase")


@dataclass(frozen=True)
class RingReader:
    """The rows of a ring that another process writes, (slots, width) and read-only. Any one thread's.

    `state` is the path of its state under /proc, `identity` that file's device and inode.
    """

    rows: Array
    begun: Numbers
    state: str
    identity: tuple[int, int]

    @classmethod
    def find(cls, told: replay_pb2.Ring, schema: TransitionSchema) -> Self:
        """The ring that a service offers.

        Nothing that the service says is opened but /proc/PID/fd/N, nothing is waited for, and what is mapped
        are regular files of this user.

        Raises:
            OSError: it is not on this machine or in this container, is another user's, or cannot be mapped.
        """
        where = f"/proc/{told.pid:d}/fd"
        state, identity = _mapped(f"{where}/{told.state_fd:d}", STATE_BYTES)
        if len(told.nonce) != NONCE_BYTES or state[:NONCE_BYTES] != told.nonce:
            raise OSError("what lies there is not its state, so it runs on another machine or in a container")
        rows, _ = _mapped(f"{where}/{told.rows_fd:d}", told.slots * schema.row_bytes)
        return cls(
            np.frombuffer(rows, np.float32).reshape(told.slots, schema.width),
            np.frombuffer(state, np.int64, 1, BEGUN_AT),
            f"{where}/{told.state_fd:d}",
            identity,
        )

    def gather(self, numbers: Numbers) -> Array | None:
        """Copies of the rows of these transitions, (N, width); None where one may have been overwritten."""
        slots = len(self.rows)
        rows: Array = self.rows.take(numbers % slots, axis=0)
        fence()
        begun = int(self.begun[0])
        whole = numbers.min() >= begun - slots and numbers.max() < begun
        return rows if whole and self._is_kept() else None

    def _is_kept(self) -> bool:
        """Whether the service still holds its state, so that no other one writes to the rows."""
        try:
            found = os.stat(self.state)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.identity


def found_ring(told: replay_pb2.Ring, schema: TransitionSchema, *, address: str) -> RingReader | None:
    """The ring that the service at an address offers, if it can be read here; the log says which."""
    try:
        ring = RingReader.find(told, schema)
    except OSError as error:
        log.info(
            "batches come over the stream from %s: its ring cannot be read in place (%s)", address, error
        )
        return None
    log.info("batches are read in place from the ring of the replay at %s", address)
    return ring


class Portion(NamedTuple):
    """Batches of a frame whose rows are gathered together: `which` of all its numbers."""

    frame: Frame
    which: slice
    numbers: Numbers
    batches: int


def portions(frame: Frame, batches: int, *, row_bytes: int) -> Iterator[Portion]:
    """A frame of numbers of so many batches, cut into what is gathered together."""
    numbers = np.frombuffer(frame.numbers, "<i8")
    size = len(numbers) // batches
    together = max(1, GATHERED_BYTES // (size * row_bytes))
    for first in range(0, batches, together):
        count = min(together, batches - first)
        which = slice(first * size, (first + count) * size)
        yield Portion(frame, which, numbers[which], count)


def _mapped(path: str, size: int) -> tuple[memoryview, tuple[int, int]]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != size:
            raise OSError("what lies there is not its file, so it runs on another machine or in a container")
        return LargePages(descriptor, size, writable=False).bytes, (found.st_dev, found.st_ino)
    finally:
        os.close(descriptor)
