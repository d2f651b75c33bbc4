"""A measure from a file of the user's, in one process, as a stack, in a cluster, and where it is refused."""

import json
import sys
from pathlib import Path

import pytest
from contracts.sentences import assert_one_sentence
from resuming import assert_equal, config, records, resume, train, train_until
from typer.testing import CliRunner

from dase_grpc.cli.main import app
from dase_grpc.errors import MeasureError
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_evaluations
from dase_grpc.runs.reports.report import write_report

MINE = '''
import torch
from dase_grpc.learning.similarity.measures import similarity

def again(context):
    return similarity(context)

class Fading:
    """Weighs by one over the number of its calls."""
    def __init__(self):
        self.calls = torch.zeros((), dtype=torch.int64)
    def __call__(self, context):
        self.calls += 1
        return torch.full((len(context.external),), 1 / float(self.calls))
    def state_dict(self):
        return {"calls": self.calls}
    def load_state_dict(self, state):
        self.calls = state["calls"]

def worth(context):
    gained = context.q(context.external.observation, context.external.action)
    return (gained > 0).float() + context.own.reward.numel() / 32

def wrong(context):
    return torch.ones(3)
'''


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """A module of its own in the folder that the test works in."""
    folder = Path.cwd()
    (folder / "measures_of_mine.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield folder / "measures_of_mine.py"
    sys.modules.pop("measures_of_mine", None)


def learned(run: RunDirectory) -> list[dict]:
    """What an agent's updates came to, without how similarity by itself is told."""
    kept = ("step", "critic_loss", "actor_loss", "q_mean", "episode_return")
    return [{key: record[key] for key in kept} for agent in run.agents() for record in records(agent)]


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["pooled", "transition"])
@pytest.mark.parametrize("mode", ["lockstep", "stack"])
def test_a_measure_that_repeats_the_built_in_one_gives_its_numbers(mine, tmp_path, mode, scope):
    built_in = train(tmp_path, config(dps__scope=scope), "built-in", mode=mode)
    own = train(tmp_path, config(dps__scope=scope, dps__measure="measures_of_mine:again"), "own", mode=mode)
    assert learned(own) == learned(built_in)
    for ours, theirs in zip(own.agents(), built_in.agents(), strict=True):
        found, expected = (read_evaluations(each.evaluations.path) for each in (ours, theirs))
        assert found.return_mean.tolist() == expected.return_mean.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "stack"])
@pytest.mark.parametrize("algorithm", ["td3", "sac", "ddpg"])
def test_a_measure_may_ask_for_values_and_changes_nothing_by_that(
    mine, tmp_path, monkeypatch, mode, algorithm
):
    """Weights that are all the same are those of `none`, whatever was asked for meanwhile."""
    (mine.parent / "asks.py").write_text(
        "import torch\n"
        "def nothing(context):\n"
        "    rows = context.own, context.external\n"
        "    assert all(len(context.q(each.observation, each.policy_action)) == len(each) for each in rows)\n"
        "    return torch.ones(len(context.external))\n"
    )
    plain = config(agent__algorithm=algorithm, dps__divergence="none")
    asking = config(agent__algorithm=algorithm, dps__measure="asks:nothing")
    runs = [train(tmp_path, each, name, mode=mode) for name, each in (("plain", plain), ("asking", asking))]
    assert learned(runs[1]) == learned(runs[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "stack"])
def test_a_run_goes_on_with_what_its_measure_remembers(mine, tmp_path, mode):
    settings = config(dps__measure="measures_of_mine:Fading")
    straight = train(tmp_path, settings, "straight", mode=mode)
    stopped = train_until(tmp_path, settings, 90, "stopped", mode=mode)
    assert_equal(straight, resume(stopped))


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["relative", "relative_rows", "advantage", "measures_of_mine:worth"])
def test_weights_are_written_under_the_measures_name(mine, tmp_path, measure):
    run = train(tmp_path, config(dps__measure=measure))
    assert f'measure = "{measure}"' in (run.path / "run.toml").read_text()
    last = records(run.agent(0))[-1]
    assert last["similarity_weight"] > 0
    assert last["similarity"]["1"] > 0 == last["degenerate_updates"]
    assert RunDirectory.open(run.path).config.dps.measure == measure
    text = write_report(run).read_text(encoding="utf-8")
    assert f"the mean weight of the external transitions by the measure {measure}" in " ".join(text.split())
    assert "The two summands of ρ" not in text


@pytest.mark.parametrize("mode", ["--lockstep", "--stack", "--agents=2"])
def test_a_wrong_measure_is_refused_before_anything_is_made(mine, mode):
    flags = ["train", mode, "--env=Pendulum-v1", "--set=dps.measure=measures_of_mine:wrong"]
    ended = CliRunner().invoke(app, flags)
    assert isinstance(ended.exception, MeasureError)
    assert_one_sentence(ended.exception, "returned shape (3,) for 32 external rows")
    assert ended.exception.exit_code == 2
    assert not Path("runs").exists()


@pytest.mark.slow
def test_learners_of_a_cluster_import_the_users_measure(mine):
    flags = ["train", "--agents=2", "--env=Pendulum-v1", "--steps=400", "--name=mine"]
    settings = {
        "agent.start_steps": 100,
        "agent.batch_size": 32,
        "train.log_every": 50,
        "dps.measure": "measures_of_mine:worth",
    }
    ended = CliRunner().invoke(app, [*flags, *(f"--set={key}={value}" for key, value in settings.items())])
    assert ended.exit_code == 0, ended.output
    lines = Path("runs/mine/agents/0/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["similarity_weight"] > 0
    assert "measures_of_mine:worth" in Path("runs/mine/report.html").read_text()
