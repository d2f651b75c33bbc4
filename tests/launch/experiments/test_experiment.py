"""`dase experiment` before and after its processes: checks, plans, what is said in the end."""

import os
import sys
from pathlib import Path

import pytest
import tomli_w
import torch
from launch.experiment_cases import small_cells, trained
from small import SETTINGS

from dase_grpc.errors import ConfigError, DeviceError, EnvironmentSpecError
from dase_grpc.launch import checks
from dase_grpc.launch.checks import probed
from dase_grpc.launch.experiments import runner
from dase_grpc.launch.experiments.file import read_experiment
from dase_grpc.launch.experiments.folder import ExperimentFolder
from dase_grpc.launch.experiments.matrix import cells_of
from dase_grpc.launch.experiments.runner import (
    ExperimentOptions,
    check_cells,
    experiment_here,
    usable_cores,
)


@pytest.fixture
def tried(monkeypatch):
    """The ids of the environments that were tried out."""
    ids = []

    def noted(env):
        ids.append(env.id)
        return probed(env)

    monkeypatch.setattr(checks, "probed", noted)
    return ids


def test_each_environment_is_tried_out_once(tried):
    check_cells(small_cells(env__id=["worlds:PointGoal", "worlds:Terminating"], seed=[0, 1, 2]))
    assert tried == ["worlds:PointGoal", "worlds:Terminating"]


REFUSED = {
    "an environment with other arguments": (
        {"settings": {"env.id": "worlds:RaisesAtStep"}, "env__kwargs": [{"at": 5}, {"at": 1}]},
        "cell kwargs-at-1: the environment's step raised RuntimeError",
        EnvironmentSpecError,
        2,
    ),
    "a buffer": (
        {"settings": {"env.id": "worlds:ConstantReward"}, "replay__capacity": ["1MiB", "1KiB"], "seed": [0]},
        "cell capacity-1KiB: agent.batch_size = 32 exceeds",
        ConfigError,
        1,
    ),
    "products that the CPU does not have": (
        {"agent__products": ["bfloat16", "float32"]},
        "cell products-bfloat16: agent.products = bfloat16: torch finds no",
        DeviceError,
        0,
    ),
}


@pytest.mark.parametrize(("axes", "said", "kind", "times_tried"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused_by_the_name_of_its_cell(tried, monkeypatch, axes, said, kind, times_tried):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(kind) as refused:
        check_cells(small_cells(**axes))
    assert str(refused.value).startswith(said)
    assert len(tried) == times_tried


def test_the_cores_are_those_that_this_process_may_use():
    assert usable_cores() == len(os.sched_getaffinity(0)) >= 1


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dase", "experiment", "e.toml"])
    Path("e.toml").write_text(tomli_w.dumps({"set": SETTINGS, "matrix": {"seed": [0, 1]}}))
    return Path("e.toml")


def run(file: Path, capsys, **options) -> tuple[int, list[str]]:
    code = experiment_here(ExperimentOptions(file, Path("runs"), command=sys.argv, **options))
    return code, capsys.readouterr().out.splitlines()


def finish(file: Path, *, first: int = 2) -> ExperimentFolder:
    folder = ExperimentFolder(Path("runs/e"))
    for cell in cells_of(read_experiment(file)).cells[:first]:
        trained(folder.path, cell)
        folder.finish(cell, seconds=2.0)
    return folder


def test_where_all_is_finished_nothing_is_started(file, capsys, monkeypatch):
    finish(file)
    monkeypatch.setattr(runner.asyncio, "run", None)
    assert run(file, capsys) == (
        0,
        [
            "cell    state        final score  time",
            "seed-0  finished            -5.8  -",
            "seed-1  finished            -5.8  -",
            "results: runs/e",
            "all cells are finished; next: dase compare runs/e",
        ],
    )


@pytest.mark.slow
def test_a_dry_run_tells_the_state_of_each_cell(file, capsys):
    folder = finish(file, first=1)
    cell = cells_of(read_experiment(file)).cells[1]
    trained(folder.path, cell, step=70)
    assert run(file, capsys, dry_run=True, jobs=3) == (
        0,
        [
            "seed-0            240 steps  finished",
            "seed-1            240 steps  unfinished: stopped at step 70 of 120",
            "2 cells: 1 finished, 1 unfinished; 240 environment steps to go on 3 cores",
        ],
    )
    assert not (folder.path / ".experiment").exists()


def test_the_folder_is_the_same_after_an_environment_has_left_it(file, capsys):
    env = {"id": "rude:Misbehaves", "kwargs": {"what": "leaves_the_folder", "at": 1}}
    file.write_text(tomli_w.dumps({"set": {**SETTINGS, "env": env}, "matrix": {"seed": [0, 1]}}))
    before = Path.cwd()
    assert run(file, capsys, dry_run=True)[0] == 0
    assert Path.cwd() == before
