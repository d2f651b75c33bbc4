"""Lease notes: only the end of the process that kept one, on this machine, is proof of it."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from children import forked, importing

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs import lease_note
from dase_grpc.runs.lease_note import LeaseNote, ended_node_id

KEEP = """
import sys
from pathlib import Path
from dase_grpc.runs.lease_note import LeaseNote

note = LeaseNote.keep(Path(sys.argv[1]), sys.argv[2])
print("kept", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lease.json"


@pytest.fixture
def ended(path):
    """The note of a process that has ended, whose node id is `secret`."""
    LeaseNote.keep(path, "secret").close()
    return path


def test_the_end_of_the_process_that_kept_a_note_is_proven_however_it_came(path):
    command = [sys.executable, "-c", KEEP, str(path), "secret"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=importing(Path.cwd()), **pipes) as process:
        assert process.stdout.readline() == b"kept\n"
        assert ended_node_id(path) == ""
        process.send_signal(signal.SIGSTOP)
        assert ended_node_id(path) == ""
        process.kill()
    assert ended_node_id(path) == "secret"
    assert ended_node_id(path) == "secret"


def test_nobody_else_may_read_a_note_also_where_an_older_one_could_be_read(path):
    path.write_text("{}")
    path.chmod(0o644)
    note = LeaseNote.keep(path, "secret")
    assert path.stat().st_mode & 0o777 == 0o600
    note.close()


def test_another_users_note_is_replaced_and_proves_nothing(ended, monkeypatch):
    theirs, opened = ended.stat().st_ino, os.open

    def refused(path, *more, **options):
        if path == ended and ended.exists() and ended.stat().st_ino == theirs:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *more, **options)

    held = ended.open()  # so that its inode is not used again
    monkeypatch.setattr(os, "open", refused)
    assert ended_node_id(ended) == ""
    LeaseNote.keep(ended, "next").close()
    assert ended_node_id(ended) == "next"
    held.close()


def test_a_link_is_replaced_and_what_it_leads_to_stays(path, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    for target in (theirs, tmp_path / "none"):
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        assert ended_node_id(path) == ""
        LeaseNote.keep(path, "next").close()
        assert ended_node_id(path) == "next"
    assert theirs.read_text() == "precious"
    assert not (tmp_path / "none").exists()


def test_the_next_note_takes_the_place_of_the_one_before(path):
    LeaseNote.keep(path, "a long node id of the one before").close()
    LeaseNote.keep(path, "next").close()
    assert ended_node_id(path) == "next"
    assert list(path.parent.iterdir()) == [path]


def test_a_copy_of_a_run_directory_proves_nothing(ended, tmp_path):
    shutil.copy2(ended, tmp_path / "copy.json")
    assert ended_node_id(tmp_path / "copy.json") == ""


@pytest.mark.parametrize("there", ["another boot", ""])
def test_a_note_of_another_machine_or_of_before_a_restart_proves_nothing(ended, monkeypatch, there):
    monkeypatch.setattr(lease_note, "boot_id", lambda: there)
    assert ended_node_id(ended) == ""


def test_where_the_kernel_does_not_tell_its_boot_no_note_is_kept(path, monkeypatch):
    monkeypatch.setattr(lease_note, "boot_id", lambda: "")
    LeaseNote.keep(path, "secret").close()
    assert ended_node_id(path) == ""
    assert path.read_text() == ""


def test_on_a_file_system_without_modes_no_note_is_kept_and_the_learner_goes_on(path, monkeypatch):
    def without_modes(descriptor, mode):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    path.write_text("")
    path.chmod(0o755)
    monkeypatch.setattr(os, "fchmod", without_modes)
    LeaseNote.keep(path, "secret").close()
    assert path.read_text() == ""
    assert ended_node_id(path) == ""


def test_on_a_file_system_without_locks_nothing_is_kept_and_nothing_proven(ended, path, monkeypatch):
    def without_locks(self):
        raise OSError("no locks available")

    monkeypatch.setattr(LeaseNote, "take", without_locks)
    assert ended_node_id(ended) == ""
    LeaseNote.keep(path, "another").close()
    assert json.loads(path.read_text())["node_id"] == "secret"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "\x00", "[" * 4_000, '{"node_id": "x"}', '{"node_id": 7}', '"x"']
)
def test_a_damaged_note_proves_nothing(path, text):
    path.write_text(text)
    assert ended_node_id(path) == ""


def test_a_note_whose_node_id_is_no_text_proves_nothing(ended):
    ended.write_text(json.dumps(json.loads(ended.read_text()) | {"node_id": 7}))  # in place: the same file
    assert ended_node_id(ended) == ""


def test_no_note_and_one_that_may_not_be_opened_prove_nothing(path):
    assert ended_node_id(path) == ""
    path.mkdir()
    assert ended_node_id(path) == ""


def test_a_process_that_the_keeper_forks_neither_keeps_the_note_nor_ends_it(path):
    note = LeaseNote.keep(path, "secret")
    with forked():
        assert ended_node_id(path) == ""
        note.close()
        assert ended_node_id(path) == "secret"


def test_one_who_looks_at_that_moment_does_not_keep_the_holder_from_going_on(ended):
    looking = LeaseNote(os.open(ended, os.O_RDWR))
    assert looking.taken()
    LeaseNote.keep(ended, "next").close()
    looking.close()
    assert ended_node_id(ended) == "secret"  # which the replay does not know any more


def test_a_note_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(RunDirectoryError, match="cannot write"):
        LeaseNote.keep(tmp_path / "none" / "lease.json", "secret")
