"""frames.py writes and reads ordinary messages of replay.proto."""

import pytest
from google.protobuf.message import DecodeError

from dase_grpc.replay.wire.packed import FRAME_HEAD_BYTES, Frame, Waiting, joined, read_response, write_frame
from dase_grpc.replay.wire.v1 import replay_pb2

ROWS = bytes(range(256)) * 3
NUMBERS = (0, 1, 127, 128, 300, 10**9, 2**64 - 1)


@pytest.mark.parametrize("rows", [b"", b"x", ROWS, bytes(2**20)], ids=len)
@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_written_is_a_message_to_every_protobuf_library(rows, number):
    for last in (False, True):
        data = write_frame(memoryview(rows), last=last, buffer_size=number, drawn_from=number // 2)
        assert replay_pb2.SampleResponse.FromString(data) == replay_pb2.SampleResponse(
            frame=replay_pb2.SampleFrame(rows=rows, last=last, buffer_size=number, drawn_from=number // 2)
        )
        assert len(data) == FRAME_HEAD_BYTES + len(rows)
        assert read_response(data) == Frame(memoryview(rows), last, number, number // 2)


@pytest.mark.parametrize("rows", [b"", ROWS])
def test_what_any_other_library_writes_is_read(rows):
    frame = replay_pb2.SampleFrame(rows=rows, last=True, buffer_size=7, drawn_from=3)
    data = replay_pb2.SampleResponse(frame=frame).SerializeToString()
    assert read_response(data) == Frame(memoryview(rows), last=True, buffer_size=7, drawn_from=3)


def test_a_wait_is_read():
    waiting = replay_pb2.SampleWaiting(reason="waiting for 6 more", size=4, min_size=10)
    assert read_response(replay_pb2.SampleResponse(waiting=waiting).SerializeToString()) == Waiting(
        "waiting for 6 more"
    )


@pytest.mark.parametrize("damaged", [0, 5, 6, 7, 8, 30, 31, 35])
def test_a_message_whose_head_is_damaged_is_read_as_the_library_reads_it_or_refused(damaged):
    data = bytearray(write_frame(ROWS, last=True, buffer_size=1, drawn_from=1))
    data[damaged] ^= 0x83
    try:
        expected = replay_pb2.SampleResponse.FromString(bytes(data))
    except DecodeError:
        with pytest.raises(DecodeError):
            read_response(bytes(data))
        return
    read = read_response(bytes(data))
    assert bytes(read.rows if isinstance(read, Frame) else b"") == expected.frame.rows


def test_rows_are_where_they_came_and_begin_at_a_multiple_of_four():
    data = write_frame(ROWS, last=True, buffer_size=1, drawn_from=1)
    frame = read_response(data)
    assert frame.rows.obj is data
    assert frame.rows == ROWS
    assert FRAME_HEAD_BYTES % 4 == 0
    assert joined([frame]).obj is data
    assert joined([frame, frame]) == 2 * ROWS
