"""SampleResponse as bytes: rows go into the message, and are read out of it, without a copy between.

The protobuf library would copy them into a message and that into bytes, and the same on the way back: with
batches of 256 at 348 observation components, a third of what a batch costs both sides. The bytes are an
ordinary message of replay.proto that every protobuf library reads; numbers and lengths in it take a fixed
number of bytes, so that the rows begin at a multiple of 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dase_grpc.replay.wire.packed import Layout, padded
from dase_grpc.replay.wire.v1 import replay_pb2

_LAST: Final = (b"\x10\x00", b"\x10\x01")  # field 2 of SampleFrame, false and true
_BUFFER_SIZE: Final = b"\x18"  # field 3, a number
_DRAWN_FROM: Final = b"\x20"  # field 4, a number
_NUMBER_BYTES: Final = 10
_FRAME: Final = Layout(
    outer_key=b"\x0a",  # field 1 of SampleResponse
    fields_bytes=len(_LAST[0]) + len(_BUFFER_SIZE) + len(_DRAWN_FROM) + 2 * _NUMBER_BYTES,
    rows_key=b"\x0a",  # field 1 of SampleFrame
    length_bytes=5,
)
HEAD_BYTES: Final = _FRAME.head_bytes
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
    sizes = (
        _BUFFER_SIZE + padded(buffer_size, _NUMBER_BYTES) + _DRAWN_FROM + padded(drawn_from, _NUMBER_BYTES)
    )
    return _FRAME.head(_LAST[last] + sizes, count)


def read_response(data: bytes) -> Frame | Waiting:
    """A SampleResponse; without a copy of the rows where its head is a `frame_head`.

    Raises:
        DecodeError: the bytes are no such message.
    """
    fields = _FRAME.fields(data)
    if fields is not None:
        return _frame(replay_pb2.SampleFrame.FromString(fields), memoryview(data)[HEAD_BYTES:])
    answer = replay_pb2.SampleResponse.FromString(data)
    if answer.HasField("frame"):
        return _frame(answer.frame, memoryview(answer.frame.rows))
    return Waiting(answer.waiting.reason)


def joined(pieces: Sequence[Frame]) -> memoryview | bytes:
    """The rows of frames that belong together; without a copy where it is one."""
    return pieces[0].rows if len(pieces) == 1 else b"".join(piece.rows for piece in pieces)


def _frame(head: replay_pb2.SampleFrame, rows: memoryview) -> Frame:
    return Frame(rows, head.last, head.buffer_size, head.drawn_from)
