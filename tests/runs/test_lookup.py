"""What is said of a path that was meant to be a run."""

import os
from pathlib import Path

import pytest
from synthetic import write_run

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.lookup import require_folders, require_policies, require_run, runs_in


@pytest.fixture
def here(monkeypatch, tmp_path):
    """An empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def runs(here):
    """A folder of seven runs; run6 is the newest, and last in an experiment's folder."""
    for index in range(6):
        write_run(here / "runs", f"run{index}", [0.0, 1.0])
        os.utime(here / "runs" / f"run{index}" / "run.toml", (index, index))
    write_run(here / "runs" / "study", "seed-0", [0.0, 1.0])
    return here / "runs"


def refusal(check, path):
    with pytest.raises(RunDirectoryError) as caught:
        check(path)
    return str(caught.value)


PART = "is a part of a run, not a run; give the run's own folder,"
NEWEST = "runs/study/seed-0, runs/run5, runs/run4, runs/run3, runs/run2 and 2 more"
REFUSALS = {
    "runs": f"is a folder of runs, not a run; there are 7 runs in it, the newest {NEWEST}",
    "runs/study": "is a folder of runs, not a run; the run in it is runs/study/seed-0",
    "runs/run1/run.toml": "is a file; give the run's folder, runs/run1",
    "runs/notes.txt": "is a file; a run is a folder with a run.toml, such as runs/NAME",
    "runs/run1/agents/0": f"{PART} runs/run1",
}
MISSING = {
    "runs/rum3": "did you mean runs/run3?",
    "run3": "did you mean runs/run3?",
    "elsewhere": f"there are {NEWEST}",
}


def test_a_run_is_taken(runs):
    require_run(Path("runs/run1"))
    require_run(runs / "study" / "seed-0")


def test_what_is_no_run_is_said_to_be_what_it_is_and_runs_that_are_near_are_named(runs, monkeypatch):
    (runs / "notes.txt").touch()
    said = {path: f"{path} {what}" for path, what in REFUSALS.items()}
    said |= {path: f"there is no {path}; {near}" for path, near in MISSING.items()}
    assert {path: refusal(require_run, Path(path)) for path in said} == said
    monkeypatch.chdir(runs / "run1" / "agents")
    assert refusal(require_run, Path("0")) == f"0 {PART} .."


def test_without_any_run_it_is_said_what_a_run_is(here):
    what = "a run is a folder with a run.toml, such as runs/NAME"
    assert refusal(require_run, Path("runs/x")) == f"there is no runs/x; {what}"
    assert refusal(require_run, here) == f"{here} is not a run: it has no run.toml"


def test_hidden_folders_hold_no_runs_to_name(runs):
    (runs / "run5").rename(runs / ".run5")
    assert [run.name for run in runs_in(runs)][:2] == ["seed-0", "run4"]


def test_what_may_hold_policies_is_taken_and_nothing_else(runs):
    agent = runs / "run1" / "agents" / "0"
    for path in (runs / "run1", agent / "checkpoints" / "step-000000001"):
        path.mkdir(parents=True, exist_ok=True)
    (agent / "checkpoints" / "step-000000001" / "checkpoint.json").touch()
    for path in (runs / "run1", agent, agent / "checkpoints", agent / "checkpoints" / "step-000000001"):
        require_policies(path)
    assert "is a folder of runs, not a run" in refusal(require_policies, Path("runs"))
    (runs / "run1" / "logs").mkdir()
    assert refusal(require_policies, Path("runs/run1/logs")) == (
        "runs/run1/logs is neither a run, an agent's directory nor a checkpoint"
    )
    assert refusal(require_policies, Path("runs/run9")).startswith("there is no runs/run9; did you mean")


def test_folders_are_asked_for(runs):
    require_folders([runs, runs / "run1"])
    assert "there is no" in refusal(require_folders, [runs, runs / "x"])
    assert "is a file" in refusal(require_folders, [runs / "run1" / "run.toml"])
