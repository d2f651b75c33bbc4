import io
import itertools
import json
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
import worlds
from launch.resuming import assert_equal, curve, records, train
from small import new_run, small_config

from dase_grpc.errors import CapacityError, EnvironmentFailedError, RunDirectoryError
from dase_grpc.launch import lockstep
from dase_grpc.launch.lockstep import BUFFER_FILE, open_lockstep, run_lockstep, save_buffer
from dase_grpc.learning.agents.passes import WORTH_ROUNDING
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.learning.envs.restarts import exploring_env
from dase_grpc.runs.checkpoint import METADATA_FILE, STATE_FILE, checkpoints, latest
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.rounds import newest_whole_round


def checkpoint(directory: RunDirectory, agent_id: int) -> Path:
    path = latest(directory.agent(agent_id).checkpoints)
    assert path is not None
    return path


def state(directory: RunDirectory, agent_id: int) -> bytes:
    return (checkpoint(directory, agent_id) / STATE_FILE).read_bytes()


def buffer_bytes(directory: RunDirectory) -> bytes:
    return (directory.replay / BUFFER_FILE).read_bytes()


def buffer(directory: RunDirectory, env="worlds:PointGoal"):
    schema = schema_of(make_env(env, {}), env)
    return schema.named(np.load(directory.replay / BUFFER_FILE))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("runs"), small_config())


@pytest.mark.slow
def test_the_same_seed_gives_the_same_files_to_the_last_bit(finished, tmp_path):
    assert_equal(finished, train(tmp_path, small_config()))


@pytest.mark.slow
def test_products_of_bfloat16_numbers_give_the_same_files_to_the_last_bit_too(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})  # any CPU can, if slowly
    wide = {"train__steps": 60, "agent__hidden": (WORTH_ROUNDING, WORTH_ROUNDING)}
    rounding = small_config(**wide, agent__products="bfloat16")
    first, second = (train(tmp_path, rounding, name) for name in ("first", "second"))
    assert_equal(first, second)
    assert state(first, 0) != state(train(tmp_path, small_config(**wide), "exact"), 0)


@pytest.mark.slow
def test_another_seed_gives_other_curves_networks_and_transitions(finished, tmp_path):
    other = train(tmp_path, small_config(train__seed=1))
    for agent_id in (0, 1):
        assert curve(finished.agent(agent_id)) != curve(other.agent(agent_id))
        assert state(finished, agent_id) != state(other, agent_id)
    assert buffer_bytes(finished) != buffer_bytes(other)


def test_agents_differ_from_each_other(finished):
    assert state(finished, 0) != state(finished, 1)
    assert curve(finished.agent(0))[1] != curve(finished.agent(1))[1]  # at step 0
    rows = buffer(finished)
    own, other = (rows[rows["agent_id"] == agent_id] for agent_id in (0, 1))
    assert not np.isin(own["action"], other["action"]).any()
    assert own["observation"][0] != other["observation"][0]


def test_the_evaluation_of_all_agents_is_on_the_same_episodes(tmp_path, monkeypatch):
    seeds = []
    reset = worlds.PointGoal.reset

    def noted(self, *, seed=None, options=None):
        seeds.append(seed)
        return reset(self, seed=seed, options=options)

    monkeypatch.setattr(worlds.PointGoal, "reset", noted)
    config = small_config(train__steps=1, agent__start_steps=1, replay__min_size=1)
    train(tmp_path, config)
    evaluation, exploration = [seed for seed in seeds if seed % 2], [seed for seed in seeds if not seed % 2]
    assert len(evaluation) == 2 * 2 * 2
    assert len(set(evaluation)) == 2
    assert len(set(exploration)) == 2


def test_the_buffer_holds_exactly_what_was_explored_in_turns(finished):
    rows = buffer(finished)
    assert rows["agent_id"].tolist() == [0, 1] * 120
    for agent_id in (0, 1):
        own = rows[rows["agent_id"] == agent_id]
        within = np.arange(119)[np.arange(1, 120) % 20 != 0]  # episodes have 20 steps
        assert (own["next_observation"][within] == own["observation"][within + 1]).all()
        assert own["policy_version"].tolist() == [0] * 20 + list(range(1, 101))
        assert (own["bootstrap"] == 1).all()


def test_a_full_buffer_keeps_the_latest(finished, tmp_path):
    config = small_config(replay__capacity=100)
    assert buffer(train(tmp_path, config))["policy_version"].tolist() == [
        version for version in range(51, 101) for _ in (0, 1)
    ]


def test_evaluations_and_records_come_at_their_steps(finished):
    for agent_id in (0, 1):
        assert [line.split(",")[0] for line in curve(finished.agent(agent_id))[1:]] == [
            "0",
            "50",
            "100",
            "120",
        ]
        assert [record["step"] for record in records(finished.agent(agent_id))] == [50, 100, 120]
        assert [record["updates"] for record in records(finished.agent(agent_id))] == [31, 81, 101]
        assert checkpoint(finished, agent_id).name == "step-000000120"


def test_a_lone_agent_trains_too(tmp_path):
    directory = train(tmp_path, small_config(train__agents=1))
    assert [agent.agent_id for agent in directory.agents()] == [0]
    assert len(buffer(directory)) == 120


@pytest.mark.slow
def test_where_the_buffer_must_be_fuller_than_one_agent_fills_it_the_first_update_waits_a_round(tmp_path):
    directory = train(tmp_path, small_config(replay__min_size=40))
    first, second = (records(directory.agent(agent_id))[-1] for agent_id in (0, 1))
    assert (first["updates"], second["updates"]) == (100, 101)
    assert records(directory.agent(0))[0]["skipped_updates"] == 1


def test_a_buffer_short_of_its_minimum_because_of_refused_transitions_blocks_nobody(tmp_path):
    config = small_config("worlds:NanReward", replay__min_size=40)
    directory = train(tmp_path, config)
    rows = buffer(directory, "worlds:NanReward")
    assert len(rows) == 2 * 120 * 9 // 10
    assert np.isfinite(rows["reward"]).all()
    assert [records(directory.agent(agent_id))[-1]["refused"] for agent_id in (0, 1)] == [{"reward": 2}] * 2
    assert records(directory.agent(1))[-1]["updates"] == 99


def test_halt_ends_all_agents_with_checkpoints_and_the_buffer(tmp_path):
    halt = threading.Event()

    def on_round(opened):
        if opened.progress[0].step >= 50:
            halt.set()

    directory = train(tmp_path, small_config(), on_round=on_round, halt=halt)
    assert [checkpoint(directory, agent_id).name for agent_id in (0, 1)] == ["step-000000050"] * 2
    assert len(buffer(directory)) == 100
    assert [records(directory.agent(agent_id))[-1]["step"] for agent_id in (0, 1)] == [50, 50]


def test_halt_before_the_start_keeps_what_there_is(tmp_path):
    halt = threading.Event()
    halt.set()
    directory = train(tmp_path, small_config(), halt=halt)
    assert [checkpoint(directory, agent_id).name for agent_id in (0, 1)] == ["step-000000000"] * 2
    assert len(buffer(directory)) == 0


def test_progress_of_all_agents_is_told_after_each_round(tmp_path):
    seen = []
    train(
        tmp_path,
        small_config(train__steps=30),
        on_round=lambda opened: seen.append([p.updates for p in opened.progress]),
    )
    assert len(seen) == 30
    assert seen[0] == [0, 0]
    assert all(len(updates) == 2 for updates in seen)


@pytest.fixture
def made(monkeypatch):
    """Every environment that lockstep makes for exploring."""
    envs = []

    def noted(*args):
        env = exploring_env(*args)
        envs.append(env.unwrapped)
        return env

    monkeypatch.setattr(lockstep, "exploring_env", noted)
    return envs


def test_an_environment_that_raises_shows_its_error_and_everything_is_closed(tmp_path, made):
    config = small_config(
        "worlds:RaisesAtStep", env__kwargs={"at": 9}, env__max_restarts=0, eval__max_episode_steps=3
    )
    with pytest.raises(
        EnvironmentFailedError, match=r"agent 0 at step 8: .* the simulator broke at step 9"
    ) as caught:
        train(tmp_path, config)
    raised = caught.value.__cause__
    assert isinstance(raised, RuntimeError)
    assert "reward" in {frame.name for frame in traceback.extract_tb(raised.__traceback__)}
    assert [env.closed for env in made] == [1, 1]


@pytest.mark.slow
def test_an_environment_that_raises_too_often_leaves_a_whole_round_of_all_agents(tmp_path):
    config = small_config(
        "worlds:RaisesAtStep", env__kwargs={"at": 9}, env__max_restarts=2, eval__max_episode_steps=3
    )
    with pytest.raises(EnvironmentFailedError, match=r"agent 0 at step 24: .*, after 2 restarts in a row"):
        train(tmp_path, config)
    whole = newest_whole_round(RunDirectory.open(tmp_path / "run"))
    assert list(whole.round.steps) == [24, 24]


def test_when_an_agent_fails_every_agent_has_its_checkpoints_until_then(tmp_path):
    rounds = itertools.count(1)

    def broken():
        raise RuntimeError("the simulator broke")

    def on_round(opened):
        if next(rounds) == 25:
            opened.learners[1].step = broken

    with pytest.raises(RuntimeError, match="the simulator broke"):
        train(tmp_path, small_config(train__checkpoint_every=10), on_round=on_round)
    directory = RunDirectory.open(tmp_path / "run")
    for agent_id in (0, 1):
        kept = [path.name for path in checkpoints(directory.agent(agent_id).checkpoints)]
        assert kept == ["step-000000010", "step-000000020"]


def test_the_buffer_is_written_as_numpy_writes_it_without_a_copy_of_all(tmp_path):
    config = small_config(replay__capacity=70, train__steps=50)
    directory = new_run(tmp_path, config)
    with open_lockstep(config, directory) as opened:
        run_lockstep(opened, threading.Event(), lambda: None)
        stream = io.BytesIO()
        np.save(stream, opened.store.ring.ordered())
    assert buffer_bytes(directory) == stream.getvalue()


def test_everything_is_closed_once_after_a_good_end_and_where_the_buffer_does_not_fit(tmp_path, made):
    train(tmp_path, small_config("worlds:ConstantReward", train__steps=30))
    assert [env.closed for env in made] == [1, 1]
    with pytest.raises(CapacityError, match="more than this machine can reserve"):
        train(tmp_path, small_config("worlds:ConstantReward", replay__capacity=10**15), "other")
    assert [env.closed for env in made] == [1, 1] * 2


@pytest.mark.slow
def test_a_mujoco_run_is_reproducible_to_the_last_bit(tmp_path):
    config = small_config(
        "HalfCheetah-v5",
        train__steps=500,
        agent__start_steps=200,
        replay__capacity=800,
        eval__every=250,
        eval__max_episode_steps=100,
    )
    first, second = (train(tmp_path, config, name) for name in ("first", "second"))
    assert_equal(first, second)
    assert len(np.load(first.replay / BUFFER_FILE)) == 800
    assert records(first.agent(0))[-1]["similarity_weight"] is not None
    assert json.loads((checkpoint(first, 0) / METADATA_FILE).read_text())["step"] == 500


def test_a_disk_that_refuses_the_buffer_is_one_sentence(tmp_path):
    directory = new_run(tmp_path, small_config(), "run")
    directory.replay.write_text("in the way")
    with (
        open_lockstep(directory.config, directory) as opened,
        pytest.raises(RunDirectoryError, match=r"cannot write .*buffer\.npy: File exists"),
    ):
        save_buffer(opened)
