"""Evaluating checkpoints, and filming them."""

import ctypes.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from worlds import PointGoal

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.errors import (
    EnvironmentFailedError,
    EnvironmentSpecError,
    RunDirectoryError,
    UsageError,
)
from dase_grpc.launch.evaluate import (
    EvaluatedCheckpoint,
    choose_mujoco_backend,
    evaluate_checkpoint,
    find_checkpoints,
    note_on_film,
    write_video,
)
from dase_grpc.learning.agents.registry import make_agent
from dase_grpc.learning.envs.evaluation import Evaluation, Evaluator
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.runs.checkpoint import describe, save_checkpoint
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.seeding import Purpose, integer

HAS_GL = sys.platform.startswith("linux") and ctypes.util.find_library("EGL") is not None


def make_config(env_id: str = "worlds:PointGoal") -> RunConfig:
    return resolve({"env": {"id": env_id}, "train": {"seed": 3}, "agent": {"hidden": [8]}})


def save(directory: Path, config: RunConfig, *, agent_id: int = 0, step: int = 500) -> Path:
    env = make_env(config.env.id, config.env.kwargs)
    schema = schema_of(env, config.env.id)
    env.close()
    agent = make_agent(
        config.for_agent(agent_id).agent,
        schema,
        seed=config.train.seed,
        agent_id=agent_id,
        device=torch.device("cpu"),
    )
    metadata = describe(config, schema, agent_id=agent_id)
    return save_checkpoint(directory, step=step, tensors=agent.state_dict(), metadata=metadata)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path, "run", make_config(), mode="lockstep")
    for agent_id in range(2):
        for step in (500, 1000):
            save(run.agent(agent_id).checkpoints, run.config, agent_id=agent_id, step=step)
    run.agent(2).checkpoints.mkdir(parents=True)
    return run


def test_a_run_stands_for_the_latest_checkpoint_of_each_agent(run: RunDirectory) -> None:
    results = evaluate_checkpoint(run.path, 3)
    assert [(result.agent_id, result.step) for result in results] == [(0, 1000), (1, 1000)]
    assert results[0].evaluation.episodes == 3
    assert results[0].evaluation.returns != results[1].evaluation.returns


def test_agents_without_a_checkpoint_are_named(
    run: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    find_checkpoints(run.path)
    assert caplog.messages == ["left out for lack of a checkpoint: agent 2"]
    caplog.clear()
    three = RunDirectory.create(tmp_path, "three", resolve({"train": {"agents": 3}}), mode="lockstep")
    save(three.agent(1).checkpoints, make_config(), agent_id=1)
    find_checkpoints(three.path)
    assert caplog.messages == ["left out for lack of a checkpoint: agent 0, 2"]


def test_an_agent_its_checkpoints_and_one_checkpoint_are_found(run: RunDirectory) -> None:
    agent = run.agent(1)
    last = agent.checkpoints / "step-000001000"
    first = agent.checkpoints / "step-000000500"
    assert find_checkpoints(agent.path) == find_checkpoints(agent.checkpoints) == [last]
    assert find_checkpoints(first) == [first]


def test_the_episodes_are_those_of_training_unless_a_seed_is_given(run: RunDirectory) -> None:
    target = run.agent(0).path
    env = PointGoal()
    evaluator = Evaluator(
        PointGoal,
        schema_of(env, "worlds:PointGoal"),
        episodes=2,
        max_episode_steps=100,
        seed=integer(3, Purpose.EVALUATION),
    )
    agent = make_agent(
        run.config.agent,
        schema_of(env, "worlds:PointGoal"),
        seed=3,
        agent_id=0,
        device=torch.device("cpu"),
    )
    (same,) = evaluate_checkpoint(target, 2)
    (other,) = evaluate_checkpoint(target, 2, seed=7)
    assert same.evaluation == evaluator.evaluate(agent)
    assert same.evaluation.returns != other.evaluation.returns
    assert other.seed == 7


def test_a_result_reads_as_one_line(run: RunDirectory) -> None:
    (result,) = evaluate_checkpoint(run.agent(1).path, 2)
    assert str(result).startswith("agent 1 in worlds:PointGoal after 1,000 steps: mean return -")
    assert str(result).endswith(" over 2 episodes")


def test_a_result_of_a_mixed_ensemble_names_the_algorithm(tmp_path: Path) -> None:
    members = [{"algorithm": "td3", "hidden": [8]}, {"algorithm": "sac", "hidden": [5]}]
    config = resolve({"env": {"id": "worlds:PointGoal"}, "members": members})
    path = save(tmp_path, config, agent_id=1)
    (result,) = evaluate_checkpoint(path, 1)
    assert str(result).startswith("agent 1 (SAC) in worlds:PointGoal after 500 steps: mean return -")


def test_a_result_has_thousands_separators_and_no_deviation_of_one_episode() -> None:
    def line(*returns: float, cut: int = 0) -> str:
        evaluation = Evaluation(
            return_mean=float(np.mean(returns)),
            return_std=float(np.std(returns)),
            episodes=len(returns),
            returns=returns,
            lengths=(5,) * len(returns),
            cut=cut,
        )
        result = EvaluatedCheckpoint(
            Path("x"),
            "Ant-v5",
            agent_id=0,
            agent_name="agent 0",
            step=2_000,
            seed=1,
            evaluation=evaluation,
            video=None,
        )
        return str(result).partition(": ")[2]

    assert line(1234.56) == "mean return 1,234.6 over 1 episode"
    assert line(1234.56, cut=1) == "mean return 1,234.6 over 1 episode, which was cut"
    assert line(-1000, -4000, cut=1) == "mean return -2,500.0 ± 1,500.0 over 2 episodes, 1 of them cut"


def test_what_is_no_checkpoint_is_refused_in_one_sentence(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"there is no .*missing"):
        find_checkpoints(tmp_path / "missing")
    with pytest.raises(RunDirectoryError, match="has no checkpoint yet"):
        find_checkpoints(run.agent(2).path)
    with pytest.raises(RunDirectoryError, match="is a folder of runs, not a run; the run in it is"):
        find_checkpoints(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirectoryError, match="is neither a run, an agent's directory nor a checkpoint"):
        find_checkpoints(tmp_path / "empty")
    with pytest.raises(RunDirectoryError, match="has no checkpoint yet"):
        find_checkpoints(RunDirectory.create(tmp_path, "new", make_config(), mode="node").path)


def test_a_checkpoint_without_its_policy_is_refused(tmp_path: Path) -> None:
    config = make_config()
    env = PointGoal()
    path = save_checkpoint(
        tmp_path,
        step=1,
        tensors={},
        metadata=describe(config, schema_of(env, config.env.id), agent_id=0),
    )
    with pytest.raises(RunDirectoryError, match="does not hold the policy its configuration describes"):
        evaluate_checkpoint(path, 1)


def test_an_environment_that_has_changed_is_refused(tmp_path: Path) -> None:
    config = make_config("worlds:EndpointAction")
    env = PointGoal()
    path = save_checkpoint(
        tmp_path, step=1, tensors={}, metadata=describe(config, schema_of(env, config.env.id), agent_id=0)
    )
    with pytest.raises(
        EnvironmentSpecError,
        match=r"is not the one that the agent learned in \(observation_size: 1 then, 2 now",
    ):
        evaluate_checkpoint(path, 1)


@pytest.mark.parametrize(
    ("where", "who", "times"),
    [(None, "evaluation", 6), ("rgb_array", "the film", 1)],  # env.max_restarts = 5
)
def test_an_environment_that_leaves_the_process_is_one_sentence_and_the_traceback_is_logged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str | None,
    who: str,
    times: int,
) -> None:
    path = save(tmp_path, make_config())
    video = tmp_path / "film.gif"
    step, left = PointGoal.step, []

    def leaves(self: PointGoal, action: Any) -> Any:
        if self.render_mode == where:
            left.append(self)
            sys.exit(3)
        return step(self, action)

    monkeypatch.setattr(PointGoal, "step", leaves)
    with pytest.raises(EnvironmentFailedError) as caught:
        evaluate_checkpoint(path, 1, video=video)
    assert str(caught.value).startswith(f"{who}: the environment raised SystemExit, that is, sys.exit(3)")
    assert "whose traceback is in the log" in str(caught.value)
    assert "in leaves" in caplog.text
    assert len(left) == times
    assert not video.exists()


def test_a_gif_shows_the_best_agents_first_episode(run: RunDirectory, tmp_path: Path) -> None:
    alone = evaluate_checkpoint(run.path, 1)
    assert len({result.evaluation.return_mean for result in alone}) == 2
    best = max(alone, key=lambda result: result.evaluation.return_mean)
    results = evaluate_checkpoint(run.path, 1, video=tmp_path / "film.gif")
    assert [result.evaluation for result in results] == [result.evaluation for result in alone]
    assert [result.agent_id for result in results if result.video] == [best.agent_id]
    assert note_on_film(results) == (
        f"filmed: agent {best.agent_id}, the best of these 2 by mean return; "
        f"--agent N evaluates and films agent N alone"
    )
    with Image.open(tmp_path / "film.gif") as film:
        assert film.size == (32, 16)
        assert film.info["duration"] % 50 == 0  # pictures that do not change are merged
        assert film.n_frames > 1


def test_another_agent_than_the_best_is_filmed_when_it_is_named(run: RunDirectory, tmp_path: Path) -> None:
    for agent_id in range(2):
        (result,) = evaluate_checkpoint(run.path, 1, video=tmp_path / f"{agent_id}.gif", agent=agent_id)
        assert (result.agent_id, result.video) == (agent_id, tmp_path / f"{agent_id}.gif")
        assert note_on_film([result]) is None
    assert (tmp_path / "0.gif").read_bytes() != (tmp_path / "1.gif").read_bytes()
    with pytest.raises(RunDirectoryError, match=r"no checkpoint of agent 7; choose an --agent of 0, 1$"):
        evaluate_checkpoint(run.path, 1, agent=7)


def test_nothing_is_said_about_a_film_where_there_is_none(run: RunDirectory) -> None:
    assert note_on_film(evaluate_checkpoint(run.path, 1)) is None


def test_an_agent_whose_return_is_no_number_is_never_the_best(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    means = iter((float("nan"), -1e9))

    def evaluation(evaluator: Evaluator, policy: object) -> Evaluation:
        return Evaluation(next(means), 0.0, 1, (0.0,), (1,), 0)

    monkeypatch.setattr(Evaluator, "evaluate", evaluation)
    results = evaluate_checkpoint(run.path, 1, video=tmp_path / "film.gif")
    assert [result.video is not None for result in results] == [False, True]


def test_what_cannot_be_drawn_is_refused_before_any_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluation(evaluator: Evaluator, policy: object) -> Evaluation:
        raise AssertionError("it was evaluated")

    monkeypatch.setattr(Evaluator, "evaluate", evaluation)
    with pytest.raises(EnvironmentSpecError, match="takes no render_mode"):
        evaluate_checkpoint(save(tmp_path, make_config("worlds:ConstantReward")), 1, video=tmp_path / "x.gif")


def test_an_mp4_has_every_frame(tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio.v2")
    pytest.importorskip("imageio_ffmpeg")
    frames = [np.full((50, 70, 3), 10 * index, np.uint8) for index in range(20)]
    write_video(tmp_path / "film.mp4", frames, fps=10)
    with imageio.get_reader(tmp_path / "film.mp4") as film:
        assert film.get_meta_data()["size"] == (70, 50)
        assert film.count_frames() == 20


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # imageio_ffmpeg's reader leaves its pipes open
def test_an_mp4_of_odd_size_repeats_its_last_row_and_column_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("imageio.v2")
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    frames = [np.full((51, 71, 3), 200, np.uint8) for _ in range(3)]
    write_video(tmp_path / "film.mp4", frames, fps=10)
    assert not caplog.records
    facts, *pictures = ffmpeg.read_frames(tmp_path / "film.mp4")
    assert facts["size"] == (72, 52)
    assert len(pictures) == 3
    assert abs(int(pictures[0][-1]) - 200) < 10


def test_a_fast_gif_leaves_out_frames_and_keeps_its_speed(tmp_path: Path) -> None:
    frames = [np.full((8, 8, 3), 10 * index, np.uint8) for index in range(20)]
    write_video(tmp_path / "film.gif", frames, fps=100)
    with Image.open(tmp_path / "film.gif") as film:
        assert (film.n_frames, film.info["duration"]) == (5, 40)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("film.avi", "must be one of .mp4, .gif"),
        ("film", "must be one of"),
        ("no/film.gif", "there is no folder"),
    ],
)
def test_a_video_that_cannot_be_written_is_refused_before_any_work(
    run: RunDirectory, tmp_path: Path, name: str, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        evaluate_checkpoint(run.path, 1, video=tmp_path / name)


def test_an_environment_that_cannot_draw_is_refused(tmp_path: Path) -> None:
    blind = save(tmp_path, make_config("worlds:ConstantReward"))
    with pytest.raises(EnvironmentSpecError) as caught:
        evaluate_checkpoint(blind, 1, video=tmp_path / "film.gif")
    assert str(caught.value) == (
        "environment 'worlds:ConstantReward' takes no render_mode, so it cannot be filmed; let it accept "
        'render_mode="rgb_array" and return RGB arrays from render()'
    )


def test_a_disk_that_refuses_the_video_is_one_sentence(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "film.gif").mkdir()
    with pytest.raises(UsageError, match=r"cannot write the video .*: Is a directory"):
        evaluate_checkpoint(run.path, 1, video=tmp_path / "film.gif")


@pytest.mark.skipif(not HAS_GL, reason="needs libEGL")
def test_mujoco_is_filmed_without_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    path = save(tmp_path, make_config("InvertedDoublePendulum-v5"))
    evaluate_checkpoint(path, 1, video=tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as film:
        assert film.size == (480, 480)
        assert np.asarray(film.convert("L")).std() > 1


@pytest.mark.skipif(not HAS_GL, reason="needs libEGL")
def test_the_renderer_is_chosen_only_where_nobody_chose_one_and_there_is_no_display() -> None:
    for environ, expected in (
        ({}, "egl"),
        ({"MUJOCO_GL": "glfw"}, "glfw"),
        ({"DISPLAY": ":0"}, None),
        ({"WAYLAND_DISPLAY": "wayland-0"}, None),
        ({"DISPLAY": ""}, "egl"),
    ):
        choose_mujoco_backend(environ)
        assert environ.get("MUJOCO_GL") == expected
