"""Where a cluster's buffer lies, and whether there is room for it."""

import sys

import pytest
from contracts.sentences import assert_one_sentence
from small import new_run, small_config
from store.store_cases import SCHEMA

from dase_grpc.errors import ConfigError, DataDirectoryError
from dase_grpc.launch import storage
from dase_grpc.launch.resume import buffer_is_gone
from dase_grpc.launch.storage import has_buffer, keeps_on_disk, put_buffer_aside, reserve
from dase_grpc.store import SharedRun


def run_on_disk(path) -> SharedRun:
    """A replay at work in a folder."""
    run = SharedRun.on_disk(
        "run", capacity=10, min_size=1, seed=0, ttl_s=10.0, data_dir=path, boot_id="b", now=0.0
    )
    run.join("node", wanted=0, run_id="run", schema=SCHEMA, now=0.0)
    return run


def test_the_room_that_a_buffer_takes_is_told_and_nothing_is_made(tmp_path):
    told = reserve(small_config(), SCHEMA, tmp_path / "not" / "there")
    assert told.startswith("buffer on disk: 1")
    assert "MiB are reserved in the run's folder (--set replay.storage=memory keeps it in memory)" in told
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_refused_with_both_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_free_bytes", lambda path: 2**20)
    with pytest.raises(
        ConfigError, match=r"of disk in .*, and 1\.0 MiB are free; free space there"
    ) as caught:
        reserve(small_config(), SCHEMA, tmp_path)
    assert_one_sentence(caught.value)
    told = reserve(small_config(replay__storage="memory"), SCHEMA, tmp_path)
    assert told == "buffer in memory: it ends with the replay's process"


def test_a_buffer_larger_than_any_disk_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the buffer takes [\d,.]+ MiB of disk in"):
        reserve(small_config(replay__capacity=10**15), SCHEMA, tmp_path)


def test_without_linux_the_buffer_is_in_memory_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keeps_on_disk(small_config())
    assert "since only Linux can keep it on disk" in reserve(small_config(), SCHEMA, tmp_path)


def test_a_buffer_is_found_and_put_aside_but_not_while_a_replay_works_on_it(tmp_path):
    directory = new_run(tmp_path, small_config())
    assert not has_buffer(directory)
    assert put_buffer_aside(directory) is None
    run = run_on_disk(directory.replay)
    for refused in (has_buffer, put_buffer_aside):
        with pytest.raises(DataDirectoryError, match="is in use by another replay"):
            refused(directory)
    run.close()
    assert has_buffer(directory)
    assert put_buffer_aside(directory) == directory.path / "replay-before-resume-1"
    assert not has_buffer(directory)
    run_on_disk(directory.replay).close()
    assert put_buffer_aside(directory) == directory.path / "replay-before-resume-2"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can keep the buffer on disk")
@pytest.mark.parametrize(
    ("kept", "told"),
    [("disk", "is not in its replay/ any more; with"), ("memory", "was kept in memory and is gone; with")],
)
def test_a_buffer_that_is_gone_is_missed_where_it_was(tmp_path, kept, told):
    error = buffer_is_gone(new_run(tmp_path, small_config(replay__storage=kept)))
    assert_one_sentence(error, told, "--empty-buffer")
