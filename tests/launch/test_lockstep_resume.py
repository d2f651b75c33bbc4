"""A lockstep run that is broken off and resumed is, byte for byte, the run without the break."""

import json
import logging
import math
import shutil
import threading

import pytest
import torch
import worlds
from resuming import (
    CONFIGS,
    assert_equal,
    config,
    curve,
    flip,
    records,
    resume,
    rows_of,
    train,
    train_killed_after,
    train_until,
)

from dase_grpc.errors import (
    DivergedError,
    EnvironmentFailedError,
    RunDirectoryError,
)
from dase_grpc.launch import lockstep
from dase_grpc.launch.lockstep import BUFFER_FILE
from dase_grpc.learning.envs.restarts import EnvironmentBroke, WatchedEnv
from dase_grpc.runs.checkpoint import (
    METADATA_FILE,
    STATE_FILE,
    TRAINING_FILE,
    checkpoints,
    latest,
    load_checkpoint,
)
from dase_grpc.runs.directory import RUN_FILE, RunDirectory
from dase_grpc.runs.logs import read_evaluations, read_metrics
from dase_grpc.runs.rounds import newest_whole_round


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("straight"), config())


def at_steps(usual: int, slowly: tuple[int, ...], rarely: tuple[int, ...]) -> list[object]:
    """Steps for every run of the tests, those that are slow, and those that take minutes."""
    return [usual, *slowly, *(pytest.param(step, marks=pytest.mark.long) for step in rarely)]


# -- the same as without a break ----------------------------------------------------------------------


USUAL = {"td3", "a pair that distils", "by agent", "ddpg", "own share", "priorities"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in CONFIGS]
)
def test_n_steps_and_n_more_are_as_2n_at_once(tmp_path, name):
    settings = CONFIGS[name]
    half = settings.model_copy(update={"train": settings.train.model_copy(update={"steps": 60})})
    resumed = resume(train(tmp_path, half), steps=120)
    assert_equal(train(tmp_path, settings, "straight"), resumed, first_steps=60)


def test_a_run_whose_environment_is_given_infinite_bounds_is_kept_and_goes_on(tmp_path):
    settings = config("worlds:RaisesAtStep", env__kwargs={"at": math.inf}, train__agents=1, train__steps=60)
    run = resume(train(tmp_path, settings), steps=90)
    kept = load_checkpoint(latest(run.agent(0).checkpoints))
    assert kept.run_config.env.kwargs == {"at": math.inf}
    assert "Infinity" not in (kept.path / METADATA_FILE).read_text(encoding="utf-8")


@pytest.mark.parametrize("step", at_steps(37, (1, 90), (19, 20, 30, 119)))
@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_from_that_very_step(tmp_path, straight, step):
    """In the random steps, at and within an episode, at an evaluation, with a full buffer, before the end."""
    stopped = train_until(tmp_path, config(), step)
    assert latest(stopped.agent(1).checkpoints).name == f"step-{step:09d}"
    assert_equal(straight, resume(stopped))


@pytest.mark.parametrize("step", at_steps(61, (59,), (30, 95)))
@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_from_its_last_round(tmp_path, straight, step):
    killed = train_killed_after(tmp_path, config(), step)
    assert_equal(straight, resume(killed))


@pytest.mark.slow
def test_a_run_whose_environments_raise_by_their_seeds_goes_on_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("dase_grpc.learning.envs.restarts.FIRST_PAUSE_S", 0)
    settings = config("worlds:Brittle", env__max_restarts=50)
    straight = train(tmp_path, settings, "straight")
    stopped = train_until(tmp_path, settings, 67)
    for agent_id in (0, 1):
        assert any(record["env_restarts"] for record in read_metrics(stopped.agent(agent_id).metrics.path))
    assert_equal(straight, resume(stopped))


@pytest.mark.long
@pytest.mark.slow
def test_a_run_may_be_broken_off_again_and_again(tmp_path, straight):
    settings = config()
    directory = train_killed_after(tmp_path, settings, 40)
    for until in (50, 77, 78):
        resume_until(directory, until, threading.Event())
        assert latest(directory.agent(0).checkpoints).name == f"step-0000000{until}"
    assert_equal(straight, resume(directory))
    begun = [each["from_steps"] for each in RunDirectory.open(directory.path).run["resumed"]]
    assert begun == [[step, step] for step in (30, 50, 77, 78)]


def resume_until(directory: RunDirectory, step: int, halt: threading.Event) -> None:
    """`dase resume`, stopped after the round of a step."""
    run_lockstep = lockstep.run_lockstep

    def until(opened, _, on_round):
        def stop():
            on_round()
            if opened.learners[0].steps == step:
                halt.set()

        run_lockstep(opened, halt, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep, "run_lockstep", until)
        resume(directory)


@pytest.mark.slow
def test_a_stop_within_an_evaluation_and_a_round_is_made_up_for(tmp_path, straight, monkeypatch):
    """Agent 0 has done its step 60 and evaluates, agent 1 has not done it, when the signal comes."""
    halt, reset = threading.Event(), worlds.PointGoal.reset
    evaluated = []

    def noted(self, *, seed=None, options=None):
        if seed % 2:
            evaluated.append(seed)
            if len(evaluated) == 4 * 2 + 1:  # both at steps 0 and 30, agent 0 at step 60
                halt.set()
        return reset(self, seed=seed, options=options)

    monkeypatch.setattr(worlds.PointGoal, "reset", noted)
    stopped = train(tmp_path, config(), halt=halt)
    monkeypatch.undo()
    assert [latest(stopped.agent(each).checkpoints).name[-2:] for each in (0, 1)] == ["60", "59"]
    halted = threading.Event()
    halted.set()  # before agent 0 has made up for its evaluation, and agent 1 for its step
    resume_until(stopped, -1, halted)
    assert [latest(stopped.agent(each).checkpoints).name[-2:] for each in (0, 1)] == ["60", "59"]
    assert_equal(straight, resume(stopped))


@pytest.mark.long
@pytest.mark.slow
def test_an_episode_without_an_end_goes_on_too(tmp_path):
    settings = config("worlds:Endless", eval__max_episode_steps=5)
    whole = train(tmp_path, settings, "straight")
    assert_equal(whole, resume(train_until(tmp_path, settings, 47)))


@pytest.mark.slow
def test_refused_transitions_and_their_counts_go_on(tmp_path):
    settings = config("worlds:NanReward", train__log_every=50, eval__max_episode_steps=5)
    whole = train(tmp_path, settings, "straight")
    resumed = resume(train_until(tmp_path, settings, 44))
    assert_equal(whole, resumed)
    refused = [record["refused"] for record in records(resumed.agent(0))]
    assert refused == [{"reward": 5}] * 2 + [{"reward": 2}]


@pytest.mark.slow
def test_a_run_whose_end_was_no_multiple_of_its_periods_goes_on_as_if_it_had_not_ended(tmp_path, straight):
    """Its last evaluation and its last line of metrics are put aside, since no longer run has them."""
    settings = config()
    ended = train(tmp_path, config(train__steps=47))
    assert [line.split(",")[0] for line in curve(ended.agent(0))[1:]] == ["0", "30", "47"]
    resumed = resume(ended, steps=settings.train.steps)
    assert curve(resumed.agent(0)) == curve(straight.agent(0))
    assert records(resumed.agent(0)) == records(straight.agent(0))
    state = [latest(each.agent(0).checkpoints) / STATE_FILE for each in (straight, resumed)]
    assert state[0].read_bytes() == state[1].read_bytes()
    aside = ended.agent(0).path / "before-resume-1"
    assert read_evaluations(aside / "evaluations.csv").step.tolist() == [47]
    assert [record["step"] for record in read_metrics(aside / "metrics.jsonl")] == [47]


# -- what is said and noted ---------------------------------------------------------------------------


@pytest.mark.slow
def test_no_step_appears_twice_what_was_written_after_the_round_is_kept_and_time_goes_on(tmp_path, capsys):
    killed = train_killed_after(tmp_path, config(), 89)
    before = read_evaluations(killed.agent(0).evaluations.path)
    resumed = resume(killed)
    after = read_evaluations(resumed.agent(0).evaluations.path)
    assert after.step.tolist() == [0, 30, 60, 90, 120]
    assert (after.wall_seconds[:3] == before.wall_seconds[:3]).all()
    assert (after.wall_seconds[1:] > after.wall_seconds[:-1]).all()
    steps = [record["step"] for record in read_metrics(resumed.agent(0).metrics.path)]
    assert steps == [20, 40, 60, 80, 100, 120]
    aside = killed.agent(0).path / "before-resume-1"
    assert [record["step"] for record in read_metrics(aside / "metrics.jsonl")] == [80]
    wanted = f"no part of the run until step 60 (lines: 1, checkpoints: 0) is put aside in {aside}"
    assert wanted in capsys.readouterr().out


@pytest.mark.slow
def test_run_toml_says_when_and_from_where_it_was_resumed_and_keeps_all_else(tmp_path):
    directory = train(tmp_path, config(train__steps=60))
    resumed = resume(directory, steps=90)
    (entry,) = resumed.run["resumed"]
    assert (entry["from_steps"], entry["to_steps"], entry["versions"]) == ([60, 60], 90, {})
    assert resumed.config.train.steps == 90
    assert resumed.versions == directory.versions
    assert {key: resumed.run[key] for key in directory.run} == directory.run


@pytest.mark.long
@pytest.mark.slow
def test_other_versions_are_said(tmp_path, capsys):
    directory = train_until(tmp_path, config(), 40)
    text = (directory.path / RUN_FILE).read_text()
    old = directory.versions["numpy"]
    (directory.path / RUN_FILE).write_text(text.replace(f'numpy = "{old}"', 'numpy = "1.0.0"'))
    resumed = resume(directory)
    assert (
        f"numpy 1.0.0 then, {old} now), so it will not go on to the same last bit" in capsys.readouterr().out
    )
    assert resumed.run["resumed"][0]["versions"] == {"numpy": old}


def test_only_the_buffers_new_rows_are_written_and_old_ones_removed(tmp_path, straight):
    """Of 240 transitions 150 are present; the round before needs those from number 30 on."""
    assert rows_of(straight) == [f"rows-{first:012d}-{first + 60:012d}.npy" for first in range(0, 240, 60)]
    rounds = sorted(path.name for path in straight.replay.glob("round-*"))
    assert rounds == ["round-000000090.json", "round-000000120.json"]


@pytest.mark.slow
def test_where_an_agent_cannot_go_on_nothing_takes_the_place_of_the_round(tmp_path, monkeypatch):
    """Agent 1's environment raises when it plays its episode again; agent 2 has not gone on by then."""
    settings = config(train__agents=3, env__max_restarts=0)
    stopped = train_until(tmp_path, settings, 37)
    before, reset = everything(stopped), WatchedEnv.reset

    def broken(self, *, seed=None, options=None):
        if self.watch.owner == "agent 1":
            raise EnvironmentBroke("reset", RuntimeError("no licence"))
        return reset(self, seed=seed, options=options)

    with monkeypatch.context() as patch:
        patch.setattr(WatchedEnv, "reset", broken)
        with pytest.raises(EnvironmentFailedError, match=r"agent 1 at step 37: .* no licence in reset"):
            resume(stopped)
    assert everything(stopped) == before


def everything(directory: RunDirectory) -> dict[str, bytes]:
    """The checkpoints and rounds that a run goes on from, by path."""
    kept = [*directory.replay.glob("r*-*"), *directory.path.glob("agents/*/checkpoints/*/*")]
    return {str(path): path.read_bytes() for path in kept}


# -- damage -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "damaged",
    [
        f"agents/1/checkpoints/step-000000090/{STATE_FILE}",
        f"agents/0/checkpoints/step-000000090/{TRAINING_FILE}",
        f"agents/0/checkpoints/step-000000090/{METADATA_FILE}",
        "replay/rows-000000000120-000000000180.npy",
        "replay/round-000000090.json",
    ],
)
def test_where_the_newest_round_is_damaged_the_one_before_is_used_and_that_is_said(
    tmp_path, straight, capsys, damaged
):
    killed = train_killed_after(tmp_path, config(), 95)
    flip(killed.path / damaged)
    resumed = resume(killed)
    assert_equal(straight, resumed)
    said = capsys.readouterr().out
    assert "an older round is used" in said
    assert "from step 60 of 120" in said
    assert (killed.agent(0).path / "before-resume-1" / "checkpoints" / "step-000000090").is_dir()


@pytest.mark.slow
def test_a_checkpoint_whose_round_was_not_finished_or_a_damaged_line_is_not_gone_on_from(tmp_path, straight):
    killed = train_killed_after(tmp_path, config(), 95)
    (killed.replay / "round-000000090.json").unlink()
    for path in (killed.agent(0).evaluations.path, killed.agent(0).metrics.path):
        path.write_bytes(path.read_bytes() + b"\xff, nonsense\n20")
    assert_equal(straight, resume(killed))
    assert b"\xff, nonsense\n" in (killed.agent(0).path / "before-resume-1" / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_not_mistaken_for_this_ones(tmp_path, straight, capsys):
    killed = train_killed_after(tmp_path, config(), 95)
    other = train_killed_after(tmp_path, config(train__seed=1), 95, "other")
    place = killed.agent(1).checkpoints / "step-000000090"
    shutil.rmtree(place)
    shutil.copytree(other.agent(1).checkpoints / "step-000000090", place)
    assert_equal(straight, resume(killed))
    assert "does not belong to the checkpoint" in capsys.readouterr().out


def test_where_nothing_is_whole_that_is_said_and_nothing_is_changed(tmp_path):
    killed = train_killed_after(tmp_path, config(), 95)
    flip(killed.replay / "rows-000000000000-000000000060.npy")
    before = sorted(path for path in killed.path.rglob("*"))
    with pytest.raises(
        RunDirectoryError, match=r"nothing in .* can be resumed: .*is damaged.*; .*is damaged"
    ):
        resume(killed)
    assert sorted(path for path in killed.path.rglob("*")) == before


@pytest.mark.parametrize("environment_fails", [False, True])
def test_a_diverged_agent_leaves_the_round_before_and_hides_no_other_failure(
    tmp_path, environment_fails, caplog
):
    halt = threading.Event()

    def ruin(opened):
        if opened.learners[0].steps == 37:
            ruined = {"critic.0.weight": torch.tensor([0.0, math.nan])}
            opened.learners[1].parts.agent.state_dict = lambda: ruined
            if environment_fails:
                raise EnvironmentFailedError("agent 0: the environment raised")
            halt.set()

    expected = EnvironmentFailedError if environment_fails else DivergedError
    with caplog.at_level(logging.ERROR), pytest.raises(expected):
        train(tmp_path, config(), on_round=ruin, halt=halt)
    assert ("agent 1 at step 37 has diverged: critic.0.weight is" in caplog.text) == environment_fails
    directory = RunDirectory.open(tmp_path / "run")
    assert newest_whole_round(directory).round.steps == (30, 30)
    assert latest(directory.agent(1).checkpoints).name == "step-000000030"


# -- environments that cannot be repeated -------------------------------------------------------------


@pytest.mark.slow
def test_where_an_environment_does_not_repeat_itself_a_new_episode_begins_and_that_is_said(tmp_path, caplog):
    settings = config("worlds:Unrepeatable")
    stopped = train_until(tmp_path, settings, 47)
    with caplog.at_level(logging.WARNING):
        resumed = resume(stopped)
    assert "agent 0 at step 47: the environment is not where it was" in caplog.text
    assert "does not repeat its episode" in caplog.text
    assert read_evaluations(resumed.agent(0).evaluations.path).step.tolist() == [0, 30, 60, 90, 120]


@pytest.mark.slow
def test_of_a_very_long_episode_the_actions_are_not_kept(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("dase_grpc.learning.envs.explorer.REPLAYED_STEPS", 30)
    settings = config("worlds:Endless", eval__max_episode_steps=5)
    stopped = train_until(tmp_path, settings, 47)
    with caplog.at_level(logging.WARNING):
        resume(stopped)
    assert "its episode had more than 30 steps; a new episode begins" in caplog.text


@pytest.mark.slow
def test_a_run_with_every_file_of_a_finished_one_but_the_buffer_export_ends_with_a_new_one(tmp_path):
    stopped = train_until(tmp_path, config(), 40)
    assert (stopped.replay / BUFFER_FILE).exists()
    before = (stopped.replay / BUFFER_FILE).read_bytes()
    resumed = resume(stopped)
    assert (resumed.replay / BUFFER_FILE).read_bytes() != before
    document = json.loads((checkpoints(resumed.agent(0).checkpoints)[-1] / METADATA_FILE).read_text())
    assert document["training"]["counters"]["steps"] == 120
