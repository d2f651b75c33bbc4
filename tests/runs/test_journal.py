"""An agent's results as they come, and TensorBoard's event files with and without the extra."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from small import small_config

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.checkpoint import load_checkpoint
from dase_grpc.runs.directory import AgentDirectory
from dase_grpc.runs.journal import AgentJournal, EventFileScalars, flattened, open_tensorboard
from dase_grpc.runs.logs import read_evaluations, read_metrics
from dase_grpc.schema import TransitionSchema

CONFIG = small_config()
SCHEMA = TransitionSchema("worlds:PointGoal", 1, 1, (-1.0,), (1.0,))
EVALUATION = {"return_mean": -2.5, "return_std": 0.5, "episodes": 2, "wall_seconds": 1.25}


class ListScalars:
    def __init__(self):
        self.written, self.closed = [], False

    def scalars(self, step, values):
        self.written.append((step, dict(values)))

    def close(self):
        self.closed = True


class FullDisk:
    """An event file's writer on a full disk."""

    def add_event(self, event):
        raise OSError(28, "No space left on device")

    def close(self):
        raise OSError(28, "No space left on device")


@pytest.fixture
def scalars():
    return ListScalars()


@pytest.fixture
def directory(tmp_path):
    return AgentDirectory(tmp_path / "agents" / "3")


@pytest.fixture
def journal(directory, scalars):
    return AgentJournal(directory, config=CONFIG, schema=SCHEMA, tensorboard=scalars)


def test_an_evaluation_is_a_line_of_the_table_and_two_scalars(journal, directory, scalars):
    journal.evaluation(step=50, **EVALUATION)
    curve = read_evaluations(directory.evaluations.path)
    assert (curve.step.tolist(), curve.return_mean.tolist()) == ([50], [-2.5])
    assert scalars.written == [(50, {"evaluation/return_mean": -2.5, "evaluation/return_std": 0.5})]


def test_metrics_are_a_record_and_scalars_at_their_step(journal, directory, scalars):
    values = {"step": 50, "updates": 31, "similarity": {"0": 0.25}, "actor_loss": None}
    journal.metrics(values)
    assert read_metrics(directory.metrics.path) == [values]
    assert scalars.written == [(50, values)]
    journal.close()
    assert scalars.closed


def test_a_checkpoint_can_be_read_on_its_own_and_an_unknown_score_is_null(journal, directory):
    assert journal.last_checkpoint is None
    saved = SimpleNamespace(
        agent={"actor.weight": torch.ones(2)}, numbers={"steps": 50}, tensors={"totals": torch.zeros(3)}
    )
    journal.checkpoint(step=50, saved=saved, scores={"evaluation": None, "return": -2.5})
    assert journal.last_checkpoint == directory.checkpoints / "step-000000050"
    checkpoint = load_checkpoint(journal.last_checkpoint)
    assert (checkpoint.step, checkpoint.agent_id) == (50, 3)
    assert (checkpoint.config, checkpoint.schema) == (CONFIG, SCHEMA)
    assert checkpoint.metadata["return"] == -2.5
    assert checkpoint.tensors["actor.weight"].tolist() == [1.0, 1.0]
    assert checkpoint.training == {"steps": 50}
    assert checkpoint.training_tensors["totals"].tolist() == [0.0, 0.0, 0.0]
    assert json.loads((journal.last_checkpoint / "checkpoint.json").read_text())["evaluation"] is None


def test_nested_numbers_get_slashed_names_and_nothing_else_is_kept():
    values = {"step": 3, "loss": 0.5, "none": None, "text": "x", "flag": True, "similarity": {"1": 0.25}}
    assert dict(flattened(values)) == {"step": 3.0, "loss": 0.5, "similarity/1": 0.25}


def test_an_opened_journal_writes_scalars_that_can_be_read_back(directory):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    journal = AgentJournal.open(directory, config=CONFIG, schema=SCHEMA)
    journal.evaluation(step=1000, **EVALUATION)
    journal._show(2000, {"nothing": None})
    journal.close()
    (file,) = directory.tensorboard.iterdir()
    events = [event for event in loader.EventFileLoader(str(file)).Load() if event.summary.value]
    assert [event.step for event in events] == [1000]
    assert events[0].summary.value[0].tag == "evaluation/return_mean"
    assert events[0].summary.value[0].tensor.float_val[0] == -2.5


def test_without_the_extra_there_is_silence(directory, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert open_tensorboard(directory.tensorboard) is None
    journal = AgentJournal.open(directory, config=CONFIG, schema=SCHEMA)
    journal.metrics({"step": 1})
    journal.close()
    assert list(directory.path.iterdir()) == [directory.metrics.path]


@pytest.mark.slow
def test_tensorboard_is_not_loaded_before_a_writer_opens():
    program = (
        "import sys, dase_grpc.runs.directory, dase_grpc.runs.journal;"
        "sys.exit(any(name in sys.modules for name in ('tensorboard', 'matplotlib', 'gymnasium')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_disk_that_refuses_is_one_sentence(tmp_path):
    summary_pb2 = pytest.importorskip("tensorboard.compat.proto.summary_pb2")
    writer = EventFileScalars(tmp_path, FullDisk(), dict, summary_pb2.Summary)
    for write in (lambda: writer.scalars(1, {"a": 1.0}), writer.close):
        with pytest.raises(RunDirectoryError, match="No space left on device; free space, or restore it"):
            write()
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=r"cannot write .*file: File exists"):
        open_tensorboard(tmp_path / "file")
