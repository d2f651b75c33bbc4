"""Rows in and out of messages without a copy: chunks of Insert, frames of Sample.

They are ordinary protobuf messages. Numbers and lengths in the head are padded, which every protobuf
library reads, so that rows begin where they should.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from io import BytesIO
from typing import Final

from dase_grpc.replay.wire.v1 import replay_pb2

ROWS_BYTES: Final = 2**20 - 1024
"""Bytes of rows in a message, at most; what is larger is cut."""

NUMBER_BYTES: Final = 8
"""Of the number of a transition."""

_LAST: Final = (b"\x10\x00", b"\x10\x01")  # field 2 of SampleFrame, false and true
_BUFFER_SIZE: Final = b"\x18"  # field 3, a number
_DRAWN_FROM: Final = b"\x20"  # field 4, a number
_NUMBER_BYTES: Final = 10

_FIRST_SEQ: Final = b"\x08"  # field 1 of InsertChunk, a number
_FIRST_SEQ_BYTES: Final = 9


@dataclass(frozen=True)
class Layout:
    """A message that holds one other message, whose last field are rows.

    `outer_key` is of the field that holds the other, `fields_bytes` what that one's fields before its rows
    take, `length_bytes` what each of both lengths takes.
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


_FRAME: Final = Layout(
    outer_key=b"\x0a",  # field 1 of SampleResponse
    fields_bytes=len(_LAST[0]) + len(_BUFFER_SIZE) + len(_DRAWN_FROM) + 2 * _NUMBER_BYTES,
    rows_key=b"\x0a",  # field 1 of SampleFrame
    length_bytes=5,
)
FRAME_HEAD_BYTES: Final = _FRAME.head_bytes
"""What comes before the rows of a frame."""
_CHUNK: Final = Layout(
    outer_key=b"\x12",  # field 2 of InsertRequest
    fields_bytes=len(_FIRST_SEQ) + _FIRST_SEQ_BYTES,
    rows_key=b"\x12",  # field 2 of InsertChunk
    length_bytes=4,
)
CHUNK_HEAD_BYTES: Final = _CHUNK.head_bytes
"""What comes before the rows of a chunk."""


@lru_cache(maxsize=256)
def padded(number: int, length: int) -> bytes:
    """A protobuf varint of that many bytes, as many as the number needs or more."""
    digits = bytearray((number >> (7 * index)) & 0x7F | 0x80 for index in range(length))
    digits[-1] &= 0x7F
    return bytes(digits)


@dataclass(frozen=True, slots=True)
class Frame:
    """A batch, several, or a piece of one; `rows` are bytes of the message that it came in.

    Where rows are read in place, `numbers` says which, and there are none.
    """

    rows: memoryview
    last: bool
    buffer_size: int
    drawn_from: int
    drawing: replay_pb2.Drawing | None = None
    numbers: bytes = b""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why no batch can be drawn yet, in a sentence."""

    reason: str


def write_frame(rows: memoryview | bytes, *, last: bool, buffer_size: int, drawn_from: int) -> bytes:
    """A SampleResponse with these rows; one copy of them."""
    return frame_head(len(rows), last=last, buffer_size=buffer_size, drawn_from=drawn_from) + rows


def frame_head(count: int, *, last: bool, buffer_size: int, drawn_from: int) -> bytes:
    """What comes before `count` bytes of rows in a SampleResponse, HEAD_BYTES long."""
    sizes = (
        _BUFFER_SIZE + padded(buffer_size, _NUMBER_BYTES) + _DRAWN_FROM + padded(drawn_from, _NUMBER_BYTES)
    )
    return _FRAME.head(_LAST[last] + sizes, count)


def frame_drawing(drawing: replay_pb2.Drawing) -> bytes:
    """What follows a SampleResponse to say how its rows were drawn: fields that a reader merges with it."""
    frame = replay_pb2.SampleFrame(drawing=drawing)
    return replay_pb2.SampleResponse(frame=frame).SerializeToString()


def numbers_frame(
    numbers: bytes, drawing: replay_pb2.Drawing | None, *, buffer_size: int, drawn_from: int
) -> bytes:
    """A SampleResponse with the numbers of rows that are read in place."""
    frame = replay_pb2.SampleFrame(
        numbers=numbers, last=True, buffer_size=buffer_size, drawn_from=drawn_from, drawing=drawing
    )
    return replay_pb2.SampleResponse(frame=frame).SerializeToString()


def read_response(data: bytes) -> Frame | Waiting | replay_pb2.Ring:
    """A SampleResponse; without a copy of the rows where its head is a `frame_head`. May be a DecodeError."""
    fields = _FRAME.fields(data)
    if fields is not None:
        return _frame(replay_pb2.SampleFrame.FromString(fields), memoryview(data)[FRAME_HEAD_BYTES:])
    answer = replay_pb2.SampleResponse.FromString(data)
    if answer.HasField("frame"):
        return _frame(answer.frame, memoryview(answer.frame.rows))
    if answer.HasField("ring"):
        return answer.ring
    return Waiting(answer.waiting.reason)


def joined(pieces: Sequence[Frame]) -> memoryview | bytes:
    """The rows of frames that belong together; without a copy where it is one."""
    return pieces[0].rows if len(pieces) == 1 else b"".join(piece.rows for piece in pieces)


def _frame(head: replay_pb2.SampleFrame, rows: memoryview) -> Frame:
    drawing = head.drawing if head.HasField("drawing") else None
    return Frame(rows, head.last, head.buffer_size, head.drawn_from, drawing, head.numbers)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows from number `first_seq` on, as bytes."""

    first_seq: int
    rows: memoryview


Request = Chunk | replay_pb2.InsertRequest


class ChunkWriter:
    """Makes the chunks of a stream, one after the other, in the same memory."""

    def __init__(self) -> None:
        self._memory = ReusedMemory()

    def message(self, first_seq: int, rows: memoryview) -> bytes:
        """An InsertRequest with these rows; first_seq is below 2 ** 63, and there are less than 256 MiB."""
        return self._memory.message(CHUNK_HEAD_BYTES + rows.nbytes, partial(_fill, first_seq, rows))


def read_request(data: bytes) -> Request:
    """An InsertRequest: its chunk, or where it carries none, the message. May be a DecodeError."""
    fields = _CHUNK.fields(data)
    if fields is not None:
        return Chunk(replay_pb2.InsertChunk.FromString(fields).first_seq, memoryview(data)[CHUNK_HEAD_BYTES:])
    request = replay_pb2.InsertRequest.FromString(data)
    if request.HasField("chunk"):
        return Chunk(request.chunk.first_seq, memoryview(request.chunk.rows))
    return request


def write_request(request: replay_pb2.InsertRequest | bytes) -> bytes:
    """The bytes of an InsertRequest; of a chunk's, which a ChunkWriter has made, those."""
    return request if isinstance(request, bytes) else request.SerializeToString()


def _fill(first_seq: int, rows: memoryview, message: memoryview) -> None:
    message[:CHUNK_HEAD_BYTES] = _CHUNK.head(_FIRST_SEQ + padded(first_seq, _FIRST_SEQ_BYTES), rows.nbytes)
    message[CHUNK_HEAD_BYTES:] = rows


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
