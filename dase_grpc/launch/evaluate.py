"""Evaluates checkpoints by the run's own protocol, without the run's services."""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dase_grpc.errors import RunDirectoryError
from dase_grpc.launch.video import film, prepare_video
from dase_grpc.learning.agent import Policy
from dase_grpc.learning.agents import load_policy
from dase_grpc.learning.device import pick_device
from dase_grpc.learning.envs import make_env, require_same_environment, schema_of
from dase_grpc.learning.evaluation import Evaluation, Evaluator
from dase_grpc.progress import number
from dase_grpc.runs.checkpoint import METADATA_FILE, Checkpoint, latest, load_checkpoint
from dase_grpc.runs.checkpoint import best as best_of
from dase_grpc.runs.directory import RUN_FILE, AgentDirectory, RunDirectory
from dase_grpc.seeding import Purpose, integer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """One checkpoint's evaluation.

    Attributes:
        agent_id, agent_name, step: whose policy it is, after how many environment steps.
        seed: that of the first episode; episode i has `seed + 2 * i`.
        video: the film of the first episode, where there is one.
    """

    checkpoint: Path
    environment: str
    agent_id: int
    agent_name: str
    step: int
    seed: int
    evaluation: Evaluation
    video: Path | None

    def __str__(self) -> str:
        """One line for a person to read."""
        result = self.evaluation
        spread = f" ± {number(result.return_std)}" if result.episodes > 1 else ""
        episodes = "1 episode" if result.episodes == 1 else f"{result.episodes:,} episodes"
        film = f"; video: {self.video}" if self.video else ""
        return (
            f"{self.agent_name} in {self.environment} after {self.step:,} steps: mean return "
            f"{number(result.return_mean)}{spread} over {episodes}{self._cut()}{film}"
        )

    def _cut(self) -> str:
        cut, of = self.evaluation.cut, self.evaluation.episodes
        if not cut:
            return ""
        return ", which was cut" if of == 1 else f", {cut:,} of them cut"


def evaluate_checkpoint(
    target: Path, episodes: int, *, seed: int | None = None, video: Path | None = None, best: bool = False
) -> list[EvaluatedCheckpoint]:
    """Evaluates the latest checkpoint of each agent of a run, or of one agent, or one checkpoint.

    With `best` it is the one whose own step had the highest mean return in training's evaluations.

    `seed` is that of the first episode; left out, it is the training's, so that with eval.episodes
    episodes these are the training's own. `video` films the first episode of the first agent. Blocks
    for all episodes.

    Raises:
        RunDirectoryError: no checkpoint there, or a damaged one.
        EnvironmentSpecError: the environment is missing, has changed, or cannot be drawn here.
        UsageError: the video cannot be written.
    """
    if video is not None:
        prepare_video(video)
    checkpoints = [load_checkpoint(path) for path in find_checkpoints(target, best=best)]
    return [
        _evaluate(checkpoint, episodes, seed=seed, video=None if index else video)
        for index, checkpoint in enumerate(checkpoints)
    ]


def find_checkpoints(target: Path, *, best: bool = False) -> list[Path]:
    """The checkpoint directories that a run, an agent's or a checkpoint's directory stands for.

    An agent's is its latest or its `best`.

    Logs a warning that names the agents of a run which have none yet.

    Raises:
        RunDirectoryError: `target` is none of these, or has no checkpoint yet.
    """
    if (target / METADATA_FILE).exists():
        return [target]
    if (target / RUN_FILE).exists():
        folders = _folders_of(RunDirectory.open(target))
    else:
        folders = [AgentDirectory(target).checkpoints, target]
    found = [path for path in map(best_of if best else latest, folders) if path is not None]
    if found:
        return found
    if best and any(map(latest, folders)):
        raise RunDirectoryError(
            f"{target} has no best checkpoint, because none was evaluated at its own step; choose a multiple "
            f"of eval.every as train.checkpoint_every, or leave --best out"
        )
    if not target.exists():
        raise RunDirectoryError(f"there is no {target}")
    if (target / RUN_FILE).exists() or folders[0].is_dir():
        raise RunDirectoryError(
            f"{target} has no checkpoint yet; "
            "a run writes one every train.checkpoint_every steps and when it ends"
        )
    raise RunDirectoryError(f"{target} is neither a run, an agent's directory nor a checkpoint")


def _folders_of(run: RunDirectory) -> list[Path]:
    ids = {*range(run.config.train.agents), *(agent.agent_id for agent in run.agents())}
    folders = {agent_id: run.agent(agent_id).checkpoints for agent_id in sorted(ids)}
    missing = [str(agent_id) for agent_id, folder in folders.items() if latest(folder) is None]
    if missing and len(missing) < len(folders):
        _log.warning("left out for lack of a checkpoint: agent %s", ", ".join(missing))
    return list(folders.values())


def _evaluate(
    checkpoint: Checkpoint, episodes: int, *, seed: int | None, video: Path | None
) -> EvaluatedCheckpoint:
    config, schema = checkpoint.config, checkpoint.schema
    first_seed = integer(config.train.seed, Purpose.EVALUATION) if seed is None else seed
    policy = _policy(checkpoint)
    if video is not None:
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
        agent_name=checkpoint.run_config.agent_name(checkpoint.agent_id),
        step=checkpoint.step,
        seed=first_seed,
        evaluation=evaluator.evaluate(policy),
        video=video,
    )


def _policy(checkpoint: Checkpoint) -> Policy:
    config, schema = checkpoint.config, checkpoint.schema
    env = make_env(config.env.id, config.env.kwargs)
    try:
        require_same_environment(schema_of(env, config.env.id), schema)
    finally:
        env.close()
    try:
        return load_policy(config.agent, schema, checkpoint.tensors, pick_device(None))
    except (KeyError, ValueError) as error:
        raise RunDirectoryError(
            f"the checkpoint {checkpoint.path} does not hold the policy its configuration describes: {error}"
        ) from None
