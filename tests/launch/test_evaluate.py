"""Evaluating checkpoints, and filming them."""

import ctypes.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.sentences import refuses
from PIL import Image
from worlds import PointGoal

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.config.texts import shown
from dase_grpc.errors import (
    EnvironmentFailedError,
    EnvironmentSpecError,
    RunDirectoryError,
    UsageError,
)
from dase_grpc.launch.evaluate import (
    EvaluatedCheckpoint,
    agent_choice,
    chosen_policy,
    evaluate_checkpoint,
    find_checkpoints,
    note_on_film,
)
from dase_grpc.launch.films import choose_mujoco_backend, write_video
from dase_grpc.learning.agents.ensemble import EnsemblePolicy
from dase_grpc.learning.agents.registry import make_agent
from dase_grpc.learning.envs.evaluation import Evaluation, Evaluator
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.runs.checkpoint import describe, save_checkpoint
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_scores
from dase_grpc.runs.reports.report import write_report
from dase_grpc.schema import TransitionSchema
from dase_grpc.seeding import Purpose, integer

HAS_GL = sys.platform.startswith("linux") and ctypes.util.find_library("EGL") is not None


def make_config(env_id: str = "worlds:PointGoal") -> RunConfig:
    return resolve({"env": {"id": env_id}, "train": {"seed": 3}, "agent": {"hidden": [8]}})


def save(
    directory: Path, config: RunConfig, *, agent_id: int = 0, step: int = 500, evaluation: float | None = None
) -> Path:
    schema = described(config.env.id)
    agent = fresh(config.for_agent(agent_id).agent, schema, agent_id=agent_id)
    metadata = describe(config, schema, agent_id=agent_id)
    if evaluation is not None:
        metadata |= {"evaluation": evaluation, "evaluation_step": step}
    return save_checkpoint(directory, step=step, tensors=agent.state_dict(), metadata=metadata)


def described(env_id: str) -> TransitionSchema:
    env = make_env(env_id, {})
    schema = schema_of(env, env_id)
    env.close()
    return schema


def fresh(config, schema: TransitionSchema, *, agent_id: int = 0):
    return make_agent(config, schema, seed=3, agent_id=agent_id, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def _no_renderer_is_chosen_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filming, and MuJoCo, choose one for the process, which is undone with what this sets."""
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path, "run", make_config(), mode="lockstep")
    for agent_id in range(2):
        for step in (500, 1000):
            save(run.agent(agent_id).checkpoints, run.config, agent_id=agent_id, step=step)
    return run


def test_a_run_stands_for_the_latest_checkpoint_of_each_agent(run):
    results = evaluate_checkpoint(run.path, 3)
    assert [(result.agent_id, result.step) for result in results] == [(0, 1000), (1, 1000)]
    assert results[0].evaluation.episodes == 3
    assert results[0].evaluation.returns != results[1].evaluation.returns


def test_agents_without_a_checkpoint_are_named(run, tmp_path, caplog):
    run.agent(2).checkpoints.mkdir(parents=True)  # which is none of the run's
    find_checkpoints(run.path)
    assert caplog.messages == []
    three = RunDirectory.create(tmp_path, "three", resolve({"train": {"agents": 3}}), mode="lockstep")
    save(three.agent(1).checkpoints, make_config(), agent_id=1)
    find_checkpoints(three.path)
    assert caplog.messages == ["left out for lack of a checkpoint: agent 0, 2"]


def test_why_there_is_no_best_is_said_of_who_evaluates(run, tmp_path, caplog):
    with refuses(RunDirectoryError, "has no best checkpoint, because none was evaluated at its own step"):
        find_checkpoints(run.path, best=True)
    config = resolve(run.config.model_dump(mode="json", exclude={"members"}), {"eval": {"by": "evaluator"}})
    others = RunDirectory.create(tmp_path, "others", config, mode="node")
    save(others.agent(0).checkpoints, config)
    with refuses(RunDirectoryError, "the run's evaluator (eval.by = evaluator) keeps these", "--run-dir"):
        find_checkpoints(others.path, best=True)
    own = RunDirectory.create(tmp_path, "own", config, mode="evaluator")
    save(own.agent(0).evaluator, config, evaluation=1.0)
    assert find_checkpoints(own.path, best=True) == [own.agent(0).evaluator / "step-000000500"]
    with refuses(RunDirectoryError, "has what an evaluator node has kept, the best policies alone"):
        find_checkpoints(own.path)


def test_agents_without_a_best_checkpoint_are_named(run, caplog):
    save(run.agent(1).checkpoints, run.config, agent_id=1, step=700, evaluation=1.0)
    assert find_checkpoints(run.path, best=True) == [run.agent(1).checkpoints / "step-000000700"]
    assert caplog.messages == ["left out for lack of a best checkpoint: agent 0"]


def test_an_agent_its_checkpoints_and_one_checkpoint_are_found(run):
    agent = run.agent(1)
    last = agent.checkpoints / "step-000001000"
    first = agent.checkpoints / "step-000000500"
    assert find_checkpoints(agent.path) == find_checkpoints(agent.checkpoints) == [last]
    assert find_checkpoints(first) == [first]


def test_the_episodes_are_those_of_training_unless_a_seed_is_given(run):
    target, schema = run.agent(0).path, described("worlds:PointGoal")
    seed = integer(3, Purpose.EVALUATION)
    evaluator = Evaluator(PointGoal, schema, episodes=2, max_episode_steps=100, seed=seed)
    (same,) = evaluate_checkpoint(target, 2)
    (other,) = evaluate_checkpoint(target, 2, seed=7)
    assert same.evaluation == evaluator.evaluate(fresh(run.config.agent, schema))
    assert same.evaluation.returns != other.evaluation.returns
    assert other.seed == 7


def test_the_best_agent_is_chosen_by_the_trainings_episodes_and_scored_by_others(run):
    choosing = evaluate_checkpoint(run.path, run.config.eval.episodes)
    best = max(choosing, key=lambda result: result.evaluation.return_mean)
    (scored,) = evaluate_checkpoint(run.path, 3, agent="best")
    assert scored.agent_id == best.agent_id
    assert scored.agent_name == f"agent {best.agent_id} (the best of 2)"
    assert scored.seed == integer(3, Purpose.SCORE) != integer(3, Purpose.EVALUATION)
    (alone,) = evaluate_checkpoint(run.agent(best.agent_id).path, 3, seed=scored.seed)
    assert scored.evaluation == alone.evaluation


def test_whether_episodes_are_the_choosing_ones_is_found_without_counting_them(run):
    seed = integer(3, Purpose.EVALUATION)
    with refuses(UsageError, f"--seed {seed - 10**6} would report episodes that --agent best chooses by"):
        evaluate_checkpoint(run.path, 10**12, seed=seed - 10**6, agent="best")


@pytest.mark.parametrize("given", [np.int64(1), np.array(1), 1.0])
def test_numpys_whole_numbers_count_as_pythons_own(run, given):
    (expected,) = evaluate_checkpoint(run.path, 1, seed=1, agent=1)
    (found,) = evaluate_checkpoint(run.path, given, seed=given, agent=given)
    assert found == expected
    assert type(found.seed) is int


@pytest.mark.parametrize("given", ["0", True, np.True_, 0.5, -1, "worst", [0], 10**5000], ids=shown)
def test_what_names_no_agent_is_refused_before_any_is_looked_for(run, given):
    for asked in (
        partial(evaluate_checkpoint, run.path, 1, agent=given),
        partial(chosen_policy, run.path, given),
    ):
        with refuses(UsageError, f"agent = {shown(given)} is neither an agent's id, a number as 0, nor"):
            asked()
    with refuses(UsageError, "agent = None is neither an agent's id"):
        chosen_policy(run.path, None)


@pytest.mark.parametrize("offset", [0, 18, -4])
def test_no_episode_that_the_best_is_chosen_by_is_reported(run, offset):
    seed = integer(3, Purpose.EVALUATION) + offset
    with refuses(UsageError, f"--seed {seed} would report episodes that --agent best chooses by"):
        evaluate_checkpoint(run.path, 3, seed=seed, agent="best")
    evaluate_checkpoint(run.path, 3, seed=integer(3, Purpose.EVALUATION) + 20, agent="best")


def test_the_ensemble_is_one_policy_of_all_agents(run, tmp_path):
    (result,) = evaluate_checkpoint(run.path, 3, agent="ensemble", video=tmp_path / "film.gif")
    assert (result.agent_id, result.step, result.checkpoint) == (None, 1000, run.path)
    assert str(result).startswith("the ensemble of 2 agents in worlds:PointGoal after 1,000 steps: mean ")
    assert result.seed == integer(3, Purpose.SCORE)
    schema = described("worlds:PointGoal")
    policy = EnsemblePolicy([fresh(run.config.agent, schema, agent_id=agent) for agent in range(2)])
    evaluator = Evaluator(PointGoal, schema, episodes=3, max_episode_steps=100, seed=result.seed)
    assert result.evaluation == evaluator.evaluate(policy)
    assert (tmp_path / "film.gif").exists()


def test_the_report_shows_the_latest_score_of_each(run):
    assert "--agent best or --agent ensemble" in write_report(run).read_text()
    for agent in ("best", "ensemble", "best"):
        (last,) = evaluate_checkpoint(run.path, 3, agent=agent)
    evaluate_checkpoint(run.path, 3)
    assert [score.policy for score in read_scores(run.scores)] == ["best", "ensemble", "best"]
    found = read_scores(run.scores)[-1]
    assert (found.agent, found.step, found.seed, found.episodes) == (last.agent_id, 1000, last.seed, 3)
    assert (found.return_mean, found.return_std) == (last.evaluation.return_mean, last.evaluation.return_std)
    text = write_report(run).read_text()
    assert text.count(f"best: agent {last.agent_id}") == 1
    assert "<td>ensemble" in text or "ensemble</t" in text


def test_a_score_of_a_run_that_cannot_be_written_is_reported_all_the_same(run, caplog):
    run.scores.mkdir()
    (result,) = evaluate_checkpoint(run.path, 2, agent="ensemble")
    assert result.evaluation.episodes == 2
    assert any("the report will not show this score" in message for message in caplog.messages)


def test_an_ensemble_needs_critics(run):
    for agent in run.agents()[:2]:
        schema = described("worlds:PointGoal")
        policy = fresh(run.config.agent, schema, agent_id=agent.agent_id).policy
        metadata = describe(run.config, schema, agent_id=agent.agent_id)
        save_checkpoint(agent.checkpoints, step=2000, tensors=dict(policy.named_tensors()), metadata=metadata)
    evaluate_checkpoint(run.path, 1, agent="best")
    with refuses(RunDirectoryError, "does not hold the agent, critics and all, its configuration describes"):
        evaluate_checkpoint(run.path, 1, agent="ensemble")


def test_an_agent_is_named_by_its_id_best_or_ensemble():
    named = [agent_choice(text) for text in ("0", "12", "best", "ensemble")]
    assert named == [0, 12, "best", "ensemble"]
    for text in ("-1", "1.5", "worst", "", "9" * 5000):
        with refuses(UsageError, f"--agent {shown(text)} is neither an agent's id, best nor ensemble"):
            agent_choice(text)


def test_a_result_reads_as_one_line_that_names_the_algorithm_of_a_mixed_ensemble(run, tmp_path):
    (result,) = evaluate_checkpoint(run.agent(1).path, 2)
    assert str(result).startswith("agent 1 in worlds:PointGoal after 1,000 steps: mean return -")
    assert str(result).endswith(" over 2 episodes")
    members = [{"algorithm": "td3", "hidden": [8]}, {"algorithm": "sac", "hidden": [5]}]
    mixed = resolve({"env": {"id": "worlds:PointGoal"}, "members": members})
    (result,) = evaluate_checkpoint(save(tmp_path / "mixed", mixed, agent_id=1), 1)
    assert str(result).startswith("agent 1 (SAC) in worlds:PointGoal after 500 steps: mean return -")


@pytest.mark.parametrize(
    ("returns", "cut", "told"),
    [
        ((1234.56,), 0, "mean return 1,234.6 over 1 episode"),
        ((1234.56,), 1, "mean return 1,234.6 over 1 episode, which was cut"),
        ((-1000, -4000), 1, "mean return -2,500.0 ± 1,500.0 over 2 episodes, 1 of them cut"),
    ],
)
def test_a_result_has_thousands_separators_and_no_deviation_of_one_episode(returns, cut, told):
    count, mean, std = len(returns), float(np.mean(returns)), float(np.std(returns))
    evaluation = Evaluation(mean, std, count, returns, (5,) * count, cut)
    result = EvaluatedCheckpoint(Path("x"), "Ant-v5", 0, "agent 0", 2_000, 1, evaluation, None)
    assert str(result).partition(": ")[2] == told


def test_what_is_no_checkpoint_is_refused_in_one_sentence(run, tmp_path):
    with pytest.raises(RunDirectoryError, match=r"there is no .*missing"):
        find_checkpoints(tmp_path / "missing")
    run.agent(2).checkpoints.mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match="has no checkpoint yet"):
        find_checkpoints(run.agent(2).path)
    with pytest.raises(RunDirectoryError, match="is a folder of runs, not a run; the run in it is"):
        find_checkpoints(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirectoryError, match="is neither a run, an agent's directory nor a checkpoint"):
        find_checkpoints(tmp_path / "empty")
    with pytest.raises(RunDirectoryError, match="has no checkpoint yet"):
        find_checkpoints(RunDirectory.create(tmp_path, "new", make_config(), mode="node").path)


def test_a_checkpoint_without_its_policy_or_of_an_environment_that_has_changed_is_refused(tmp_path):
    schema = described("worlds:PointGoal")
    for env_id, kind, said in (
        ("worlds:PointGoal", RunDirectoryError, "does not hold the policy its configuration describes"),
        ("worlds:EndpointAction", EnvironmentSpecError, r"learned in \(observation_size: 1 then, 2 now"),
    ):
        metadata = describe(make_config(env_id), replace(schema, environment=env_id), agent_id=0)
        path = save_checkpoint(tmp_path / env_id, step=1, tensors={}, metadata=metadata)
        with pytest.raises(kind, match=said):
            evaluate_checkpoint(path, 1)


@pytest.mark.parametrize(
    ("where", "who", "times"),
    [(None, "evaluation", 6), ("rgb_array", "the film", 1)],  # env.max_restarts = 5
)
def test_an_environment_that_leaves_the_process_is_one_sentence_and_the_traceback_is_logged(
    tmp_path, monkeypatch, caplog, where, who, times
):
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


def test_a_gif_shows_the_best_agents_first_episode(run, tmp_path):
    alone = evaluate_checkpoint(run.path, 1)
    assert len({result.evaluation.return_mean for result in alone}) == 2
    assert note_on_film(alone) is None
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


def test_another_agent_than_the_best_is_filmed_when_it_is_named(run, tmp_path):
    for agent_id in range(2):
        (result,) = evaluate_checkpoint(run.path, 1, video=tmp_path / f"{agent_id}.gif", agent=agent_id)
        assert (result.agent_id, result.video) == (agent_id, tmp_path / f"{agent_id}.gif")
        assert note_on_film([result]) is None
    assert (tmp_path / "0.gif").read_bytes() != (tmp_path / "1.gif").read_bytes()
    with pytest.raises(RunDirectoryError, match=r"no checkpoint of agent 7; choose an --agent of 0, 1$"):
        evaluate_checkpoint(run.path, 1, agent=7)


def test_an_agent_whose_return_is_no_number_is_never_the_best(run, tmp_path, monkeypatch):
    means = iter((float("nan"), -1e9))

    def evaluation(evaluator: Evaluator, policy: object) -> Evaluation:
        return Evaluation(next(means), 0.0, 1, (0.0,), (1,), 0)

    monkeypatch.setattr(Evaluator, "evaluate", evaluation)
    results = evaluate_checkpoint(run.path, 1, video=tmp_path / "film.gif")
    assert [result.video is not None for result in results] == [False, True]


def test_what_cannot_be_drawn_is_refused_before_any_episode(tmp_path, monkeypatch):
    monkeypatch.setattr(Evaluator, "evaluate", None)
    blind = save(tmp_path, make_config("worlds:ConstantReward"))
    with pytest.raises(EnvironmentSpecError) as caught:
        evaluate_checkpoint(blind, 1, video=tmp_path / "film.gif")
    assert str(caught.value) == (
        "environment 'worlds:ConstantReward' takes no render_mode, so it cannot be filmed; let it accept "
        'render_mode="rgb_array" and return RGB arrays from render()'
    )


def grey(*, height: int, width: int, count: int) -> list[np.ndarray]:
    return [np.full((height, width, 3), 10 * index, np.uint8) for index in range(count)]


def test_an_mp4_has_every_frame(tmp_path):
    imageio = pytest.importorskip("imageio.v2")
    pytest.importorskip("imageio_ffmpeg")
    write_video(tmp_path / "film.mp4", grey(height=50, width=70, count=20), fps=10)
    with imageio.get_reader(tmp_path / "film.mp4") as film:
        assert film.get_meta_data()["size"] == (70, 50)
        assert film.count_frames() == 20


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # imageio_ffmpeg's reader leaves its pipes open
def test_an_mp4_of_odd_size_repeats_its_last_row_and_column_in_silence(tmp_path, caplog):
    pytest.importorskip("imageio.v2")
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    frames = [np.full((51, 71, 3), 200, np.uint8) for _ in range(3)]
    write_video(tmp_path / "film.mp4", frames, fps=10)
    assert not caplog.records
    facts, *pictures = ffmpeg.read_frames(tmp_path / "film.mp4")
    assert facts["size"] == (72, 52)
    assert len(pictures) == 3
    assert abs(int(pictures[0][-1]) - 200) < 10


def test_a_fast_gif_leaves_out_frames_and_keeps_its_speed(tmp_path):
    write_video(tmp_path / "film.gif", grey(height=8, width=8, count=20), fps=100)
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
def test_a_video_that_cannot_be_written_is_refused_before_any_work(run, tmp_path, name, reason):
    with pytest.raises(UsageError, match=reason):
        evaluate_checkpoint(run.path, 1, video=tmp_path / name)


def test_a_disk_that_refuses_the_video_is_one_sentence(run, tmp_path):
    (tmp_path / "film.gif").mkdir()
    with pytest.raises(UsageError, match=r"cannot write the video .*: Is a directory"):
        evaluate_checkpoint(run.path, 1, video=tmp_path / "film.gif")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GL, reason="needs libEGL")
def test_mujoco_is_filmed_without_a_display(tmp_path, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    path = save(tmp_path, make_config("InvertedDoublePendulum-v5"))
    evaluate_checkpoint(path, 1, video=tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as film:
        assert film.size == (480, 480)
        assert np.asarray(film.convert("L")).std() > 1


@pytest.mark.skipif(not HAS_GL, reason="needs libEGL")
def test_the_renderer_is_chosen_only_where_nobody_chose_one_and_there_is_no_display():
    for environ, expected in (
        ({}, "egl"),
        ({"MUJOCO_GL": "glfw"}, "glfw"),
        ({"DISPLAY": ":0"}, None),
        ({"WAYLAND_DISPLAY": "wayland-0"}, None),
        ({"DISPLAY": ""}, "egl"),
    ):
        choose_mujoco_backend(environ)
        assert environ.get("MUJOCO_GL") == expected
