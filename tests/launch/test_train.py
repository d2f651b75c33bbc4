import io
import re

import pytest
from rich.console import Console
from small import new_run, small_config

from dase_grpc.errors import ConfigError, DeviceError, EnvironmentSpecError, NodeFailedError
from dase_grpc.launch import train
from dase_grpc.launch.train import TrainOptions, check, run_name, train_here
from dase_grpc.learning.envs import make_env


@pytest.fixture
def opened(monkeypatch):
    """Every environment that the check makes."""
    envs = []

    def noted(*args):
        envs.append(make_env(*args))
        return envs[-1]

    monkeypatch.setattr(train, "make_env", noted)
    return envs


def test_a_run_is_named_after_what_it_is_and_when_it_began():
    name = run_name(small_config("my.package:Env/v-0", train__seed=7))
    assert re.fullmatch(r"my-package-Env-v-0-td3-k2-seed7-\d{8}-\d{6}", name)


def test_the_check_closes_the_environment_it_made(opened):
    check(small_config("worlds:ConstantReward"))
    assert [env.closed for env in opened] == [1]


def test_the_check_closes_the_environment_also_if_the_buffer_is_too_small(opened):
    with pytest.raises(ConfigError, match=r"agent\.batch_size = 32 exceeds replay\.capacity = 28"):
        check(small_config("worlds:ConstantReward", replay__capacity="1KiB"))
    assert [env.closed for env in opened] == [1]


def test_the_check_refuses_a_device_before_it_makes_the_environment(opened):
    with pytest.raises(DeviceError):
        check(small_config(), gpu=99)
    assert opened == []


def test_the_check_refuses_an_environment_that_no_agent_can_act_in():
    with pytest.raises(EnvironmentSpecError, match="Discrete"):
        check(small_config("worlds:DiscreteAction"))


def test_nothing_is_written_where_the_check_refuses(tmp_path):
    with pytest.raises(EnvironmentSpecError):
        train_here(TrainOptions(small_config("worlds:DiscreteAction"), tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def failing_cluster(monkeypatch):
    async def fail(*_, **__):
        raise NodeFailedError("replay could not start")

    monkeypatch.setattr(train, "run_cluster", fail)


def test_where_the_run_lies_is_said_although_it_failed_before_it_began(tmp_path, capsys, failing_cluster):
    with pytest.raises(NodeFailedError):
        train_here(TrainOptions(small_config(), tmp_path, name="run"))
    out = capsys.readouterr().out
    assert out.endswith(f"results: {tmp_path / 'run'}\n")
    assert "report" not in out


def test_a_run_that_cannot_be_read_does_not_hide_why_it_failed(tmp_path, capsys, monkeypatch):
    async def fail(config, directory, **_):
        directory.agent(0).path.mkdir(parents=True)
        directory.agent(0).evaluations.path.write_text("nonsense\n")
        raise NodeFailedError("learner-0 ended")

    monkeypatch.setattr(train, "run_cluster", fail)
    with pytest.raises(NodeFailedError, match="learner-0 ended"):
        train_here(TrainOptions(small_config(), tmp_path, name="run"))
    assert re.search(r"^no report: .*evaluations\.csv is damaged", capsys.readouterr().out, re.MULTILINE)


def test_results_name_the_first_and_the_last_evaluation_of_each_agent(tmp_path):
    directory = new_run(tmp_path, small_config())
    for agent_id, step, mean in ((0, 0, -10.0), (0, 50, -2.5), (1, 0, -12.0)):
        directory.agent(agent_id).evaluations.append(
            step=step, return_mean=mean, return_std=0.0, episodes=2, wall_seconds=1.0
        )
    console = Console(file=io.StringIO(), width=40)
    train._say_results(directory, console)
    assert console.file.getvalue().splitlines() == [
        "agent 0: evaluation return -10.0 at step 0, -2.5 at step 50",
        "agent 1: evaluation return -12.0 at step 0, -12.0 at step 0",
        f"results: {directory.path}",
        f"report:  {directory.report}",
        f"next:    dase evaluate {directory.path}",
    ]
