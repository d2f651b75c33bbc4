"""Memory for messages of some 100 kB: filled in place, and filled again once the last message is sent."""

from collections.abc import Callable
from io import BytesIO


class ReusedMemory:
    """Makes one message after the other, in memory that is used again as soon as nobody holds the last one.

    What is written for each lies in the message already, so nothing is copied, and no memory is asked for
    that comes cold from the allocator. While somebody holds the last message, the next one gets memory of
    its own: no message ever changes. All of this is BytesIO, which shares its bytes until they are written
    to; it holds those of one message. A message is for sending: its hash may be that of one before.
    """

    def __init__(self) -> None:
        self._file = BytesIO()

    def message(self, size: int, fill: Callable[[memoryview], None]) -> bytes:
        """A message of this many bytes, all of which `fill` has written; it keeps no view of them."""
        self._file.truncate(size)
        if self._file.seek(0, 2) < size:
            self._file.seek(size - 1)
            self._file.write(b"\0")
        with self._file.getbuffer() as memory:
            fill(memory)
        self._file.truncate()  # a BufferError where a view is left, through which the message could change
        return self._file.getvalue()
