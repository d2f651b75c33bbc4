"""Runs whose environments change settings of the process: the same numbers, and nothing goes elsewhere."""

import threading
from pathlib import Path

import pytest
from meddling import DEEDS, module_that, put_back
from small import new_run, small_config

from dase_grpc.launch.evaluate import evaluate_checkpoint
from dase_grpc.launch.lockstep import BUFFER_FILE, open_lockstep, run_lockstep
from dase_grpc.launch.train import TrainOptions, train_here
from dase_grpc.runs.checkpoint import STATE_FILE, latest
from dase_grpc.runs.directory import RunDirectory

pytestmark = pytest.mark.slow

CONFIGS = {
    "td3": {},
    "ddpg": {"agent__algorithm": "ddpg", "agent__normalise_observations": True, "dps__scope": "agent"},
    "sac": {"agent__algorithm": "sac", "dps__scope": "transition"},
    "dpd": {"train__method": "dpd", "dpd__publish_every": 10},
    "stack": {"dps__memory": 20.0},
}

LATE = [deed for deed in DEEDS if deed not in ("computes elsewhere", "takes threads")]
"""What our own code stands; more threads stand in each other's way here, and take minutes."""


@pytest.fixture(autouse=True)
def process(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with put_back():
        yield


def run(root: Path, case: str, env: str = "meddling:Meddles", **kwargs) -> RunDirectory:
    config = small_config(env, env__kwargs=kwargs, train__steps=60, **CONFIGS[case])
    directory = new_run(root, config)
    with open_lockstep(config, directory, stacked=case == "stack") as opened:
        run_lockstep(opened, threading.Event(), lambda: None)
    return directory


def numbers(directory: RunDirectory):
    """All that was computed."""
    states = [latest(directory.agent(each).checkpoints) / STATE_FILE for each in (0, 1)]
    curves = [directory.agent(each).evaluations.path.read_text().splitlines() for each in (0, 1)]
    evaluations = [[line.rpartition(",")[0] for line in lines] for lines in curves]
    return (
        [state.read_bytes() for state in states],
        evaluations,
        (directory.replay / BUFFER_FILE).read_bytes(),
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The numbers of runs whose environments do nothing to the process."""
    known = {}

    def of(case: str):
        if case not in known:
            known[case] = numbers(run(tmp_path_factory.mktemp("calm"), case))
        return known[case]

    return of


@pytest.mark.parametrize("case", CONFIGS)
def test_what_an_environment_does_to_the_process_in_the_midst_of_a_run_changes_no_number(
    calm, tmp_path, case
):
    expected = calm(case)
    found = run(tmp_path / "run", case, when="late", deeds=LATE)
    assert numbers(found) == expected
    assert Path.cwd() == Path("/")


@pytest.mark.parametrize("when", ["constructor", "reset", "step", "close"])
def test_what_an_environment_does_to_the_process_in_any_call_changes_no_number(calm, tmp_path, when):
    expected = calm("td3")
    assert numbers(run(tmp_path / "run", "td3", when=when, deeds=[*DEEDS])) == expected
    assert Path.cwd() == tmp_path


def test_what_importing_an_environment_does_to_the_process_changes_no_number(calm, tmp_path):
    expected = calm("td3")
    (tmp_path / "meddles_on_import.py").write_text(module_that(*DEEDS))
    assert numbers(run(tmp_path / "run", "td3", env="meddles_on_import:Meddles")) == expected
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize(("when", "deeds"), [("constructor", [*DEEDS]), ("late", LATE)])
def test_a_run_s_results_and_its_report_lie_where_it_was_begun(tmp_path, capsys, when, deeds):
    config = small_config("meddling:Meddles", env__kwargs={"when": when, "deeds": deeds}, train__steps=60)
    train_here(TrainOptions(config, Path("runs"), name="run", lockstep=True))
    assert (tmp_path / "runs/run/report.html").exists()
    assert "results: runs/run" in capsys.readouterr().out


def test_a_film_lies_where_it_was_asked_for_although_the_environment_leaves_the_folder(tmp_path):
    found = run(tmp_path / "run", "td3", when="constructor", deeds=["leaves the folder"])
    results = evaluate_checkpoint(found.path, 1, video=Path("film.gif"))
    assert [each.video for each in results if each.video] == [Path("film.gif")]
    assert (tmp_path / "film.gif").exists()
