"""The ledger beside the rows: alternating records of commits and writers, which say what counts."""

import struct
import threading
import zlib
from pathlib import Path
from typing import Final, Self

import numpy as np

from dase_grpc.errors import DataDirectoryError
from dase_grpc.progress import MAX_AGENT_ID
from dase_grpc.replay.buffer.mapped import MappedFile, StrictFile
from dase_grpc.replay.buffer.ring import Numbers
from dase_grpc.replay.buffer.store import MAX_WRITER_BYTES, WriterKey

_STATE: Final = struct.Struct("<qqII")  # total, size, agents, writers
_LIMIT: Final = struct.Struct("<q")
_WRITER: Final = struct.Struct("<IHH")  # check sum, agent id, bytes of the name
_WRITER_BYTES: Final = _WRITER.size + MAX_WRITER_BYTES
_MAX_BOOT_ID: Final = 64

RETIRED: Final = -1
"""Stands for the sequence number of a writer that was forgotten; whatever its entry names does not count."""

FORGOTTEN: Final[WriterKey] = (0, "")
"""Where the writers' numbers lie, the count of those that were forgotten; no client may have this name."""

_HEAD: Final = struct.Struct("<QII")  # number, check sum, payload bytes
_NO_HEAD: Final = bytes(_HEAD.size)
_NUMBER: Final = struct.Struct("<QI")
PAGE: Final = 4096


class Committed:
    """What the buffer holds as of one commit, as the bytes of its record and views of them.

    A commit record is written with every chunk that is stored, so these are changed in place, and made anew
    only when an agent or a writer is added.

    Attributes:
        head: transitions stored ever, and how many of the latest are present.
        present, inserted, refused: (A,) transitions by agent id; refused ones were not finite.
        sequences: (W,) last committed sequence number by writer, RETIRED for one that was forgotten.
        bytes: all of it.
    """

    def __init__(self, agents: int, writers: int) -> None:
        numbers = np.zeros(_STATE.size // 8 + 3 * agents + writers, np.int64)
        self.head, counts, arrays = np.split(numbers, (2, 3))
        counts.view(np.uint32)[:] = agents, writers
        splits = (agents, 2 * agents, 3 * agents)
        self.present, self.inserted, self.refused, self.sequences = np.split(arrays, splits)
        self.bytes = numbers.data.cast("B")

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """That of a record."""
        state = cls(*_STATE.unpack_from(data)[2:])
        state.bytes[:] = data[: len(state.bytes)]
        return state

    @property
    def size(self) -> int:
        """Transitions that are present."""
        return int(self.head[1])

    def grown(self, agents: int, writers: int) -> "Committed":
        """The same with room for more; what is new is 0, and so is all that the ring says itself."""
        larger = Committed(agents, writers)
        larger.inserted[: len(self.inserted)] = self.inserted
        larger.refused[: len(self.refused)] = self.refused
        larger.sequences[: len(self.sequences)] = self.sequences
        return larger


class CommitFile:
    """The records of one buffer, on disk. Reads raise DataDirectoryError where they are missing or damaged.

    Attributes:
        commits: a `Committed`, replaced at every commit; right whenever the machine has not stopped since.
        synced: `limit` and a `Committed` whose rows are on the disk, except that those which lie where
            transitions below `limit` go may be overwritten.
        boot: the machine's boot id when the file was last opened; "" where the machine does not tell it, and
            from when the disk refused a sync on.
    """

    def __init__(self, file: StrictFile, max_writers: int) -> None:
        slot = _record_bytes(max_writers)
        self._file = file
        self._distrusting = threading.Lock()
        file.on_refusal = self.distrust
        self.boot = AlternatingRecord(file, 0, PAGE)
        self.commits = AlternatingRecord(file, 2 * PAGE, slot)
        self.synced = AlternatingRecord(file, 2 * PAGE + 2 * slot, slot)
        self._writers_start = 2 * PAGE + 4 * slot

    @classmethod
    def create(cls, path: Path, max_writers: int) -> Self:
        """A new file without records; an OSError where the space is not there."""
        return cls(StrictFile.create(path, file_bytes(max_writers)), max_writers)

    @classmethod
    def open(cls, path: Path, max_writers: int, *, writable: bool = True) -> Self:
        """An existing file."""
        return cls(StrictFile.open(path, file_bytes(max_writers), writable=writable), max_writers)

    def put_writer(self, index: int, agent_id: int, name: str) -> None:
        """Names a writer, before the first commit record that counts it.

        One that was forgotten may give way to another once that is in a synced record on the disk: until
        then a machine that stops could bring it back.
        """
        encoded = name.encode(errors="surrogatepass")
        named = struct.pack("<HH", agent_id, len(encoded)) + encoded
        self._file.put(self._writer_offset(index), struct.pack("<I", zlib.crc32(named)) + named)

    def writers(self, sequences: Numbers) -> dict[WriterKey, int]:
        """The place of each writer in the table, where its sequence number lies in these."""
        return {self._writer(index): index for index in np.flatnonzero(sequences != RETIRED).tolist()}

    def synced_state(self) -> tuple[int, bytes]:
        """The latest synced record: its limit, and its packed `Committed`."""
        if self.synced.latest is None:
            raise DataDirectoryError(
                f"{self._file.path} holds no whole record, so it is damaged; choose another folder"
            )
        (limit,) = _LIMIT.unpack_from(self.synced.latest)
        return limit, self.synced.latest[_LIMIT.size :]

    def put_synced(self, limit: int, packed: bytes, *, again: bool = False) -> None:
        """Makes this the latest synced record; it holds once `sync` has returned."""
        self.synced.write(_LIMIT.pack(limit) + packed, again=again)

    def put_boot(self, boot_id: str) -> None:
        """Notes on which boot of the machine the commit records are right."""
        self.boot.write(boot_id.encode()[:_MAX_BOOT_ID])

    def same_boot(self, boot_id: str) -> bool:
        """Whether the machine has not stopped since `put_boot`; not if it does not tell."""
        return bool(boot_id) and self.boot.latest == boot_id.encode()[:_MAX_BOOT_ID]

    def distrust(self) -> None:
        """Has the next start take the synced record, as after the machine has stopped; on any thread.

        For when the disk has refused a sync of the rows or of this file: what a commit record claims may be
        gone as soon as the kernel needs its memory for something else.
        """
        with self._distrusting:
            if self.boot.latest:
                self.put_boot("")

    def put_again(self) -> None:
        """Puts all that is here once more, where a sync may have failed that was to bring it to the disk."""
        if not self.boot.latest:
            self._file.put(0, bytes(self._file.bytes))

    def sync(self) -> None:
        """Returns once the disk has all records and names that were put before the call."""
        self._file.sync()

    def require_disk(self) -> None:
        """DataDirectoryError if a sync has failed."""
        self._file.require_disk()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _writer(self, index: int) -> WriterKey:
        entry = bytes(self._file.bytes[self._writer_offset(index) :][:_WRITER_BYTES])
        check_sum, agent_id, size = _WRITER.unpack_from(entry)
        if size > MAX_WRITER_BYTES or zlib.crc32(entry[4 : _WRITER.size + size]) != check_sum:
            raise DataDirectoryError(
                f"{self._file.path} does not name writer {index}, so it is damaged; choose another folder"
            )
        return agent_id, entry[_WRITER.size :][:size].decode(errors="surrogatepass")

    def _writer_offset(self, index: int) -> int:
        return self._writers_start + index * _WRITER_BYTES


def file_bytes(max_writers: int) -> int:
    """The size of the file."""
    return 2 * PAGE + 4 * _record_bytes(max_writers) + max_writers * _WRITER_BYTES


def _record_bytes(max_writers: int) -> int:
    numbers = 3 * (MAX_AGENT_ID + 1) + max_writers
    return AlternatingRecord.slot_bytes(_LIMIT.size + _STATE.size + 8 * numbers)


class AlternatingRecord:
    """A text of bytes that is replaced as a whole, in two slots of a file.

    A record is written beside the one before it, which stays whole meanwhile; its number and check sum
    come last. Single-threaded; nothing blocks. `latest` is the payload of the newest whole record, if there
    is one, and `number` its number, counted from 1.
    """

    def __init__(self, file: MappedFile, offset: int, slot_bytes: int) -> None:
        self._file = file
        self._offsets = (offset, offset + slot_bytes)
        self._slot_bytes = slot_bytes
        found = [(*self._read(slot), slot) for slot in (0, 1)]
        self.number, self.latest, self._slot = max(found, key=lambda record: record[0])

    @classmethod
    def slot_bytes(cls, payload_bytes: int) -> int:
        """The size of a slot for payloads of up to so many bytes: whole pages, so that slots share none."""
        return -(-(payload_bytes + _HEAD.size) // PAGE) * PAGE

    def write(self, payload: bytes | memoryview, *, again: bool = False) -> None:
        """Makes a copy of `payload` the latest record; `again` writes over the latest, not beside it."""
        slot = self._slot if again else 1 - self._slot
        offset, number = self._offsets[slot], self.number + 1
        self._file.put(offset, _NO_HEAD)  # what is in this slot is no record from here on
        self._file.put(offset + _HEAD.size, payload)
        self._file.put(offset, _HEAD.pack(number, _check_sum(number, payload), len(payload)))
        self.number, self.latest, self._slot = number, bytes(payload), slot

    def _read(self, slot: int) -> tuple[int, bytes | None]:
        offset = self._offsets[slot]
        number, check_sum, size = _HEAD.unpack_from(self._file.bytes, offset)
        if number == 0 or size > self._slot_bytes - _HEAD.size:
            return 0, None
        payload = bytes(self._file.bytes[offset + _HEAD.size :][:size])
        return (number, payload) if check_sum == _check_sum(number, payload) else (0, None)


def _check_sum(number: int, payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(_NUMBER.pack(number, len(payload))))
