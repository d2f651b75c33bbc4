"""A lockstep run that cannot be resumed is refused in one sentence, and nothing of it is changed."""

import shutil

import pytest
import worlds
from contracts.sentences import assert_one_sentence, refuses
from resuming import config, resume, train_killed_after, train_until

from dase_grpc.config.gpus import Gpus
from dase_grpc.errors import ConfigError, EnvironmentSpecError, RunDirectoryError, UsageError
from dase_grpc.launch.resume import ResumeOptions, resume_here
from dase_grpc.runs.directory import RUN_FILE, RunDirectory


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory) -> RunDirectory:
    return train_until(tmp_path_factory.mktemp("stopped"), config(), 40)


@pytest.fixture
def stopped(stopped_once, tmp_path) -> RunDirectory:
    shutil.copytree(stopped_once.path, tmp_path / "run")
    return RunDirectory.open(tmp_path / "run")


SETTINGS = [
    (
        {'id = "worlds:PointGoal"': 'id = "worlds:RewardedGoal"'},
        "env.id: 'worlds:PointGoal' then, 'worlds:Rew",
    ),
    ({"agents = 2": "agents = 1"}, "train.agents: 2 then, 1 now"),
    ({'algorithm = "td3"': 'algorithm = "sac"'}, "agent.algorithm: 'td3' then, 'sac' now"),
    ({"tau = 0.005": "tau = 0.01"}, "agent.tau: 0.005 then, 0.01 now"),
    (
        {"agents = 2": "agents = 3", "capacity = 150": "capacity = 99"},
        "train.agents: 2 then, 3 now; replay.capacity: 150 then, 99 now",
    ),
]


@pytest.mark.parametrize(("changes", "said"), SETTINGS)
def test_other_settings_are_refused_with_both_values_of_all_that_differ(stopped, changes, said):
    text, agents = (stopped.path / RUN_FILE).read_text(), stopped.agents()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (stopped.path / RUN_FILE).write_text(text)
    with pytest.raises(ConfigError) as refusal:
        resume(stopped)
    assert_one_sentence(refusal.value, said, "put them back, or start a new run")
    assert stopped.agents() == agents  # or the run would seem to have an agent that has done nothing


def test_an_environment_that_has_changed_is_refused_with_both_values(stopped, monkeypatch):
    monkeypatch.setattr(worlds, "PointGoal", worlds.EndpointAction)
    with pytest.raises(EnvironmentSpecError) as refusal:
        resume(stopped)
    assert_one_sentence(refusal.value, "observation_size: 1 then, 2 now; action_size: 1 then, 3 now")


@pytest.mark.parametrize(
    ("steps", "said"),
    [(40, "40 steps are done already"), (39, "the total is 39"), (0, "--steps 0"), (2**70, "64 bits")],
)
def test_a_total_that_is_no_more_than_what_is_done_is_refused(stopped, steps, said):
    with pytest.raises(ConfigError) as refusal:
        resume(stopped, steps=steps)
    assert_one_sentence(refusal.value, said, "total" if steps < 2**64 else "train.steps")
    assert RunDirectory.open(stopped.path).config == stopped.config


def test_a_run_that_was_killed_before_its_first_checkpoint_cannot_be_resumed(tmp_path):
    with pytest.raises(
        RunDirectoryError,
        match=r"has no checkpoint to resume from; .* dase train --config .*/run\.toml --lockstep$",
    ):
        resume(train_killed_after(tmp_path, config(), 29))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"empty_buffer": True}, "lockstep keeps its buffer"),
        ({"gpus": Gpus.parse("0,1")}, "--gpu 0,1 is for learners with processes of their own"),
    ],
)
def test_what_is_for_processes_makes_no_sense_in_lockstep(stopped, given, said):
    with pytest.raises(ConfigError, match=said):
        resume_here(ResumeOptions(stopped.path, **given))


def test_learners_that_were_started_one_by_one_are_resumed_so(tmp_path):
    directory = RunDirectory.create(tmp_path, "run", config(), mode="node")
    with pytest.raises(ConfigError, match="start each again with its own command and --resume"):
        resume(directory)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ('mode = "evaluator"', "has what an evaluator node has written, from which nothing goes on"),
        ("", "does not say how the run was begun (mode in [run]: None)"),
    ],
)
def test_what_no_learners_have_begun_is_not_taken_for_learners_that_were_started_one_by_one(
    tmp_path, mode, said
):
    file = RunDirectory.create(tmp_path, "run", config(), mode="node").path / RUN_FILE
    file.write_text(file.read_text().replace('mode = "node"', mode))
    with refuses(UsageError, said):
        resume_here(ResumeOptions(tmp_path / "run"))
