"""`dase evaluate`: checkpoints evaluated by the run's own protocol, without its services, and filmed."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np

from dase_grpc.config.arguments import whole
from dase_grpc.config.texts import could_be_agent_id, shown
from dase_grpc.errors import ConfigError, RunDirectoryError, UsageError
from dase_grpc.launch.films import filmed, prepare_video, write_video
from dase_grpc.learning.agents.device import pick_device
from dase_grpc.learning.agents.ensemble import EnsemblePolicy
from dase_grpc.learning.agents.registry import load_policy
from dase_grpc.learning.envs.evaluation import Evaluation, Evaluator
from dase_grpc.learning.envs.explorer import Policy
from dase_grpc.learning.envs.make import borrowed_env, require_same_environment, schema_of
from dase_grpc.learning.envs.restarts import evaluation_env
from dase_grpc.process.watchdog import Watch
from dase_grpc.progress import number, several
from dase_grpc.runs.checkpoint import METADATA_FILE, Checkpoint, latest, load_checkpoint
from dase_grpc.runs.checkpoint import best as best_of
from dase_grpc.runs.directory import RUN_FILE, AgentDirectory, RunDirectory
from dase_grpc.runs.logs import Score, append_score
from dase_grpc.runs.lookup import require_policies
from dase_grpc.seeding import Purpose, integer

_log = logging.getLogger(__name__)


Choice = Literal["best", "ensemble"]
CHOICES: Final[tuple[str, ...]] = get_args(Choice)


@dataclass(frozen=True, repr=False)
class EvaluatedCheckpoint:
    """One policy's evaluation; its episode i has `seed + 2 * i`, and the first may be filmed.

    agent_id is None for the policy of all agents, whose step is that of the one that is least far.
    """

    checkpoint: Path
    environment: str
    agent_id: int | None
    agent_name: str
    step: int
    seed: int
    evaluation: Evaluation
    video: Path | None

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        """One line for a person to read."""
        result = self.evaluation
        spread = f" ± {number(result.return_std)}" if result.episodes > 1 else ""
        film = f"; video: {self.video}" if self.video else ""
        cut = ", which was cut" if result.episodes == 1 else f", {result.cut:,} of them cut"
        return (
            f"{self.agent_name} in {self.environment} after {several(self.step, 'step')}: mean return "
            f"{number(result.return_mean)}{spread} over "
            f"{several(result.episodes, 'episode')}{cut if result.cut else ''}{film}"
        )


@dataclass(frozen=True)
class Contestant:
    """A policy that may be evaluated: one checkpoint's, or that of all checkpoints together."""

    checkpoints: Sequence[Checkpoint]
    path: Path
    agent_id: int | None
    name: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Contestant":
        """One agent."""
        name = checkpoint.run_config.agent_name(checkpoint.agent_id)
        return cls([checkpoint], checkpoint.path, checkpoint.agent_id, name)

    @property
    def first(self) -> Checkpoint:
        """What the run was is the same for all."""
        return self.checkpoints[0]

    @property
    def step(self) -> int:
        """The environment steps of the agent that is least far."""
        return min(each.step for each in self.checkpoints)

    @cached_property
    def policy(self) -> Policy:
        """What acts; read once.

        Raises:
            RunDirectoryError: a checkpoint does not hold what its configuration describes.
            EnvironmentSpecError: the environment is missing, or has changed.
        """
        _require_environment(self.first)
        device = pick_device(None)
        try:
            if self.agent_id is not None:
                return load_policy(self.first.config.agent, self.first.schema, self.first.tensors, device)
            states = [(each.config.agent, each.tensors) for each in self.checkpoints]
            return EnsemblePolicy.load(states, self.first.schema, device)
        except (KeyError, ValueError) as error:
            held = "policy" if self.agent_id is not None else "agent, critics and all,"
            raise RunDirectoryError(
                f"{self.path} does not hold the {held} its configuration describes: {error}"
            ) from None


def agent_choice(text: str) -> int | Choice:
    """What `--agent` says: an agent's id, "best" or "ensemble".

    Raises:
        UsageError: it is none of these.
    """
    if could_be_agent_id(text):
        return int(text)
    if text in CHOICES:
        return text  # type: ignore[return-value]  # one of the literals
    raise UsageError(f"--agent {shown(text)} is neither an agent's id, best nor ensemble")


def _agent(given: object) -> int | Choice:
    """What `agent=` says, as `agent_choice`; NumPy's whole numbers are ids, too."""
    if isinstance(given, str) and given in CHOICES:
        return given  # type: ignore[return-value]  # one of the literals
    try:
        return whole("agent", given, least=0)
    except ConfigError:
        raise UsageError(
            f"agent = {shown(given)} is neither an agent's id, a number as 0, nor 'best' nor 'ensemble'"
        ) from None


def evaluate_checkpoint(
    target: Path,
    episodes: int,
    *,
    seed: int | None = None,
    video: Path | None = None,
    best: bool = False,
    agent: int | Choice | None = None,
) -> list[EvaluatedCheckpoint]:
    """Evaluates the latest checkpoint of each agent of a run, or of one agent, or one checkpoint.

    With `best` it is the one whose own step had the highest mean return in training's evaluations; with
    `agent`, only that one's. `seed` is that of the first episode; left out, it is the training's, so that
    with eval.episodes episodes these are the training's own, unless the policy is chosen by these. `video`
    films the first episode of the policy whose mean return is the highest. Blocks for all episodes.

    The agent "best" is the one with the highest mean return over eval.episodes episodes with the training's
    evaluation seeds, and "ensemble" the policy of all (`EnsemblePolicy`). Unless `seed` is given, what is
    reported of them, and of the `best` checkpoints, comes from other seeds, those of the run's purpose SCORE;
    of the best agent and the ensemble it is noted in scores.jsonl.

    Raises:
        RunDirectoryError: no checkpoint there, or a damaged one.
        EnvironmentSpecError: the environment is missing, has changed, or cannot be drawn here.
        UsageError: the video cannot be written, or `seed` would report what the best was chosen by.
    """
    episodes = whole("episodes", episodes, least=1)
    seed = None if seed is None else whole("seed", seed, least=0)
    agent = None if agent is None else _agent(agent)
    here = Path.cwd()  # before there is an environment, which may move
    if video is not None:
        prepare_video(video)
    found = [load_checkpoint(path) for path in find_checkpoints(target, best=best)]
    contestants = _contestants(found, target, agent)
    first = contestants[0].first
    if seed is None:
        purpose = Purpose.SCORE if best or agent in CHOICES else Purpose.EVALUATION
        seed = integer(first.config.train.seed, purpose)
    elif best or agent == "best":
        _require_others(seed, episodes, first, chosen_by="--best" if best else "--agent best")
    if video is not None:  # so that what cannot be filmed is refused before any work
        filmed(contestants[0].policy, contestants[0].first, seed, max_episode_steps=0)
    if agent == "best":
        contestants = [_chosen(contestants)]
    results = [_evaluate(each, episodes, seed=seed) for each in contestants]
    if agent in CHOICES and (target / RUN_FILE).exists():
        _note_score(RunDirectory.open(target), str(agent), results[0])
    return results if video is None else _film_best(contestants, results, video, here=here)


def chosen_policy(target: Path, agent: int | Choice) -> tuple[Policy, Checkpoint]:
    """The policy of one agent's latest checkpoint, of the best agent's, or of all, and whose run it is.

    Raises:
        RunDirectoryError, EnvironmentSpecError: as `evaluate_checkpoint`.
    """
    agent = _agent(agent)
    contestants = _contestants([load_checkpoint(path) for path in find_checkpoints(target)], target, agent)
    contestant = _chosen(contestants) if agent == "best" else contestants[0]
    return contestant.policy, contestant.first


def _contestants(found: Sequence[Checkpoint], target: Path, agent: int | Choice | None) -> list[Contestant]:
    if agent == "ensemble":
        name = f"the ensemble of {several(len(found), 'agent')}"
        return [Contestant(found, target, None, name)]
    chosen = [each for each in found if agent in (None, "best", each.agent_id)]
    if not chosen:
        ids = ", ".join(str(each.agent_id) for each in found)
        raise RunDirectoryError(f"{target} has no checkpoint of agent {agent}; choose an --agent of {ids}")
    return list(map(Contestant.of, chosen))


def _chosen(contestants: Sequence[Contestant]) -> Contestant:
    """The one that does best in the training's evaluation episodes; of equal ones the first."""
    config = contestants[0].first.config
    seed = integer(config.train.seed, Purpose.EVALUATION)
    results = [_evaluate(each, config.eval.episodes, seed=seed) for each in contestants]
    chosen = contestants[_highest(results)]
    return replace(chosen, name=f"{chosen.name} (the best of {len(contestants)})")


def _note_score(run: RunDirectory, policy: str, result: EvaluatedCheckpoint) -> None:
    """Notes a score for the report; where the run cannot be written, a warning says so."""
    found = result.evaluation
    if not math.isfinite(found.return_mean) or not math.isfinite(found.return_std):
        return
    score = Score(
        policy, result.agent_id, result.step, result.seed, found.episodes, found.return_mean, found.return_std
    )
    try:
        append_score(run.scores, score)
    except RunDirectoryError as error:
        _log.warning("the report will not show this score: %s", error)


def _require_others(seed: int, episodes: int, checkpoint: Checkpoint, *, chosen_by: str) -> None:
    """Checks that episodes are none of those that the best agent, or checkpoint, is chosen by."""
    config = checkpoint.config
    first = integer(config.train.seed, Purpose.EVALUATION)
    reported, choosing = (
        range(begin, begin + 2 * count, 2)
        for begin, count in ((seed, episodes), (first, config.eval.episodes))
    )
    if any(each in reported for each in choosing):
        raise UsageError(
            f"--seed {seed} would report episodes that {chosen_by} chooses by; choose another seed, or leave "
            "it out"
        )


def note_on_film(results: Sequence[EvaluatedCheckpoint]) -> str | None:
    """Which of several agents was filmed, and how to film another; None without a film or a choice."""
    filmed = next((each for each in results if each.video is not None), None)
    if filmed is None or len(results) < 2:
        return None
    return (
        f"filmed: {filmed.agent_name}, the best of these {len(results)} by mean return; "
        f"--agent N evaluates and films agent N alone"
    )


def find_checkpoints(target: Path, *, best: bool = False) -> list[Path]:
    """The checkpoint directories that a run, an agent's or a checkpoint's directory stands for.

    An agent's is its latest or its `best`, which may be one that an evaluator node has kept. Logs a warning
    that names the agents of a run which have none yet.
    """
    if (target / METADATA_FILE).exists():
        return [target]
    if (target / RUN_FILE).exists():
        folders = _folders_of(RunDirectory.open(target), best=best)
    else:
        folders = [AgentDirectory(target).checkpoints, target]
    found = [path for path in map(_pick(best=best), folders) if path is not None]
    if found:
        return found
    if best and (last := next(filter(None, map(latest, folders)), None)) is not None:
        raise RunDirectoryError(f"{target} has no best checkpoint, {_why_no_best(load_checkpoint(last))}")
    require_policies(target)
    if any(map(_best_of, folders)):
        raise RunDirectoryError(
            f"{target} has what an evaluator node has kept, the best policies alone; give --best, or the "
            f"folder that the learners write"
        )
    if (target / RUN_FILE).exists() or folders[0].is_dir():
        raise RunDirectoryError(
            f"{target} has no checkpoint yet; "
            "a run writes one every train.checkpoint_every steps and when it ends"
        )
    raise RunDirectoryError(f"{target} is neither a run, an agent's directory nor a checkpoint")


def _why_no_best(checkpoint: Checkpoint) -> str:
    if checkpoint.config.eval.by == "evaluator":
        return (
            "because the run's evaluator (eval.by = evaluator) keeps these, and has kept none here; give the "
            "--run-dir of the evaluator, or leave --best out"
        )
    return (
        "because none was evaluated at its own step; choose a multiple of eval.every as "
        "train.checkpoint_every, or leave --best out"
    )


def _best_of(folder: Path) -> Path | None:
    """The best checkpoint in a folder, else the best policy that an evaluator has kept beside it."""
    return best_of(folder) or best_of(AgentDirectory(folder.parent).evaluator)


def _pick(*, best: bool) -> Callable[[Path], Path | None]:
    return _best_of if best else latest


def _folders_of(run: RunDirectory, *, best: bool) -> list[Path]:
    folders = {agent_id: run.agent(agent_id).checkpoints for agent_id in range(run.config.train.agents)}
    pick = _pick(best=best)
    missing = [str(agent_id) for agent_id, folder in folders.items() if pick(folder) is None]
    if missing and len(missing) < len(folders):
        lacking = "best checkpoint" if best else "checkpoint"
        _log.warning("left out for lack of a %s: agent %s", lacking, ", ".join(missing))
    return list(folders.values())


def _evaluate(contestant: Contestant, episodes: int, *, seed: int) -> EvaluatedCheckpoint:
    checkpoint, config = contestant.first, contestant.first.config
    policy = contestant.policy
    evaluator = Evaluator(
        partial(evaluation_env, config.env, Watch("the evaluation")),
        checkpoint.schema,
        episodes=episodes,
        max_episode_steps=config.eval.max_episode_steps,
        seed=seed,
        max_restarts=config.env.max_restarts,
    )
    return EvaluatedCheckpoint(
        checkpoint=contestant.path,
        environment=config.env.id,
        agent_id=contestant.agent_id,
        agent_name=contestant.name,
        step=contestant.step,
        seed=seed,
        evaluation=evaluator.evaluate(policy),
        video=None,
    )


def _require_environment(checkpoint: Checkpoint) -> None:
    config = checkpoint.config.env
    with borrowed_env(config, owner="evaluation") as env:
        require_same_environment(schema_of(env, config.id), checkpoint.schema)


def _highest(results: Sequence[EvaluatedCheckpoint]) -> int:
    """Where the highest mean return is; one that is not a number is below all."""
    means = np.array([result.evaluation.return_mean for result in results])
    return int(np.where(np.isnan(means), -np.inf, means).argmax())


def _film_best(
    contestants: Sequence[Contestant], results: Sequence[EvaluatedCheckpoint], video: Path, *, here: Path
) -> list[EvaluatedCheckpoint]:
    """Films the first episode of the best policy; the results, with the video where it belongs."""
    best = _highest(results)
    frames, fps = filmed(contestants[best].policy, contestants[best].first, results[best].seed)
    write_video(here / video, frames, fps=fps)
    return [replace(each, video=video if i == best else None) for i, each in enumerate(results)]
