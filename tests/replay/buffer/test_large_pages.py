"""Files in memory in large pages, which are taken as they are written to and never insisted on."""

import mmap
import os
import re

import numpy as np
import pytest

from dase_grpc.replay.buffer.large_pages import LARGE, LargePages
from dase_grpc.replay.buffer.mapped import MappedFile

SIZE = 3 * LARGE + 12_345


def large_bytes(mapped: memoryview) -> int:
    """How much of what lies there this process has in large pages, once it has read all of it."""
    found = np.frombuffer(mapped, np.uint8)
    assert found.max()
    with open("/proc/self/smaps", encoding="utf-8") as told:
        _, _, section = told.read().partition(f"\n{found.ctypes.data:x}-")
    kib = re.search(r"ShmemPmdMapped:\s+(\d+) kB", section)
    assert kib
    return int(kib[1]) * 1024


def kernel_makes_large_pages() -> bool:
    descriptor = os.memfd_create("asked")
    try:
        os.ftruncate(descriptor, LARGE)
        mapping = LargePages(descriptor, LARGE, writable=True)
        mapping.bytes[0] = 1
        mapping._room.madvise(25, mapping._start, LARGE)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


@pytest.fixture
def file():
    file = MappedFile.in_memory(SIZE)
    yield file
    file.close()


def taken(file: MappedFile) -> int:
    return os.fstat(file.descriptor).st_blocks * 512


def written(file: MappedFile, end: int, *, piece: int) -> bytes:
    data = np.random.default_rng(piece).bytes(end)
    for begin in range(0, end, piece):
        file.put(begin, data[begin : min(begin + piece, end)])
    return data


@pytest.mark.parametrize("piece", [1_000, LARGE, LARGE + 1, SIZE])
def test_what_is_put_is_what_every_mapping_reads(file, piece):
    data = written(file, SIZE, piece=piece)
    reader = LargePages(file.descriptor, SIZE, writable=False)
    assert bytes(file.bytes) == bytes(reader.bytes) == os.pread(file.descriptor, SIZE, 0) == data
    again = written(file, SIZE, piece=piece + 1)
    assert bytes(reader.bytes) == again


@pytest.mark.parametrize("end", [0, 1, 10_000, LARGE, LARGE + 1, 3 * LARGE])
def test_no_more_is_taken_than_the_page_that_was_begun(file, end):
    written(file, end, piece=max(1, end))
    assert end <= taken(file) <= -(-end // LARGE) * LARGE


def test_pages_are_large_where_the_kernel_makes_such(file):
    if not kernel_makes_large_pages():
        pytest.skip("this kernel makes no large pages of files in memory")
    written(file, SIZE, piece=100_000)
    reader = LargePages(file.descriptor, SIZE, writable=False)
    assert large_bytes(file.bytes) == large_bytes(reader.bytes) == 3 * LARGE


@pytest.mark.parametrize("refused_at", [0, 1, 2])
def test_a_kernel_that_refuses_is_not_asked_again_and_nothing_is_lost(monkeypatch, refused_at):
    asked = []

    class Refusing(mmap.mmap):
        def madvise(self, *advice):
            if advice == (mmap.MADV_HUGEPAGE,):
                return
            asked.append(advice)
            if len(asked) > refused_at:
                raise OSError(22, "Invalid argument")

    monkeypatch.setattr("dase_grpc.replay.buffer.large_pages.mmap.mmap", Refusing)
    file = MappedFile.in_memory(SIZE)
    data = written(file, SIZE, piece=10_000)
    assert bytes(file.bytes) == data
    assert len(asked) == refused_at + 1
    file.close()


def test_a_mapping_begins_where_a_large_page_can_and_a_reader_cannot_write(file):
    for writable in (True, False):
        mapping = LargePages(file.descriptor, SIZE, writable=writable)
        assert np.frombuffer(mapping.bytes, np.uint8).ctypes.data % LARGE == 0
        assert (len(mapping.bytes), mapping.bytes.readonly) == (SIZE, not writable)


def test_a_file_that_cannot_be_mapped_is_an_os_error():
    reading, writing = os.pipe()
    with pytest.raises(OSError, match=r"No such device|Permission denied"):
        LargePages(reading, LARGE, writable=False)
    os.close(reading)
    os.close(writing)


def test_a_mapping_is_given_back_with_its_last_view(file):
    def mapped() -> int:
        with open("/proc/self/maps", encoding="utf-8") as told:
            return sum("/memfd:dase" in line for line in told)

    before = mapped()
    view = LargePages(file.descriptor, SIZE, writable=False).bytes
    assert mapped() == before + 1
    del view
    assert mapped() == before
