"""SampleResponse as bytes: rows go into the message, and are read out of it, without a copy between.

The protobuf library would copy them into a message and that into bytes, and the same on the way back: with
batches of 256 at 348 observation components, a third of what a batch costs both sides. The bytes are an
ordinary message of replay.proto that every protobuf library reads; numbers and lengths in it take a fixed
number of bytes, so that the rows begin at a multiple of 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dase_grpc.wire.v1 import replay_pb2
from dase_grpc.wire.varints import padded

_FRAME: Final = b"\x0a"  # field 1 of SampleResponse, bytes of a given length
_LAST: Final = (b"\x10\x00", b"\x10\x01")  # field 2 of SampleFrame, false and true
_BUFFER_SIZE: Final = b"\x18"  # field 3, a number
_DRAWN_FROM: Final = b"\x20"  # field 4, a number
_ROWS: Final = b"\x0a"  # field 1, bytes of a given length
_LENGTH_BYTES: Final = 5
_NUMBER_BYTES: Final = 10
_OUTER: Final = len(_FRAME) + _LENGTH_BYTES
_INNER: Final = _OUTER + len(_LAST[0]) + 2 * (1 + _NUMBER_BYTES)
HEAD_BYTES: Final = _INNER + len(_ROWS) + _LENGTH_BYTES
"""What comes before the rows of a frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A batch, several, or a piece of one; `rows` are bytes of the message that it came in."""

    rows: memoryview
    last: bool
    buffer_size: int
    drawn_from: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why no batch can be drawn yet, in a sentence."""

    reason: str


def write_frame(rows: memoryview | bytes, *, last: bool, buffer_size: int, drawn_from: int) -> bytes:
    """A SampleResponse with these rows; one copy of them."""
    return frame_head(len(rows), last=last, buffer_size=buffer_size, drawn_from=drawn_from) + rows


def frame_head(count: int, *, last: bool, buffer_size: int, drawn_from: int) -> bytes:
    """What comes before `count` bytes of rows in a SampleResponse, HEAD_BYTES long."""
    return b"".join(
        (
            _FRAME,
            padded(count + HEAD_BYTES - _OUTER, _LENGTH_BYTES),
            _LAST[last],
            _BUFFER_SIZE,
            padded(buffer_size, _NUMBER_BYTES),
            _DRAWN_FROM,
            padded(drawn_from, _NUMBER_BYTES),
            _ROWS,
            padded(count, _LENGTH_BYTES),
        )
    )


def read_response(data: bytes) -> Frame | Waiting:
    """A SampleResponse; without a copy of the rows where `write_frame` made it.

    Raises:
        DecodeError: the bytes are no such message.
    """
    count = len(data) - HEAD_BYTES
    if (
        count >= 0
        and data[:_OUTER] == _FRAME + padded(count + HEAD_BYTES - _OUTER, _LENGTH_BYTES)
        and data[_INNER:HEAD_BYTES] == _ROWS + padded(count, _LENGTH_BYTES)
    ):
        head = replay_pb2.SampleFrame.FromString(data[_OUTER:_INNER])
        return _frame(head, memoryview(data)[HEAD_BYTES:])
    answer = replay_pb2.SampleResponse.FromString(data)
    if answer.HasField("frame"):
        return _frame(answer.frame, memoryview(answer.frame.rows))
    return Waiting(answer.waiting.reason)


def joined(pieces: Sequence[Frame]) -> memoryview | bytes:
    """The rows of frames that belong together; without a copy where it is one."""
    return pieces[0].rows if len(pieces) == 1 else b"".join(piece.rows for piece in pieces)


def _frame(head: replay_pb2.SampleFrame, rows: memoryview) -> Frame:
    return Frame(rows, head.last, head.buffer_size, head.drawn_from)
