"""`dase evaluate`: checkpoints evaluated by the run's own protocol, without its services, and filmed."""

import ctypes.util
import importlib
import logging
import math
import os
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from dase_grpc.errors import EnvironmentFailedError, EnvironmentSpecError, RunDirectoryError, UsageError
from dase_grpc.learning.agents.device import pick_device
from dase_grpc.learning.agents.registry import load_policy
from dase_grpc.learning.envs.evaluation import Evaluation, Evaluator, record_episode
from dase_grpc.learning.envs.explorer import Policy
from dase_grpc.learning.envs.make import (
    Environment,
    close_env,
    make_env,
    require_same_environment,
    schema_of,
)
from dase_grpc.learning.envs.restarts import EnvironmentBroke, WatchedEnv, evaluation_env
from dase_grpc.process.watchdog import Watch
from dase_grpc.progress import number, several
from dase_grpc.runs.checkpoint import METADATA_FILE, Checkpoint, latest, load_checkpoint
from dase_grpc.runs.checkpoint import best as best_of
from dase_grpc.runs.directory import RUN_FILE, AgentDirectory, RunDirectory
from dase_grpc.runs.lookup import require_policies
from dase_grpc.seeding import Purpose, integer

Frames = Sequence[npt.NDArray[np.uint8]]

FORMATS: Final = (".mp4", ".gif")
MAX_STEPS: Final = 1_000
"""Longer episodes are cut: a thousand frames of MuJoCo's 480 x 480 take 700 MB before they are written."""

_DEFAULT_FPS: Final = 30
_GIF_FPS: Final = 25
"""Browsers slow down pictures that are shorter than 20 ms."""

_INSTALL_GL: Final = (
    "install a software renderer (Debian, Ubuntu: apt-get install libegl1 libgl1-mesa-dri, or libosmesa6 "
    "and MUJOCO_GL=osmesa)"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """One checkpoint's evaluation; its episode i has `seed + 2 * i`, and the first may be filmed."""

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
        cut = ", which was cut" if result.episodes == 1 else f", {result.cut:,} of them cut"
        return (
            f"{self.agent_name} in {self.environment} after {several(self.step, 'step')}: mean return "
            f"{number(result.return_mean)}{spread} over "
            f"{several(result.episodes, 'episode')}{cut if result.cut else ''}{film}"
        )


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
    `agent`, only that one's. `seed` is that of the first episode; left out, it is the training's, so that
    with eval.episodes episodes these are the training's own. `video` films the first episode of the agent
    whose mean return is the highest. Blocks for all episodes.

    Raises:
        RunDirectoryError: no checkpoint there, or a damaged one.
        EnvironmentSpecError: the environment is missing, has changed, or cannot be drawn here.
        UsageError: the video cannot be written.
    """
    here = Path.cwd()  # before there is an environment, which may move
    if video is not None:
        _prepare_video(video)
    found = [load_checkpoint(path) for path in find_checkpoints(target, best=best)]
    checkpoints = [each for each in found if agent in (None, each.agent_id)]
    if not checkpoints:
        ids = ", ".join(str(each.agent_id) for each in found)
        raise RunDirectoryError(f"{target} has no checkpoint of agent {agent}; choose an --agent of {ids}")
    if video is not None:  # so that what cannot be filmed is refused before any work
        _record(checkpoints[0], _first_seed(checkpoints[0], seed), max_episode_steps=0)
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


def find_checkpoints(target: Path, *, best: bool = False) -> list[Path]:
    """The checkpoint directories that a run, an agent's or a checkpoint's directory stands for.

    An agent's is its latest or its `best`, which may be one that an evaluator node has kept. Logs a warning
    that names the agents of a run which have none yet.
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


def _first_seed(checkpoint: Checkpoint, seed: int | None) -> int:
    return integer(checkpoint.config.train.seed, Purpose.EVALUATION) if seed is None else seed


def _evaluate(checkpoint: Checkpoint, episodes: int, *, seed: int | None) -> EvaluatedCheckpoint:
    config, first_seed = checkpoint.config, _first_seed(checkpoint, seed)
    policy = _policy(checkpoint)
    evaluator = Evaluator(
        partial(evaluation_env, config.env, Watch("the evaluation")),
        checkpoint.schema,
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


# -- films --------------------------------------------------------------------------------------------


def _film_best(
    checkpoints: Sequence[Checkpoint], results: Sequence[EvaluatedCheckpoint], video: Path, *, here: Path
) -> list[EvaluatedCheckpoint]:
    """Films the first episode of the best agent; the results, with the video where it belongs."""
    means = np.array([result.evaluation.return_mean for result in results])
    best = int(np.where(np.isnan(means), -np.inf, means).argmax())
    frames, fps = _record(checkpoints[best], results[best].seed, max_episode_steps=MAX_STEPS)
    write_video(here / video, frames, fps=fps)
    return [replace(each, video=video if i == best else None) for i, each in enumerate(results)]


def _prepare_video(path: Path) -> None:
    """Checks before any work is done that `path` can be written here, and picks MuJoCo's renderer.

    Must come before the first environment of this process, because MuJoCo looks once.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--video {path}: the file's ending must be one of {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--video {path}: there is no folder {path.parent}")
    if path.suffix.lower() == ".mp4":
        _mp4_writer()
    choose_mujoco_backend(os.environ)
    try:
        importlib.import_module("mujoco")
    except Exception as error:  # PyOpenGL fails with whatever its missing library makes of it
        raise EnvironmentSpecError(
            f"MuJoCo cannot draw with MUJOCO_GL={os.environ.get('MUJOCO_GL')} on this machine "
            f"({_summary(error)}), so unset it or {_INSTALL_GL}"
        ) from error


def choose_mujoco_backend(environ: MutableMapping[str, str]) -> None:
    """Without a display, makes MuJoCo render by EGL, or else OSMesa, unless MUJOCO_GL says otherwise."""
    if "MUJOCO_GL" in environ or not sys.platform.startswith("linux"):
        return
    if environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"):
        return
    for backend, library in (("egl", "EGL"), ("osmesa", "OSMesa")):
        if ctypes.util.find_library(library):
            environ["MUJOCO_GL"] = backend
            return


def _record(checkpoint: Checkpoint, seed: int, *, max_episode_steps: int) -> tuple[Frames, float]:
    """The frames of a noise-free episode, and how many belong into a second."""
    policy, config = _policy(checkpoint), checkpoint.config.env
    env = WatchedEnv(partial(_make_visible, config.id, config.kwargs), Watch("the film"))
    try:
        frames, _ = record_episode(
            env, policy, checkpoint.schema, seed=seed, max_episode_steps=max_episode_steps
        )
        return frames, float(env.metadata.get("render_fps") or _DEFAULT_FPS)
    except EnvironmentBroke as broke:
        _log.error("the film: the traceback of the environment", exc_info=broke.error)
        raise EnvironmentFailedError(
            f"the film: {broke}; correct the environment, whose traceback is in the log"
        ) from broke.error
    except EnvironmentSpecError as error:
        if error.__cause__ is None or not _is_mujoco(env):
            raise
        raise EnvironmentSpecError(
            f"MuJoCo cannot draw {config.id!r} on this machine ({_summary(error.__cause__)}), "
            f"so {_INSTALL_GL}"
        ) from error
    finally:
        env.close()


def _make_visible(env_id: str, kwargs: dict[str, Any]) -> Environment:
    try:
        return make_env(env_id, kwargs, render_mode="rgb_array")
    except EnvironmentSpecError as error:
        if isinstance(error.__cause__, TypeError) and "'render_mode'" in str(error.__cause__):
            raise EnvironmentSpecError(
                f"environment {env_id!r} takes no render_mode, so it cannot be filmed; let it accept "
                f'render_mode="rgb_array" and return RGB arrays from render()'
            ) from error
        raise


def write_video(path: Path, frames: Frames, *, fps: float) -> None:
    """Writes (H, W, 3) frames as the format that the path's ending names."""
    try:
        if path.suffix.lower() == ".gif":
            _write_gif(path, frames, fps=fps)
        else:
            # ImageIO would scale the pictures to even sides, and warn.
            _mp4_writer().mimwrite(path, list(map(_even, frames)), fps=fps, macro_block_size=None)
    except OSError as error:
        raise UsageError(f"cannot write the video {path}: {error.strerror or error}") from None


def _even(frame: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The frame with its last row and column repeated where a side is odd, which libx264 refuses."""
    height, width, _ = frame.shape
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _write_gif(path: Path, frames: Frames, *, fps: float) -> None:
    stride = max(1, math.ceil(fps / _GIF_FPS))
    first, *others = (Image.fromarray(frame).quantize(128) for frame in frames[::stride])
    duration = round(1000 * stride / fps)
    first.save(path, format="GIF", save_all=True, append_images=others, duration=duration, loop=0)


def _mp4_writer() -> Any:
    try:
        import imageio.v2
        import imageio_ffmpeg  # type: ignore[import-untyped]  # it ships no types

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f'writing .mp4 needs ffmpeg ({error}), so run: pip install "dase-grpc[video]", or choose .gif'
        ) from None
    return imageio.v2


def _is_mujoco(env: Environment) -> bool:
    return any(base.__module__.startswith("gymnasium.envs.mujoco") for base in type(env.unwrapped).__mro__)


def _summary(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
