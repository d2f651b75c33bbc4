"""Messages whose rows lie at a known place: behind a head that takes a fixed number of bytes.

They are ordinary protobuf messages. Numbers and lengths in the head are padded, which every protobuf
library reads, so that rows begin where they should.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

ROWS_BYTES: Final = 2**20 - 1024
"""Bytes of rows in a message, at most; what is larger is cut."""


@dataclass(frozen=True)
class Layout:
    """A message that holds one other message, whose last field are rows.

    Attributes:
        outer_key: of the field that holds the other message.
        fields_bytes: what the other message's fields before its rows take.
        rows_key: of the rows.
        length_bytes: what each of both lengths takes.
    """

    outer_key: bytes
    fields_bytes: int
    rows_key: bytes
    length_bytes: int

    @cached_property
    def head_bytes(self) -> int:
        """What comes before the rows."""
        return self._inner + len(self.rows_key) + self.length_bytes

    def head(self, fields: bytes, count: int) -> bytes:
        """What comes before `count` bytes of rows, with the fields before them as bytes."""
        opening, closing = self._around(count)
        return b"".join((opening, fields, closing))

    def fields(self, data: bytes) -> bytes | None:
        """The fields before the rows, if the message is laid out like this; the rows then follow the head."""
        count = len(data) - self.head_bytes
        if count < 0:
            return None
        opening, closing = self._around(count)
        laid_out = data[: self._outer] == opening and data[self._inner : self.head_bytes] == closing
        return data[self._outer : self._inner] if laid_out else None

    def _around(self, count: int) -> tuple[bytes, bytes]:
        """What comes before the fields, and between these and the rows."""
        inside = padded(count + self.head_bytes - self._outer, self.length_bytes)
        return self.outer_key + inside, self.rows_key + padded(count, self.length_bytes)

    @cached_property
    def _outer(self) -> int:
        return len(self.outer_key) + self.length_bytes

    @cached_property
    def _inner(self) -> int:
        return self._outer + self.fields_bytes


@lru_cache(maxsize=256)
def padded(number: int, length: int) -> bytes:
    """A protobuf varint of that many bytes, as many as the number needs or more."""
    digits = bytearray((number >> (7 * index)) & 0x7F | 0x80 for index in range(length))
    digits[-1] &= 0x7F
    return bytes(digits)
