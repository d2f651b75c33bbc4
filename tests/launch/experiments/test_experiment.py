"""`dase experiment` before and after its processes: checks, plans, what is said in the end."""

import importlib
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import tomli_w
import torch
from contracts.sentences import assert_one_sentence
from launch.experiment_cases import small_cells, trained
from launch.experiments.slurm_cases import FakeSlurm
from small import SETTINGS

from dase_grpc.config.gpus import Gpus
from dase_grpc.errors import ConfigError, DaseError, DeviceError, EnvironmentSpecError
from dase_grpc.launch import checks
from dase_grpc.launch.checks import probed
from dase_grpc.launch.experiments import experiment
from dase_grpc.launch.experiments.experiment import (
    ExperimentOptions,
    check_cells,
    experiment_here,
    usable_cores,
)
from dase_grpc.launch.experiments.file import read_experiment
from dase_grpc.launch.experiments.folder import ExperimentFolder
from dase_grpc.launch.experiments.matrix import cells_of


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


OWN = """
import torch
from dase_grpc.learning.agents.td3 import TD3

tried = []

def weights(context):
    tried.append("measure")
    return torch.ones(len(context.external))

def wrong(context):
    return torch.ones(3)

class Mine(TD3):
    def __init__(self, *args, **more):
        tried.append("algorithm")
        super().__init__(*args, **more)

class Idle(TD3):
    def update(self, *args, **more):
        return {}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The names of the own measure and algorithm, each time that one is tried out."""
    (tmp_path / "of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("of_mine").tried
    sys.modules.pop("of_mine")


def test_a_measure_and_an_algorithm_of_ones_own_are_tried_out_once_for_all_seeds(own):
    settings = {"dps.measure": "of_mine:weights", "agent.algorithm": "of_mine:Mine"}
    check_cells(small_cells(settings=settings, seed=[0]))
    once = Counter(own)
    assert set(once) == {"measure", "algorithm"}
    own.clear()
    check_cells(small_cells(settings=settings, seed=[0, 1, 2], replay__capacity=[1_000, 2_000]))
    assert Counter(own) == once
    check_cells(small_cells(settings=settings, seed=[0], agent__batch_size=[16, 32]))
    assert Counter(own)["algorithm"] == 3 * once["algorithm"]


@pytest.mark.parametrize(
    ("settings", "mode", "said"),
    [
        ({"dps.measure": "of_mine:wrong"}, "lockstep", "the measure 'of_mine:wrong' returned shape (3,)"),
        ({"dps.measure": "of_mine:lost"}, "cluster", "of_mine"),
        ({"agent.algorithm": "of_mine:Idle"}, "cluster", "of_mine:Idle breaks the promise of agents"),
        ({"train.explore": False, "train.actors": 1}, "lockstep", "train.explore = false leaves exploring"),
        ({"train.explore": False}, "cluster", "have them started with --actors N or train.actors = N"),
    ],
)
def test_what_a_run_of_its_own_would_refuse_is_refused_by_the_name_of_its_cell(own, settings, mode, said):
    with pytest.raises(DaseError) as refused:
        check_cells(small_cells(mode=mode, settings=settings, seed=[4]))
    assert_one_sentence(refused.value, "cell run: ", said)


def test_actors_that_a_cluster_starts_explore_for_its_cell():
    check_cells(small_cells(mode="cluster", settings={"train.explore": False, "train.actors": 1}))


def test_a_cell_in_one_process_takes_one_gpu(monkeypatch):
    monkeypatch.setattr(checks, "check_devices", lambda config, gpus: ())
    check_cells(small_cells(mode="cluster"), Gpus.parse("0,1"))
    with pytest.raises(ConfigError, match=r"cell .*: --gpu 0,1 is for learners with processes of their own"):
        check_cells(small_cells(), Gpus.parse("0,1"))


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
    monkeypatch.setattr(experiment.asyncio, "run", None)
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


# -- one cell, and cells that are queued --------------------------------------------------------------


SENSELESS = {
    "a cell elsewhere": ({"cell": "seed-0", "place": "slurm"}, "--cell runs one cell here"),
    "a cell among many": ({"cell": "seed-0", "jobs": 2}, "--cell runs one cell here"),
    "a GPU for all": ({"gpu": "0"}, "--gpu is for one cell, beside --cell"),
    "cores of a cluster": ({"place": "slurm", "jobs": 2}, "--jobs counts cores of this machine"),
    "not to wait here": ({"wait": False}, "--no-wait leaves what is queued to itself"),
    "a cell that is none": (
        {"cell": "seed-2"},
        "--cell 'seed-2' is no cell of the experiment; did you mean seed-",
    ),
}


@pytest.mark.parametrize(("options", "said"), SENSELESS.values(), ids=SENSELESS.keys())
def test_flags_that_mean_nothing_beside_each_other_are_refused(file, options, said):
    with pytest.raises(ConfigError) as refused:
        experiment_here(ExperimentOptions(file, Path("runs"), command=sys.argv, **options))
    assert_one_sentence(refused.value, said)


@pytest.mark.parametrize("line", ["2", "-1", "x"])
def test_a_cell_is_named_by_a_line_of_a_file_if_it_has_that_line(file, capsys, tmp_path, line):
    finish(file)
    cells = tmp_path / "cells"
    cells.write_text("seed-1\nseed-0\n")
    assert run(file, capsys, cell=f"@{cells}:1") == (0, ["seed-0 is finished already"])
    with pytest.raises(ConfigError) as refused:
        run(file, capsys, cell=f"@{cells}:{line}")
    assert_one_sentence(refused.value, "is no line of a file", "N from 0 on")


def test_a_cell_that_has_finished_is_left_as_it_is(file, capsys, monkeypatch):
    finish(file)
    monkeypatch.setattr(experiment.asyncio, "run", None)
    assert run(file, capsys, cell="seed-1") == (0, ["seed-1 is finished already"])


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path)
    monkeypatch.setenv("PATH", f"{fake.programs}:/usr/bin:/bin")
    return fake


def test_only_what_is_missing_and_not_queued_yet_is_queued(file, slurm, capsys):
    finish(file, first=1)
    code, said = run(file, capsys, place="slurm", wait=False)
    assert (code, said[0]) == (
        0,
        "2 cells: 1 finished, 1 waiting; 240 environment steps to go by jobs of Slurm, at most 16 at once",
    )
    assert said[1].startswith("1 cell queued as e-")
    assert said[2:] == ["not waited for; the same command without --no-wait follows what is queued"]
    assert run(file, capsys, place="slurm", wait=False)[1] == [
        "2 cells: 1 finished, 1 queued; 240 environment steps to go by jobs of Slurm, at most 16 at once",
        *said[2:],
    ]
    assert len(slurm.lines()) == 1
    assert run(file, capsys, place="slurm", dry_run=True)[1] == [
        "seed-0            240 steps  finished",
        "seed-1            240 steps  queued: job 100 is pending",
        "2 cells: 1 finished, 1 queued; 240 environment steps to go by jobs of Slurm, at most 16 at once",
    ]
    slurm.set_queue("")  # somebody has cancelled it
    assert "1 cell queued as" in run(file, capsys, place="slurm", wait=False)[1][1]


def test_once_all_are_finished_nothing_is_queued_and_the_table_is_shown(file, slurm, capsys):
    finish(file)
    code, said = run(file, capsys, place="slurm")
    assert (code, said[-1]) == (0, "all cells are finished; next: dase compare runs/e")
    assert slurm.lines() == []
