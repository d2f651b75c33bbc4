import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from small import new_run, small_config

from dase_grpc.config.gpus import Gpus
from dase_grpc.config.resolve import resolve
from dase_grpc.errors import (
    ConfigError,
    DeviceError,
    EnvironmentSpecError,
    NodeFailedError,
    RunDirectoryError,
)
from dase_grpc.launch import train
from dase_grpc.launch.checks import check
from dase_grpc.launch.console import pasted, program
from dase_grpc.launch.train import TrainOptions, run_name, train_here
from dase_grpc.learning.envs import make
from dase_grpc.learning.envs.make import make_env
from dase_grpc.runs.checkpoint import save_checkpoint


@pytest.fixture
def opened(monkeypatch):
    """Every environment that the check makes."""
    envs = []

    def noted(*args):
        envs.append(make_env(*args))
        return envs[-1]

    monkeypatch.setattr(make, "make_env", noted)
    return envs


def test_a_run_is_named_after_what_it_is_and_when_it_began():
    name = run_name(small_config("my.package:Env/v-0", train__seed=7))
    assert re.fullmatch(r"my-package-Env-v-0-td3-k2-seed7-\d{8}-\d{6}", name)


@pytest.mark.parametrize("capacity", ["1MiB", "1KiB"])
def test_the_check_closes_the_environment_it_made_also_if_the_buffer_is_too_small(opened, capacity):
    config = small_config("worlds:ConstantReward", replay__capacity=capacity)
    if capacity == "1KiB":
        with pytest.raises(ConfigError, match=r"agent\.batch_size = 32 exceeds replay\.capacity = 28"):
            check(config)
    else:
        check(config)
    assert [env.get_wrapper_attr("closed") for env in opened] == [1]


@pytest.mark.parametrize(
    ("settings", "gpu", "said"),
    [
        ({}, Gpus.parse("98,99"), "--gpu 98"),
        ({"agent__products": "bfloat16"}, None, r"agent\.products = bfloat16: torch finds no"),
    ],
)
def test_the_check_refuses_a_device_or_its_products_before_it_makes_the_environment(
    opened, monkeypatch, settings, gpu, said
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(DeviceError, match=said):
        check(small_config(**settings), gpus=gpu)
    assert opened == []


def test_an_environment_that_no_agent_can_act_in_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(EnvironmentSpecError, match="Discrete"):
        train_here(TrainOptions(small_config("worlds:DiscreteAction"), tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_all_gpus_of_the_machine_are_the_learners(tmp_path, monkeypatch):
    given = []

    async def note(cluster, **_):
        given.append(cluster.gpus)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(train, "run_cluster", note)
    train_here(TrainOptions(small_config(), tmp_path, name="run", gpus=Gpus.parse("all")))
    assert given == [(0, 1, 2, 3)]


def test_where_the_run_lies_is_said_although_it_failed_before_it_began(tmp_path, capsys, monkeypatch):
    async def fail(*_, **__):
        raise NodeFailedError("replay could not start")

    monkeypatch.setattr(train, "run_cluster", fail)
    with pytest.raises(NodeFailedError):
        train_here(TrainOptions(small_config(), tmp_path, name="run"))
    out = capsys.readouterr().out
    assert out.endswith(f"results: {tmp_path / 'run'}\n")
    assert "report" not in out


def test_a_run_that_cannot_be_read_does_not_hide_why_it_failed(tmp_path, capsys, monkeypatch):
    async def fail(cluster, **_):
        directory = cluster.directory
        directory.agent(0).path.mkdir(parents=True)
        directory.agent(0).evaluations.path.write_text("nonsense\n")
        raise NodeFailedError("learner-0 ended")

    monkeypatch.setattr(train, "run_cluster", fail)
    with pytest.raises(NodeFailedError, match="learner-0 ended"):
        train_here(TrainOptions(small_config(), tmp_path, name="run"))
    assert re.search(r"^no report: .*evaluations\.csv is damaged", capsys.readouterr().out, re.MULTILINE)


def results(directory, *, program="dase") -> list[str]:
    """What is said of a run in the end, on a narrow console."""
    console = Console(file=io.StringIO(), width=40)
    train._say_results(directory, console, shown=directory.path, program=program)
    return console.file.getvalue().splitlines()


def test_results_name_the_first_and_the_last_evaluation_of_each_agent(tmp_path):
    directory = new_run(tmp_path, small_config())
    for agent_id, step, mean in ((0, 0, -10.0), (0, 50, -2.5), (1, 0, -12.0)):
        directory.agent(agent_id).evaluations.append(
            step=step, return_mean=mean, return_std=0.0, episodes=2, wall_seconds=1.0
        )
    for reasons in ({"reward": 1_000}, {}, {"observation": 3}):
        directory.agent(1).metrics.append({"step": 50, "refused": reasons})
    for calls in ({"step": 2}, {"reset": 1, "step": 1_000}):
        directory.agent(0).metrics.append({"step": 50, "env_restarts": calls})
    assert results(directory) == [
        "agent 0: evaluation return -10.0 at step 0, -2.5 at step 50",
        "note: agent 0 had its environment made anew 1,003 times because it raised (reset: 1, step: 1,002); "
        "its traceback was logged",
        "agent 1: evaluation return -12.0 at step 0",
        "note: agent 1 left out 1,003 transitions that were not finite (observation in 3, reward in 1,000); "
        "make the environment return finite numbers",
        f"results: {directory.path}",
        f"report:  {directory.report}",
    ]


def test_results_of_a_mixed_ensemble_name_the_algorithms(tmp_path):
    directory = new_run(tmp_path, resolve({"members": [{"algorithm": "td3"}, {"algorithm": "ddpg"}]}))
    directory.agent(1).evaluations.append(
        step=0, return_mean=-12.0, return_std=0.0, episodes=2, wall_seconds=1.0
    )
    directory.agent(1).metrics.append({"step": 50, "refused": {"reward": 1}})
    told, note, *_ = results(directory)
    assert told == "agent 1 (DDPG): evaluation return -12.0 at step 0"
    assert note.startswith("note: agent 1 (DDPG) left out 1 transition that was not finite")


def test_what_to_do_next_is_said_as_the_program_was_called_once_there_is_a_checkpoint(tmp_path):
    directory = new_run(tmp_path, small_config(), name="a run")
    save_checkpoint(directory.agent(0).checkpoints, step=1, tensors={"a": torch.zeros(1)}, metadata={})
    *_, following, going_on = results(directory, program=".venv/bin/dase")
    assert following == f"next:    .venv/bin/dase evaluate '{directory.path}'"
    assert going_on == f"go on:   .venv/bin/dase resume '{directory.path}'    # step 1 of 120 is kept"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["dase", "train"], "dase"),
        ([], "dase"),
        (["HERE/dase"], "dase"),
        ([".venv/bin/dase"], ".venv/bin/dase"),
        (["/opt/my tools/dase"], "'/opt/my tools/dase'"),
        (["/src/dase_grpc/__main__.py"], f"{sys.executable} -m dase_grpc"),
    ],
)
def test_a_program_is_named_as_a_shell_would_find_it(tmp_path, monkeypatch, command, name):
    (tmp_path / "dase").write_text("#!/bin/sh\n")
    (tmp_path / "dase").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program([part.replace("HERE", str(tmp_path)) for part in command]) == name


def test_automatic_names_that_are_taken_get_a_number_and_given_ones_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "run_name", lambda config: "auto")
    options = TrainOptions(small_config(), tmp_path)
    names = [train._new_directory(options).path.name for _ in range(3)]
    assert names == ["auto", "auto-2", "auto-3"]
    with pytest.raises(RunDirectoryError, match="auto-2 exists"):
        train._new_directory(replace(options, name="auto-2"))


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot make the run directory"):
        train._new_directory(TrainOptions(small_config(), tmp_path / "file"))


@pytest.mark.parametrize(
    ("path", "argument"),
    [("runs/a", "runs/a"), ("-x", "./-x"), ("-a b", "'./-a b'"), ("runs/a[b]", "'runs/a[b]'")],
)
def test_a_folder_in_a_line_to_paste_is_never_taken_for_an_option(path, argument):
    assert pasted(Path(path)) == argument
