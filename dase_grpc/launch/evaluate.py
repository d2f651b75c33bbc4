"""`dase evaluate`: checkpoints evaluated by the run's own protocol, without the run's services."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from dase_grpc.errors import RunDirectoryError
from dase_grpc.launch.video import Scene, film, prepare_video, rehearse
from dase_grpc.learning.agents.device import pick_device
from dase_grpc.learning.agents.registry import load_policy
from dase_grpc.learning.envs.evaluation import Evaluation, Evaluator
from dase_grpc.learning.envs.explorer import Policy
from dase_grpc.learning.envs.make import close_env, make_env, require_same_environment, schema_of
from dase_grpc.learning.envs.restarts import evaluation_env
from dase_grpc.process.watchdog import Watch
from dase_grpc.progress import number, several
from dase_grpc.runs.checkpoint import METADATA_FILE, Checkpoint, latest, load_checkpoint
from dase_grpc.runs.checkpoint import best as best_of
from dase_grpc.runs.directory import RUN_FILE, AgentDirectory, RunDirectory
from dase_grpc.runs.lookup import require_policies
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
        film = f"; video: {self.video}" if self.video else ""
        return (
            f"{self.agent_name} in {self.environment} after {several(self.step, 'step')}: mean return "
            f"{number(result.return_mean)}{spread} over "
            f"{several(result.episodes, 'episode')}{self._cut()}{film}"
        )

    def _cut(self) -> str:
        cut, of = self.evaluation.cut, self.evaluation.episodes
        if not cut:
            return ""
        return ", which was cut" if of == 1 else f", {cut:,} of them cut"


def evaluate_checkpoint(
    target: Path,
    episodes: int,
    *,
    seed: int | None = None,
    video: Path | None = None,
    best: bool = False,
    agent: int | None = None,
) -> list[EvaluatedCheckpoint]:
    """Evaluates the latest checkpoint of each agent of a run, or of one agent, or one checkpoint.

    With `best` it is the one whose own step had the highest mean return in training's evaluations; with
    `agent`, only that one's.

    `seed` is that of the first episode; left out, it is the training's, so that with eval.episodes
    episodes these are the training's own. `video` films the first episode of the agent whose mean return
    is the highest. Blocks for all episodes.

    Raises:
        RunDirectoryError: no checkpoint there, or a damaged one.
        EnvironmentSpecError: the environment is missing, has changed, or cannot be drawn here.
        UsageError: the video cannot be written.
    """
    here = Path.cwd()  # before there is an environment, which may move
    if video is not None:
        prepare_video(video)
    found = [load_checkpoint(path) for path in find_checkpoints(target, best=best)]
    checkpoints = [each for each in found if agent in (None, each.agent_id)]
    if not checkpoints:
        ids = ", ".join(str(each.agent_id) for each in found)
        raise RunDirectoryError(f"{target} has no checkpoint of agent {agent}; choose an --agent of {ids}")
    if video is not None:
        rehearse(_policy(checkpoints[0]), _scene(checkpoints[0], seed))
    results = [_evaluate(checkpoint, episodes, seed=seed) for checkpoint in checkpoints]
    return results if video is None else _film_best(checkpoints, results, video, here=here)


def note_on_film(results: Sequence[EvaluatedCheckpoint]) -> str | None:
    """Which of several agents was filmed, and how to film another; None without a film or a choice."""
    filmed = next((each for each in results if each.video is not None), None)
    if filmed is None or len(results) < 2:
        return None
    return (
        f"filmed: {filmed.agent_name}, the best of these {len(results)} by mean return; "
        f"--agent N evaluates and films agent N alone"
    )


def _film_best(
    checkpoints: Sequence[Checkpoint], results: Sequence[EvaluatedCheckpoint], video: Path, *, here: Path
) -> list[EvaluatedCheckpoint]:
    """Films the first episode of the best agent; the results, with the video where it belongs."""
    means = np.array([result.evaluation.return_mean for result in results])
    best = int(np.where(np.isnan(means), -np.inf, means).argmax())
    film(here / video, _policy(checkpoints[best]), _scene(checkpoints[best], results[best].seed))
    return [replace(each, video=video if i == best else None) for i, each in enumerate(results)]


def _scene(checkpoint: Checkpoint, seed: int | None) -> Scene:
    env, schema = checkpoint.config.env, checkpoint.schema
    return Scene(env.id, env.kwargs, schema, _first_seed(checkpoint, seed))


def _first_seed(checkpoint: Checkpoint, seed: int | None) -> int:
    return integer(checkpoint.config.train.seed, Purpose.EVALUATION) if seed is None else seed


def find_checkpoints(target: Path, *, best: bool = False) -> list[Path]:
    """The checkpoint directories that a run, an agent's or a checkpoint's directory stands for.

    An agent's is its latest or its `best`, which may be one that an evaluator node has kept.

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
    found = [path for path in map(_best_of if best else latest, folders) if path is not None]
    if found:
        return found
    if best and any(map(latest, folders)):
        raise RunDirectoryError(
            f"{target} has no best checkpoint, because none was evaluated at its own step; choose a multiple "
            f"of eval.every as train.checkpoint_every, or leave --best out"
        )
    require_policies(target)
    if (target / RUN_FILE).exists() or folders[0].is_dir():
        raise RunDirectoryError(
            f"{target} has no checkpoint yet; "
            "a run writes one every train.checkpoint_every steps and when it ends"
        )
    raise RunDirectoryError(f"{target} is neither a run, an agent's directory nor a checkpoint")


def _best_of(folder: Path) -> Path | None:
    """The best checkpoint in a folder, else the best policy that an evaluator has kept beside it."""
    return best_of(folder) or best_of(AgentDirectory(folder.parent).evaluator)


def _folders_of(run: RunDirectory) -> list[Path]:
    ids = {*range(run.config.train.agents), *(agent.agent_id for agent in run.agents())}
    folders = {agent_id: run.agent(agent_id).checkpoints for agent_id in sorted(ids)}
    missing = [str(agent_id) for agent_id, folder in folders.items() if latest(folder) is None]
    if missing and len(missing) < len(folders):
        _log.warning("left out for lack of a checkpoint: agent %s", ", ".join(missing))
    return list(folders.values())


def _evaluate(checkpoint: Checkpoint, episodes: int, *, seed: int | None) -> EvaluatedCheckpoint:
    config, schema, first_seed = checkpoint.config, checkpoint.schema, _first_seed(checkpoint, seed)
    policy = _policy(checkpoint)
    evaluator = Evaluator(
        partial(evaluation_env, config.env, Watch("the evaluation")),
        schema,
        episodes=episodes,
        max_episode_steps=config.eval.max_episode_steps,
        seed=first_seed,
        max_restarts=config.env.max_restarts,
    )
    return EvaluatedCheckpoint(
        checkpoint=checkpoint.path,
        environment=config.env.id,
        agent_id=checkpoint.agent_id,
        agent_name=checkpoint.run_config.agent_name(checkpoint.agent_id),
        step=checkpoint.step,
        seed=first_seed,
        evaluation=evaluator.evaluate(policy),
        video=None,
    )


def _policy(checkpoint: Checkpoint) -> Policy:
    config, schema = checkpoint.config, checkpoint.schema
    env = make_env(config.env.id, config.env.kwargs)
    try:
        require_same_environment(schema_of(env, config.env.id), schema)
    finally:
        close_env(env, owner="evaluation")
    try:
        return load_policy(config.agent, schema, checkpoint.tensors, pick_device(None))
    except (KeyError, ValueError) as error:
        raise RunDirectoryError(
            f"the checkpoint {checkpoint.path} does not hold the policy its configuration describes: {error}"
        ) from None
