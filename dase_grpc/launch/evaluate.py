"""Evaluates checkpoints by the run's own protocol, without the run's services."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dase_grpc.errors import DaseError, EnvironmentSpecError, RunDirectoryError
from dase_grpc.launch.video import check_video, film
from dase_grpc.learning.agent import Policy
from dase_grpc.learning.agents import load_policy
from dase_grpc.learning.device import pick_device
from dase_grpc.learning.envs import make_env, schema_of
from dase_grpc.learning.evaluation import Evaluation, Evaluator
from dase_grpc.runs.checkpoint import METADATA_FILE, Checkpoint, latest, load_checkpoint
from dase_grpc.runs.directory import RUN_FILE, AgentDirectory, RunDirectory
from dase_grpc.seeding import Purpose, integer


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """One checkpoint's evaluation.

    Attributes:
        agent_id, step: whose policy it is, after how many environment steps.
        seed: that of the first episode; episode i has `seed + 2 * i`.
        video: the film of the first episode, where one was asked for.
    """

    checkpoint: Path
    environment: str
    agent_id: int
    step: int
    seed: int
    evaluation: Evaluation
    video: Path | None


def evaluate_checkpoint(
    target: Path, episodes: int, *, seed: int | None = None, video: Path | None = None
) -> list[EvaluatedCheckpoint]:
    """Evaluates the latest checkpoint of each agent of a run, or of one agent, or one checkpoint.

    With the run's seed (`seed` left out) and its number of episodes, these are the training's own
    evaluation episodes. Of several agents, each gets a video named after it. Blocks for all episodes.

    Raises:
        RunDirectoryError: no checkpoint there, or a damaged one.
        EnvironmentSpecError: the environment is missing, has changed, or cannot be drawn here.
        UsageError: the video cannot be written.
    """
    if video is not None:
        check_video(video)
    checkpoints = [load_checkpoint(path) for path in find_checkpoints(target)]
    return [
        _evaluate(checkpoint, episodes, seed=seed, video=_video_of(checkpoint, video, len(checkpoints)))
        for checkpoint in checkpoints
    ]


def find_checkpoints(target: Path) -> list[Path]:
    """The checkpoint directories that a run, an agent's or a checkpoint's directory stands for.

    Raises:
        RunDirectoryError: `target` is none of these, or has no checkpoint yet.
    """
    if (target / METADATA_FILE).exists():
        return [target]
    if (target / RUN_FILE).exists():
        folders = [agent.checkpoints for agent in RunDirectory.open(target).agents()]
    else:
        folders = [AgentDirectory(target).checkpoints, target]
    found = [path for path in map(latest, folders) if path is not None]
    if found:
        return found
    if not target.exists():
        raise RunDirectoryError(f"there is no {target}")
    if (target / RUN_FILE).exists() or folders[0].is_dir():
        raise RunDirectoryError(f"{target} has no checkpoint yet; a run writes one when it ends")
    raise RunDirectoryError(f"{target} is neither a run, an agent's directory nor a checkpoint")


def _evaluate(
    checkpoint: Checkpoint, episodes: int, *, seed: int | None, video: Path | None
) -> EvaluatedCheckpoint:
    config, schema = checkpoint.config, checkpoint.schema
    first_seed = integer(config.train.seed if seed is None else seed, Purpose.EVALUATION)
    policy = _policy(checkpoint)
    if video is not None:
        # Before the evaluation, because MuJoCo has to be told how to draw before it starts.
        film(video, config.env.id, config.env.kwargs, policy=policy, schema=schema, seed=first_seed)
    evaluator = Evaluator(
        partial(make_env, config.env.id, config.env.kwargs),
        schema,
        episodes=episodes,
        max_episode_steps=config.eval.max_episode_steps,
        seed=first_seed,
    )
    return EvaluatedCheckpoint(
        checkpoint=checkpoint.path,
        environment=config.env.id,
        agent_id=checkpoint.agent_id,
        step=checkpoint.step,
        seed=first_seed,
        evaluation=evaluator.evaluate(policy),
        video=video,
    )


def _policy(checkpoint: Checkpoint) -> Policy:
    config, schema = checkpoint.config, checkpoint.schema
    env = make_env(config.env.id, config.env.kwargs)
    try:
        schema.require_equal(schema_of(env, config.env.id))
    except DaseError as error:
        raise EnvironmentSpecError(
            f"the environment {config.env.id!r} is not the one the agent learned in: {error}"
        ) from None
    finally:
        env.close()
    try:
        return load_policy(config.agent, schema, checkpoint.tensors, pick_device(None))
    except (KeyError, ValueError) as error:
        raise RunDirectoryError(
            f"the checkpoint {checkpoint.path} does not hold the policy its configuration describes: {error}"
        ) from None


def _video_of(checkpoint: Checkpoint, video: Path | None, count: int) -> Path | None:
    if video is None or count == 1:
        return video
    return video.with_stem(f"{video.stem}-agent{checkpoint.agent_id}")
