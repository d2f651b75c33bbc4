"""A buffer's rows on disk: what was added is written, once, and what is present can be read."""

import numpy as np
import pytest

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.files import STAGING_PREFIX
from dase_grpc.runs.rounds import ROWS, RowLog, read_rows

WIDTH, CAPACITY = 3, 10


def numbered(first, end):
    return np.repeat(np.arange(first, end, dtype=np.float32)[:, np.newaxis], WIDTH, axis=1)


def present(total, cut=0):
    """The rows of a ring of ten after `total`, in two parts, as a ring has them."""
    rows = numbered(max(0, total - CAPACITY), total)
    return rows[: len(rows) - cut], rows[len(rows) - cut :]


def read(folder, segments, total):
    first = max(0, total - CAPACITY)
    return np.concatenate(list(read_rows(folder, segments, first=first)))[:, 0].tolist()


def test_what_is_present_can_be_read_after_each_append(tmp_path):
    log = RowLog(tmp_path)
    for total, cut in ((4, 0), (7, 1), (7, 0), (12, 2), (13, 9), (40, 3)):
        segments = log.append(present(total, cut), total=total)
        assert read(tmp_path, segments, total) == list(range(max(0, total - CAPACITY), total))


def test_only_what_was_added_is_written(tmp_path):
    log = RowLog(tmp_path)
    log.append(present(7), total=7)
    log.append(present(12, 2), total=12)
    log.append(present(12, 2), total=12)
    log.append(present(40), total=40)
    assert [path.name for path in sorted(tmp_path.glob(ROWS))] == [
        "rows-000000000000-000000000007.npy",
        "rows-000000000007-000000000012.npy",
        "rows-000000000030-000000000040.npy",
    ]
    assert np.load(tmp_path / "rows-000000000007-000000000012.npy")[:, 0].tolist() == [7, 8, 9, 10, 11]


def test_files_whose_rows_are_all_gone_are_named_no_more_and_can_be_removed(tmp_path):
    log = RowLog(tmp_path)
    log.append(present(7), total=7)
    segments = log.append(present(17), total=17)
    (tmp_path / f"{STAGING_PREFIX}rows").write_bytes(b"half")
    log.keep({each.name for each in segments})
    assert [path.name for path in tmp_path.iterdir()] == ["rows-000000000007-000000000017.npy"]


def test_a_log_goes_on_from_what_is_there(tmp_path):
    segments = RowLog(tmp_path).append(present(7), total=7)
    segments = RowLog(tmp_path, segments).append(present(9), total=9)
    assert [(each.first, each.end) for each in segments] == [(0, 7), (7, 9)]


def test_an_empty_buffer_has_no_file(tmp_path):
    assert RowLog(tmp_path).append(present(0), total=0) == ()


def test_a_flipped_bit_and_a_missing_file_are_found(tmp_path):
    (segment,) = RowLog(tmp_path).append(present(7), total=7)
    path = tmp_path / segment.name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunDirectoryError, match="is damaged: its checksum does not match"):
        segment.read(tmp_path)
    path.unlink()
    with pytest.raises(RunDirectoryError, match="cannot read"):
        segment.read(tmp_path)
