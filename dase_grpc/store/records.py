"""Two alternating records: a reader finds the newest whole one, wherever the writer was stopped."""

import struct
import zlib
from typing import Final

from dase_grpc.replay.buffer.mapped import MappedFile

_HEAD: Final = struct.Struct("<QII")  # number, check sum, payload bytes
_NO_HEAD: Final = bytes(_HEAD.size)
_NUMBER: Final = struct.Struct("<QI")
PAGE: Final = 4096


class AlternatingRecord:
    """A text of bytes that is replaced as a whole, in two slots of a file.

    A record is written beside the one before it, which stays whole meanwhile; its number and check sum
    come last. Single-threaded; nothing blocks.

    Attributes:
        latest: the payload of the newest whole record, None if there is none.
        number: its number; the first is 1, each has one more than the one before.
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
