"""Films: an episode of a policy, drawn by its environment, as a .mp4 or .gif file."""

import ctypes.util
import errno
import importlib
import logging
import math
import os
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from dase_grpc.errors import EnvironmentFailedError, EnvironmentSpecError, UsageError
from dase_grpc.learning.envs.evaluation import record_episode
from dase_grpc.learning.envs.explorer import Policy
from dase_grpc.learning.envs.make import Environment, make_env
from dase_grpc.learning.envs.restarts import EnvironmentBroke, WatchedEnv
from dase_grpc.process.watchdog import Watch
from dase_grpc.runs.checkpoint import Checkpoint
from dase_grpc.runs.files import STAGING_PREFIX, written

Frames = Sequence[npt.NDArray[np.uint8]]

FORMATS: Final = (".mp4", ".gif")
MAX_STEPS: Final = 1_000
"""Longer episodes are cut: a thousand frames of MuJoCo's 480 x 480 take 700 MB before they are written."""

_DEFAULT_FPS: Final = 30
_GIF_FPS: Final = 25
"""Browsers slow down pictures that are shorter than 20 ms."""

_TOO_LITTLE: Final = 64 * 1024
"""Bytes; where no more are free, a film is short for want of room: ffmpeg does not say why it is."""

INSTALL_GL: Final = (
    "install a software renderer (Debian, Ubuntu: apt-get install libegl1 libgl1-mesa-dri, or libosmesa6 "
    "and MUJOCO_GL=osmesa)"
)

_log = logging.getLogger(__name__)


def prepare_video(path: Path) -> None:
    """Checks before any work is done that `path` can be written here, and picks MuJoCo's renderer.

    Must come before the first environment of this process, because MuJoCo looks once.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--video {path}: the file's ending must be one of {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--video {path}: there is no folder {path.parent}")
    if path.suffix.lower() == ".mp4":
        _mp4_modules()
    choose_mujoco_backend(os.environ)
    try:
        importlib.import_module("mujoco")
    except Exception as error:  # PyOpenGL fails with whatever its missing library makes of it
        raise EnvironmentSpecError(
            f"MuJoCo cannot draw with MUJOCO_GL={os.environ.get('MUJOCO_GL')} on this machine "
            f"({_summary(error)}), so unset it or {INSTALL_GL}"
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
    """Writes (H, W, 3) frames as the format that the path's ending names, all at once.

    Raises:
        UsageError: it cannot be written; what was at `path` is there still, and nothing else.
    """
    write = _write_gif if path.suffix.lower() == ".gif" else _write_mp4
    with (
        written(f"the video {path}"),
        TemporaryDirectory(dir=path.parent, prefix=STAGING_PREFIX) as folder,
    ):
        staged = Path(folder) / f"film{path.suffix.lower()}"
        write(staged, frames, fps=fps)
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        staged.replace(path)


def _even(frame: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The frame with its last row and column repeated where a side is odd, which libx264 refuses."""
    height, width, _ = frame.shape
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _write_gif(path: Path, frames: Frames, *, fps: float) -> None:
    stride = max(1, math.ceil(fps / _GIF_FPS))
    first, *others = (Image.fromarray(frame).quantize(128) for frame in frames[::stride])
    duration = round(1000 * stride / fps)
    first.save(path, format="GIF", save_all=True, append_images=others, duration=duration, loop=0)


def _write_mp4(path: Path, frames: Frames, *, fps: float) -> None:
    imageio, ffmpeg = _mp4_modules()
    with suppress(OSError):  # many lines; and where ffmpeg only ends too early, nothing is raised
        # ImageIO would scale the pictures to even sides, and warn.
        imageio.mimwrite(
            path, list(map(_even, frames)), fps=fps, macro_block_size=None, ffmpeg_log_level="quiet"
        )
    try:
        found = ffmpeg.count_frames_and_secs(path)[0]
    except RuntimeError:  # it is no film at all
        found = 0
    if found != len(frames):
        disk = os.statvfs(path.parent)
        if disk.f_bavail * disk.f_frsize < _TOO_LITTLE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise OSError(errno.EIO, f"ffmpeg has written {found} of {len(frames)} frames")


def _mp4_modules() -> tuple[Any, Any]:
    """ImageIO and its ffmpeg."""
    try:
        import imageio.v2
        import imageio_ffmpeg  # type: ignore[import-untyped]  # it ships no types

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f'writing .mp4 needs ffmpeg ({error}), so run: pip install "dase-grpc[video]", or choose .gif'
        ) from None
    return imageio.v2, imageio_ffmpeg


def _is_mujoco(env: Environment) -> bool:
    return any(base.__module__.startswith("gymnasium.envs.mujoco") for base in type(env.unwrapped).__mro__)


def _summary(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def filmed(
    policy: Policy, checkpoint: Checkpoint, seed: int, *, max_episode_steps: int = MAX_STEPS
) -> tuple[Frames, float]:
    """The frames of a noise-free episode in a checkpoint's environment, and how many belong into a second.

    Raises:
        EnvironmentSpecError: the environment cannot be drawn here.
        EnvironmentFailedError: it raised.
    """
    config = checkpoint.config.env
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
            f"MuJoCo cannot draw {config.id!r} on this machine ({_summary(error.__cause__)}), so {INSTALL_GL}"
        ) from error
    finally:
        env.close()
