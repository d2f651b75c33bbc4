import json
from dataclasses import dataclass, field

import pytest
import torch
from small import small_config

from dase_grpc.runs.checkpoint import load_checkpoint
from dase_grpc.runs.directory import AgentDirectory
from dase_grpc.runs.journal import AgentJournal
from dase_grpc.runs.logs import read_evaluations, read_metrics
from dase_grpc.schema import TransitionSchema

CONFIG = small_config()
SCHEMA = TransitionSchema("worlds:PointGoal", 1, 1, (-1.0,), (1.0,))
EVALUATION = {"return_mean": -2.5, "return_std": 0.5, "episodes": 2, "wall_seconds": 1.25}


@dataclass
class ListScalars:
    written: list = field(default_factory=list)
    closed: bool = False

    def scalars(self, step, values):
        self.written.append((step, dict(values)))

    def close(self):
        self.closed = True


@dataclass(frozen=True)
class AtRest:
    agent: dict
    numbers: dict
    tensors: dict


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


def test_a_checkpoint_can_be_read_on_its_own(journal, directory):
    assert journal.last_checkpoint is None
    saved = AtRest({"actor.weight": torch.ones(2)}, {"counters": {"steps": 50}}, {"totals": torch.zeros(3)})
    journal.checkpoint(step=50, saved=saved, scores={"evaluation": -2.5})
    assert journal.last_checkpoint == directory.checkpoints / "step-000000050"
    checkpoint = load_checkpoint(journal.last_checkpoint)
    assert (checkpoint.step, checkpoint.agent_id) == (50, 3)
    assert (checkpoint.config, checkpoint.schema) == (CONFIG, SCHEMA)
    assert checkpoint.metadata["evaluation"] == -2.5
    assert checkpoint.tensors["actor.weight"].tolist() == [1.0, 1.0]
    assert checkpoint.training == {"counters": {"steps": 50}}
    assert checkpoint.training_tensors["totals"].tolist() == [0.0, 0.0, 0.0]


def test_a_score_that_is_not_known_is_null(journal):
    journal.checkpoint(step=0, saved=AtRest({}, {}, {}), scores={"evaluation": None})
    text = (journal.last_checkpoint / "checkpoint.json").read_text()
    assert json.loads(text)["evaluation"] is None


def test_closing_closes_the_scalars(journal, scalars):
    journal.close()
    assert scalars.closed


def test_an_opened_journal_writes_to_tensorboard_where_it_is_installed(directory):
    pytest.importorskip("tensorboard")
    journal = AgentJournal.open(directory, config=CONFIG, schema=SCHEMA)
    journal.evaluation(step=0, **EVALUATION)
    journal.close()
    assert len(list(directory.tensorboard.iterdir())) == 1
