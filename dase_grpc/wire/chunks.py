"""InsertRequest as bytes: rows go into the message, and are read out of it, without a copy between.

As frames.py does for batches. The protobuf library would copy the rows into a message and that into bytes,
and the same on the way back. What is written is an ordinary message of replay.proto, and every other one is
read by the library; rows begin at a multiple of 4.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final

from dase_grpc.replay.wire.packed import Layout, padded
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.wire.reused import ReusedMemory

_FIRST_SEQ: Final = b"\x08"  # field 1 of InsertChunk, a number
_NUMBER_BYTES: Final = 9
_CHUNK: Final = Layout(
    outer_key=b"\x12",  # field 2 of InsertRequest
    fields_bytes=len(_FIRST_SEQ) + _NUMBER_BYTES,
    rows_key=b"\x12",  # field 2 of InsertChunk
    length_bytes=4,
)
HEAD_BYTES: Final = _CHUNK.head_bytes
"""What comes before the rows of a chunk."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows from number `first_seq` on, as bytes."""

    first_seq: int
    rows: memoryview


Request = Chunk | replay_pb2.InsertRequest


class ChunkWriter:
    """Makes the chunks of a stream, one after the other, in the same memory (reused.py)."""

    def __init__(self) -> None:
        self._memory = ReusedMemory()

    def message(self, first_seq: int, rows: memoryview) -> bytes:
        """An InsertRequest with these rows; first_seq is below 2 ** 63, and there are less than 256 MiB."""
        return self._memory.message(HEAD_BYTES + rows.nbytes, partial(_fill, first_seq, rows))


def read_request(data: bytes) -> Request:
    """An InsertRequest: its chunk, or where it carries none, the message.

    Raises:
        DecodeError: the bytes are no such message.
    """
    fields = _CHUNK.fields(data)
    if fields is not None:
        return Chunk(replay_pb2.InsertChunk.FromString(fields).first_seq, memoryview(data)[HEAD_BYTES:])
    request = replay_pb2.InsertRequest.FromString(data)
    if request.HasField("chunk"):
        return Chunk(request.chunk.first_seq, memoryview(request.chunk.rows))
    return request


def write_request(request: replay_pb2.InsertRequest | bytes) -> bytes:
    """The bytes of an InsertRequest; of a chunk's, which a ChunkWriter has made, those."""
    return request if isinstance(request, bytes) else request.SerializeToString()


def _fill(first_seq: int, rows: memoryview, message: memoryview) -> None:
    message[:HEAD_BYTES] = _CHUNK.head(_FIRST_SEQ + padded(first_seq, _NUMBER_BYTES), rows.nbytes)
    message[HEAD_BYTES:] = rows
