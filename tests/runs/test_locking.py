"""Only one process writes an agent's results."""

import subprocess
import sys

import pytest
from children import forked
from contracts.sentences import assert_one_sentence

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.files import FolderLock

HOLD = """
import sys
from pathlib import Path
from dase_grpc.runs.files import FolderLock

lock = FolderLock.acquire(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


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
