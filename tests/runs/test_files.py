"""Files that appear whole or not at all, and folders that only one process writes to."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from children import forked
from contracts.sentences import assert_one_sentence

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs import files
from dase_grpc.runs.files import FolderLock, last_line, require_seal, sealed, staged_file

HOLD = """
import sys
from pathlib import Path
from dase_grpc.runs.files import FolderLock

lock = FolderLock.acquire(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


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


def test_a_file_that_nfs_has_lost_has_no_last_line_and_another_error_is_told(tmp_path, monkeypatch):
    def lost(path: Path, **_: object) -> str:
        raise OSError(number, "lost", str(path))

    monkeypatch.setattr(files, "end_of", lost)
    number = errno.ESTALE
    assert last_line(tmp_path / "evaluations.csv") == ""
    number = errno.EIO
    with pytest.raises(OSError, match="lost"):
        last_line(tmp_path / "evaluations.csv")


def test_a_folder_is_made_locked_and_released(tmp_path):
    folder = tmp_path / "agents" / "0"
    lock = FolderLock.acquire(folder)
    with pytest.raises(RunDirectoryError) as refusal:
        FolderLock.acquire(folder)
    assert_one_sentence(refusal.value, "another process is still writing to", "wait until it has ended")
    lock.close()
    lock.close()
    FolderLock.acquire(folder).close()
    assert list(folder.iterdir()) == []


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(RunDirectoryError, match="another process"):
            FolderLock.acquire(tmp_path)
        other.kill()
    FolderLock.acquire(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot open"):
        FolderLock.acquire(tmp_path / "file" / "agent")


def test_a_process_that_the_owner_forks_does_not_hold_the_lock(tmp_path):
    lock = FolderLock.acquire(tmp_path)
    with forked():
        with pytest.raises(RunDirectoryError, match="another process"):
            FolderLock.acquire(tmp_path)
        lock.close()
        FolderLock.acquire(tmp_path).close()


def test_a_sealed_document_that_holds_nan_now_is_damaged() -> None:
    document = sealed({"step": 3})
    require_seal(document, "it")
    with pytest.raises(RunDirectoryError, match="it does not have the checksum that it names"):
        require_seal({**document, "step": float("nan")}, "it")
