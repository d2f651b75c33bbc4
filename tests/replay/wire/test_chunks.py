"""chunks.py writes and reads ordinary messages of replay.proto, and reused.py never changes one."""

from types import SimpleNamespace

import pytest
from google.protobuf.message import DecodeError

from dase_grpc.replay.service.server import ReplayServicer, add_replay
from dase_grpc.replay.wire.packed import (
    CHUNK_HEAD_BYTES,
    Chunk,
    ChunkWriter,
    ReusedMemory,
    read_request,
    write_request,
)
from dase_grpc.replay.wire.v1 import replay_pb2

ROWS = bytes(range(256)) * 3
NUMBERS = (0, 1, 127, 128, 300, 10**9, 2**63 - 1)


@pytest.mark.parametrize("rows", [b"", b"x", ROWS, bytes(2**20)], ids=len)
@pytest.mark.parametrize("first_seq", NUMBERS)
def test_what_is_written_is_a_message_to_every_protobuf_library(rows, first_seq):
    data = ChunkWriter().message(first_seq, memoryview(rows))
    assert replay_pb2.InsertRequest.FromString(data) == replay_pb2.InsertRequest(
        chunk=replay_pb2.InsertChunk(first_seq=first_seq, rows=rows)
    )
    assert len(data) == CHUNK_HEAD_BYTES + len(rows)
    assert read_request(data) == Chunk(first_seq, memoryview(rows))
    assert write_request(data) is data


@pytest.mark.parametrize("rows", [b"", ROWS])
def test_what_any_other_library_writes_is_read(rows):
    request = replay_pb2.InsertRequest(chunk=replay_pb2.InsertChunk(first_seq=2**64 - 1, rows=rows))
    assert read_request(write_request(request)) == Chunk(2**64 - 1, memoryview(rows))


@pytest.mark.parametrize(
    "request_",
    [
        replay_pb2.InsertRequest(header=replay_pb2.InsertHeader(writer_id="w")),
        replay_pb2.InsertRequest(end=replay_pb2.InsertEnd()),
        replay_pb2.InsertRequest(),
    ],
    ids=["header", "end", "nothing"],
)
def test_what_is_no_chunk_is_read_as_it_is(request_):
    assert read_request(write_request(request_)) == request_


@pytest.mark.parametrize("damaged", [0, 1, 4, 5, 6, 14, 15, 16, 19])
def test_a_chunk_whose_head_is_damaged_is_read_as_the_library_reads_it_or_refused(damaged):
    data = bytearray(ChunkWriter().message(1, memoryview(ROWS)))
    data[damaged] ^= 0x83
    try:
        expected = replay_pb2.InsertRequest.FromString(bytes(data))
    except DecodeError:
        with pytest.raises(DecodeError):
            read_request(bytes(data))
        return
    read = read_request(bytes(data))
    assert bytes(read.rows if isinstance(read, Chunk) else b"") == expected.chunk.rows


def test_rows_are_where_they_came_and_begin_at_a_multiple_of_four():
    data = ChunkWriter().message(1, memoryview(ROWS))
    assert read_request(data).rows.obj is data
    assert CHUNK_HEAD_BYTES % 4 == 0


# --- memory that is used again ------------------------------------------------------------------------------


def message_of(memory: ReusedMemory, data: bytes) -> bytes:
    def fill(view: memoryview) -> None:
        view[:] = data

    return memory.message(len(data), fill)


def test_a_message_that_somebody_holds_never_changes():
    memory, held = ReusedMemory(), []
    for size in (1, 300_000, 300_000, 0, 7, 299_999, 600_000, 5):
        data = bytes([len(held) + 1]) * size
        held.append((message_of(memory, data), data))
    assert all(message == data for message, data in held)


def test_memory_is_used_again_once_nobody_holds_the_last_message():
    memory = ReusedMemory()
    places = set()
    for number in range(5):
        message = message_of(memory, bytes([number]) * 300_000)
        places.add(id(message))
        del message
    assert len(places) == 1


def test_whoever_keeps_a_view_of_a_message_gets_an_error_instead_of_it():
    memory, kept = ReusedMemory(), []
    with pytest.raises(BufferError):
        memory.message(10, lambda view: kept.append(view[2:]))


def test_every_method_of_the_service_is_served():
    class Server:
        handlers = ()

        def add_generic_rpc_handlers(self, handlers):
            self.handlers += tuple(handlers)

    server = Server()
    add_replay(ReplayServicer.__new__(ReplayServicer), server)
    service = replay_pb2.DESCRIPTOR.services_by_name["ReplayService"]
    (handler,) = server.handlers
    assert service.methods
    for method in service.methods:
        details = SimpleNamespace(method=f"/{service.full_name}/{method.name}", invocation_metadata=())
        found = handler.service(details)
        assert found is not None, method.name
        assert (found.request_streaming, found.response_streaming) == (
            method.client_streaming,
            method.server_streaming,
        )
