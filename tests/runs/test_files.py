"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from dase_grpc.runs.files import last_line, staged_file


def test_a_staged_file_takes_the_place_of_the_old_one_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with staged_file(path) as file:
        file.write(b"one, ")
        file.write(b"two")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"one, two"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), staged_file(path) as file:
        file.write(bytes(1 // 0))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("", ""),
        ("one", ""),
        ("one\n", "one"),
        ("one\ntwo\n", "two"),
        ("one\ntwo\nthr", "two"),
        ("x" * 100 + "\ntwo\n", "two"),
        ("x" * 10 + "\n", "x" * 7),
    ],
)
def test_the_last_finished_line_is_found_without_reading_all(tmp_path: Path, text: str, last: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert last_line(path, within_bytes=8) == last


def test_a_file_that_is_not_there_has_no_last_line(tmp_path: Path) -> None:
    assert last_line(tmp_path / "none") == ""
