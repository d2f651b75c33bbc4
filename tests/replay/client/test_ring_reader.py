"""RingReader: rows of a ring read in place count only where nothing can have been written over them."""

import os
from dataclasses import replace

import numpy as np
import pytest
from replay.wire.services import SCHEMA, rows_of, serials_of

from dase_grpc.replay.buffer import ring_file
from dase_grpc.replay.buffer.mapped import MappedFile
from dase_grpc.replay.buffer.ring import RingBuffer
from dase_grpc.replay.buffer.ring_file import MappedRing, handle_of, ring_in_memory, spare_slots
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.client.ring_reader import RingReader
from dase_grpc.replay.wire.v1 import replay_pb2

SLOTS = 8


@pytest.fixture
def ring():
    """A ring of 5 transitions in 8 slots; it holds the numbers 0 to 4, whose serials are one more."""
    made = MappedRing(SCHEMA, 5, MappedFile.in_memory(SLOTS * SCHEMA.row_bytes))
    made.append(rows_of(1, 5))
    return made


def told_of(ring, **changes):
    handle = ring.handle()
    said = {
        "pid": handle.pid,
        "state_fd": handle.state_fd,
        "rows_fd": handle.rows_fd,
        "nonce": handle.nonce,
        "slots": ring.slots,
    }
    return replay_pb2.Ring(**said | changes)


def reader_of(ring, **changes):
    return RingReader.find(told_of(ring, **changes), SCHEMA)


def gathered(reader, *numbers):
    rows = reader.gather(np.array(numbers, np.int64))
    return None if rows is None else serials_of(rows)


def test_rows_are_those_of_the_numbers_also_after_the_ring_has_gone_round(ring):
    reader = reader_of(ring)
    assert gathered(reader, 4, 0, 4) == [5, 1, 5]
    for serial in range(6, 30):
        ring.append(rows_of(serial, serial))
        assert gathered(reader, serial - 1, serial - 5) == [serial, serial - 4]


def test_a_row_counts_until_the_one_that_takes_its_slot_may_be_in_writing(ring):
    reader = reader_of(ring)
    ring.append(rows_of(6, 8))
    assert gathered(reader, 0) == [1]
    ring.handle().begin(9)
    assert gathered(reader, 0) is None
    assert gathered(reader, 1) == [2]
    assert gathered(reader, 1, 0) is None


def test_the_state_says_so_before_the_first_byte_of_a_row_is_written(ring, monkeypatch):
    reader, before, seen = reader_of(ring), MappedFile.put, []

    def put(file, offset, data):
        seen.append((offset // SCHEMA.row_bytes, int(reader.begun[0])))
        before(file, offset, data)

    monkeypatch.setattr(MappedFile, "put", put)
    ring.append(rows_of(6, 9))  # 3 rows at the end of the file, 1 at its beginning
    assert seen == [(5, 9), (0, 9)]


def test_what_is_overwritten_while_it_is_gathered_does_not_count(ring, monkeypatch):
    """The gather and the writer meet in every order: the row is the old one, a torn one or the new one."""
    reader = reader_of(ring)

    class Interrupted:
        """Rows, of which some are written to in the middle of a gather."""

        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def take(self, slots, axis):
            first = self.rows.take(slots[:1], axis=axis)
            ring.append(rows_of(ring.total + 1, ring.total + 4))
            return np.concatenate([first, self.rows.take(slots[1:], axis=axis)])

    torn = replace(reader, rows=Interrupted(reader.rows))
    assert gathered(torn, 0, 1) is None  # number 8 took the slot of number 0
    assert gathered(torn, 5, 6) == [6, 7]  # the ring has 13 now, which took those up to number 4


def test_a_number_that_was_not_written_yet_does_not_count(ring):
    assert gathered(reader_of(ring), 5) is None


def test_numbers_that_a_ring_draws_stay_clear_of_its_guard():
    ring = ring_in_memory(SCHEMA, 50)
    reader, rng = reader_of(ring), np.random.default_rng(0)
    ring.append(rows_of(1, 100))
    numbers = ring.draw(64, rng) + ring.total - len(ring)
    for _ in range(spare_slots(SCHEMA) // 50):
        ring.append(rows_of(1, 50))
    assert reader.gather(numbers) is not None
    ring.append(rows_of(1, 50))
    ring.append(rows_of(1, 50))
    assert reader.gather(numbers) is None


def test_nothing_counts_once_the_service_has_let_its_files_go(ring):
    reader = reader_of(ring)
    ring.close()
    assert gathered(reader, 4) is None


def test_nothing_counts_where_another_file_has_taken_the_descriptor(ring):
    told, reader = told_of(ring), reader_of(ring)
    ring.handle().close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]
    try:
        assert told.state_fd in others
        assert gathered(reader, 4) is None
    finally:
        for each in others:
            os.close(each)


def test_after_a_restart_on_the_same_disk_only_the_new_state_counts(tmp_path):
    def started():
        run = SharedRun("the-run", capacity=5, min_size=1, seed=0, ttl_s=10.0)
        return run.keep_in(tmp_path / "data", boot_id="boot", now=0.0)

    first = started()
    first.join("node", wanted=0, run_id="", schema=SCHEMA, now=0.0)
    first.store.append("w", 1, rows_of(1, 5), agent_id=0)
    reader = reader_of(first.store.ring)
    assert gathered(reader, 4, 0) == [5, 1]
    first.close()
    assert gathered(reader, 4, 0) is None
    second = started()
    assert gathered(reader, 4, 0) is None
    assert gathered(reader_of(second.store.ring), 4, 0) == [5, 1]
    second.close()


def test_what_is_mapped_cannot_be_written_to(ring):
    reader = reader_of(ring)
    with pytest.raises(ValueError, match="read-only"):
        reader.rows[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        reader.begun[0] = 1


def test_a_file_in_memory_keeps_its_size():
    file = MappedFile.in_memory(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(file.descriptor, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": bytes(16)},
        {"nonce": b""},
        {"pid": 2**32 - 1},
        {"state_fd": 2**31},
        {"slots": SLOTS + 1},
        {"slots": 0},
    ],
)
def test_a_ring_that_is_not_here_is_not_found(ring, change):
    with pytest.raises(OSError, match=r"No such file|is not its"):
        reader_of(ring, **change)


def test_what_is_no_regular_file_is_not_mapped_and_not_waited_for(ring, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="is not its file"):
            reader_of(ring, state_fd=pipe)
    finally:
        os.close(pipe)


def test_another_users_file_is_not_mapped(ring, monkeypatch):
    told = told_of(ring)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="is not its file"):
        RingReader.find(told, SCHEMA)


def test_a_ring_that_is_no_file_has_no_handle(ring, monkeypatch):
    assert handle_of(RingBuffer(SCHEMA, 5)) is None
    assert handle_of(ring) is ring.handle()
    monkeypatch.setattr(ring_file, "can_map", lambda: False)
    assert handle_of(ring) is None
    assert type(ring_in_memory(SCHEMA, 5)) is RingBuffer
