"""An algorithm from a file of the user's: in one process, stacked, in a cluster; where it is refused."""

import sys
from pathlib import Path

import pytest
from broken_agents import BROKEN
from contracts.sentences import assert_one_sentence, refuses
from resuming import assert_equal, config, curve, records, resume, train, train_until
from small import small_flags
from typer.testing import CliRunner

from dase_grpc.cli.main import app
from dase_grpc.errors import AlgorithmError
from dase_grpc.launch.evaluate import evaluate_checkpoint
from dase_grpc.launch.export import export_policy
from dase_grpc.launch.train import run_name
from dase_grpc.runs.checkpoint import latest, load_checkpoint
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_metrics
from dase_grpc.runs.reports.report import write_report

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_agent.py"
MINE = """
from broken_agents import Plain
from my_agent import DriftingTD3
from dase_grpc.learning.agents.td3 import TD3

class Again(TD3):
    pass
"""


@pytest.fixture
def mine(monkeypatch) -> Path:
    """A module of its own, and the example's, in the folder that the test works in."""
    here = Path.cwd()
    (here / "my_agent.py").write_text(EXAMPLE.read_text())
    (here / "agents_of_mine.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield here
    forget()


def forget() -> None:
    for name in ("my_agent", "agents_of_mine"):
        sys.modules.pop(name, None)


def own(name: str, **settings):
    return config(agent__algorithm=f"agents_of_mine:{name}", **settings)


def learned(run: RunDirectory) -> list:
    """All that agents have become: curves, lines of metrics and the tensors of their checkpoints."""
    states = [load_checkpoint(latest(agent.checkpoints)).tensors for agent in run.agents()]
    numbers = [{name: value.tolist() for name, value in state.items()} for state in states]
    return [(curve(agent), records(agent), each) for agent, each in zip(run.agents(), numbers, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), [("lockstep", "Again"), ("stack", "Again"), ("lockstep", "Plain")])
def test_a_class_that_repeats_the_built_in_one_gives_its_numbers_to_the_bit(mine, tmp_path, mode, name):
    built_in = train(tmp_path, config(), "built-in", mode=mode)
    assert learned(train(tmp_path, own(name), "own", mode=mode)) == learned(built_in)


@pytest.mark.slow
def test_a_pair_that_distils_may_be_of_ones_own(mine, tmp_path):
    settings = {"train__method": "dpd", "dpd__publish_every": 7}
    runs = [
        train(tmp_path, each, name)
        for name, each in (("built-in", config(**settings)), ("own", own("Again", **settings)))
    ]
    curves, others = ([(curve(agent), records(agent)) for agent in run.agents()] for run in runs)
    assert curves == others


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "stack"])
def test_a_run_goes_on_with_what_its_noise_remembers(mine, tmp_path, mode):
    straight = train(tmp_path, own("DriftingTD3"), "straight", mode=mode)
    stopped = train_until(tmp_path, own("DriftingTD3"), 70, "stopped", mode=mode)
    forget()  # so that it is imported again
    assert_equal(straight, resume(stopped))
    assert records(straight.agent(0)) != records(train(tmp_path, config(), mode=mode).agent(0))


@pytest.mark.slow
def test_the_policy_is_evaluated_and_exported_without_the_module_and_its_critics_with_it(mine, tmp_path):
    run = train(tmp_path, own("Again"))
    ensemble = evaluate_checkpoint(run.path, 2, agent="ensemble")
    assert ensemble[0].evaluation.episodes == 2
    forget()
    (mine / "agents_of_mine.py").unlink()
    assert len(evaluate_checkpoint(run.path, 2)) == 2
    assert export_policy(run.path, tmp_path / "policy.pt").exists()
    with pytest.raises(AlgorithmError, match="there is no module 'agents_of_mine' for the algorithm"):
        evaluate_checkpoint(run.path, 2, agent="ensemble")


@pytest.mark.slow
def test_files_reports_and_folders_name_it(mine, tmp_path):
    run = train(tmp_path, own("Again", train__agents=1))
    assert 'algorithm = "agents_of_mine:Again"' in (run.path / "run.toml").read_text()
    assert RunDirectory.open(run.path).config.agent.algorithm == "agents_of_mine:Again"
    assert "agents_of_mine:Again, one agent" in write_report(run).read_text(encoding="utf-8")
    assert "PointGoal-agents_of_mine-Again-k1-" in run_name(run.config)


ALONE = {
    "--stack": ["--stack"],
    "train.method = dpd": ["--lockstep", "--method=dpd"],
    "replay.sampling = prioritised": ["--lockstep", "--set=replay.sampling=prioritised"],
    "dps.measure = advantage": ["--lockstep", "--set=dps.measure=advantage"],
    "train.cuda_graph = true": ["--lockstep", "--set=train.cuda_graph=true"],
}


def refused(*flags: str) -> AlgorithmError:
    """What a command is refused with before it has made anything."""
    ended = CliRunner().invoke(app, ["train", "--env=Pendulum-v1", *flags])
    assert isinstance(ended.exception, AlgorithmError), ended.output
    assert ended.exception.exit_code == 2
    assert not Path("runs").exists()
    return ended.exception


@pytest.mark.parametrize("asked", ALONE)
def test_what_only_an_actor_critic_can_do_is_refused_for_others(asked):
    error = refused("--algo=broken_agents:Plain", *ALONE[asked])
    assert_one_sentence(error, f"{asked} needs an algorithm that subclasses ActorCritic", "leave")


@pytest.mark.slow
def test_an_ensemble_by_values_needs_them(mine, tmp_path):
    run = train(tmp_path, own("Plain"))
    with refuses(AlgorithmError, "an ensemble needs values and passes of an ActorCritic, which Plain is not"):
        evaluate_checkpoint(run.path, 2, agent="ensemble")


@pytest.mark.parametrize("mode", ["--lockstep", "--stack", "--agents=2"])
def test_one_that_breaks_a_promise_is_refused_before_anything_is_made(mode):
    assert_one_sentence(refused("--algo=broken_agents:Noisy", mode), "broken_agents:Noisy breaks the promise")


@pytest.mark.slow
def test_promises_of_an_actor_critic_are_asked_where_they_are_needed(tmp_path):
    names = {name: agent.__name__ for agent, (name, _) in BROKEN.items()}
    scaled, silent = (f"--algo=broken_agents:{names[promise]}" for promise in ("stack", "errors"))
    assert "the promise of agents 'stack'" in str(refused(scaled, "--stack"))
    prioritised = "--set=replay.sampling=prioritised"
    assert "the promise of agents 'errors'" in str(refused(silent, "--lockstep", prioritised))
    train(tmp_path, config(agent__algorithm=f"broken_agents:{names['stack']}"))


def test_each_learner_tries_it_out(tmp_path):
    with pytest.raises(AlgorithmError, match="breaks the promise"):
        train(tmp_path, config(agent__algorithm="broken_agents:Noisy"))


@pytest.mark.slow
def test_learners_and_actors_of_a_cluster_import_it(mine):
    flags = ["train", "--name=mine", "--algo=my_agent:DriftingTD3", "--env=Pendulum-v1", "--actors=1"]
    settings = small_flags("Pendulum-v1", agent__batch_size=16, train__explore="false")
    ended = CliRunner().invoke(app, [*flags, *settings])
    assert ended.exit_code == 0, ended.output
    run = RunDirectory.open(Path("runs/mine"))
    assert run.config.agent.algorithm == "my_agent:DriftingTD3"
    assert [read_metrics(agent.metrics.path)[-1]["updates"] for agent in run.agents()] > [50, 50]
