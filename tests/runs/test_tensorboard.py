"""TensorBoard's event files, with and without the extra."""

import subprocess
import sys
from pathlib import Path

import pytest

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.journal import EventFileScalars, NoScalars, flattened, open_tensorboard


def test_nested_numbers_get_slashed_names_and_nothing_else_is_kept() -> None:
    values = {"step": 3, "loss": 0.5, "none": None, "text": "x", "flag": True, "similarity": {"1": 0.25}}
    assert dict(flattened(values)) == {"step": 3.0, "loss": 0.5, "similarity/1": 0.25}


def test_scalars_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    writer = open_tensorboard(tmp_path / "events")
    writer.scalars(1000, {"evaluation": {"return_mean": 2.5}, "nothing": None})
    writer.scalars(2000, {})
    writer.close()
    (file,) = (tmp_path / "events").iterdir()
    events = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
    assert [event.step for event in events] == [1000]
    assert events[0].summary.value[0].tag == "evaluation/return_mean"
    assert events[0].summary.value[0].tensor.float_val[0] == 2.5


def test_without_the_extra_there_is_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    writer = open_tensorboard(tmp_path / "events")
    writer.scalars(1, {"a": 1.0})
    writer.close()
    assert isinstance(writer, NoScalars)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_is_not_loaded_before_a_writer_opens() -> None:
    program = (
        "import sys, dase_grpc.runs.directory, dase_grpc.runs.journal;"
        "sys.exit(any(name in sys.modules for name in ('tensorboard', 'matplotlib', 'gymnasium')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class FullDisk:
    """An event file's writer on a full disk."""

    def add_event(self, event: object) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_disk_that_refuses_is_one_sentence(tmp_path: Path) -> None:
    summary_pb2 = pytest.importorskip("tensorboard.compat.proto.summary_pb2")
    writer = EventFileScalars(tmp_path, FullDisk(), dict, summary_pb2.Summary)
    for write in (lambda: writer.scalars(1, {"a": 1.0}), writer.close):
        with pytest.raises(RunDirectoryError, match="No space left on device; free space, or restore it"):
            write()
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=r"cannot write .*file: File exists"):
        open_tensorboard(tmp_path / "file")
