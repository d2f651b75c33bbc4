"""`dase export`: one file with a trained policy, checked against the policy before it is kept."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dase_grpc.errors import ConfigError, DaseError, UsageError
from dase_grpc.launch.evaluate import Choice, chosen_policy
from dase_grpc.learning.agents.exported import Recipe, write_onnx, write_torchscript
from dase_grpc.learning.agents.model_files import READERS
from dase_grpc.learning.agents.policy import ActorPolicy
from dase_grpc.learning.envs.answers import ActionMap
from dase_grpc.learning.envs.flat import observation_shape
from dase_grpc.learning.envs.make import borrowed_env
from dase_grpc.progress import number, several
from dase_grpc.runs.checkpoint import Checkpoint
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.files import require_utf8
from dase_grpc.runs.lookup import run_of
from dase_grpc.schema import Array

CHECKED: Final = 1_000
"""Observations for which the file has to act as the policy does."""
TOLERANCE: Final = 1e-6
"""By so much of the action's range it may differ, beside what float32 rounds."""

WRITERS: Final = {".onnx": write_onnx, ".pt": write_torchscript}
"""What writes a file, by the end of its name."""

Acting = Callable[[Array], npt.NDArray[Any]]


def export_policy(
    target: Path, out: Path, *, agent: int | Choice = "best", say: Callable[[str], None] = lambda line: None
) -> Path:
    """Writes the policy of an agent, or of the best one, with all between observation and action.

    What was written is read again and compared on 1 000 observations; only then it appears under its name,
    and `say` gets whose policy it holds.

    Raises:
        RunDirectoryError, EnvironmentSpecError: there is no such policy, or its environment is missing here.
        UsageError: the format needs a library, or the file cannot be written.
        DaseError: the file does not act as the policy does.
    """
    if agent == "ensemble":
        raise ConfigError(
            "the ensemble acts by K policies and critics, which no one file holds; export the best"
        )
    if out.suffix not in WRITERS:
        raise ConfigError(
            f"{out} ends in none of {', '.join(WRITERS)}, which says the format: ONNX or TorchScript"
        )
    require_utf8(out, "policy")
    _require_place(out)
    policy, checkpoint = chosen_policy(target, agent)
    assert isinstance(policy, ActorPolicy)
    with borrowed_env(checkpoint.config.env, owner="the export") as env:
        space: Any = env.action_space
        shape = observation_shape(env)
    recipe, to_env = Recipe.of(policy, low=space.low, high=space.high), ActionMap(space)
    told = policy_metadata(checkpoint, agent, shape)
    try:
        with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".export-") as folder:
            file = Path(folder) / out.name
            WRITERS[out.suffix](recipe, file, told)
            _require_alike(lambda rows: to_env(policy.act(rows)), READERS[out.suffix](file).act, recipe)
            file.replace(out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from None
    steps, score = several(checkpoint.step, "step"), number(told["score"])
    say(f"{out}: agent {checkpoint.agent_id} in {told['environment']} after {steps}, evaluated at {score}")
    return out


def _require_place(out: Path) -> None:
    """Refuses, before the best is looked for, what no file can be put in the place of."""
    if not out.absolute().parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise UsageError(f"cannot write {out}: it is a folder")


def policy_metadata(
    checkpoint: Checkpoint, agent: int | Choice, observation_shape: Sequence[int]
) -> dict[str, Any]:
    """What is told of a policy, in a file and by a server."""
    config, schema = checkpoint.config, checkpoint.schema
    return {
        "environment": config.env.id,
        "environment_arguments": config.env.kwargs,
        "observation_size": schema.observation_size,
        "observation_shape": list(observation_shape),
        "action_low": list(schema.action_low),
        "action_high": list(schema.action_high),
        "algorithm": config.agent.algorithm,
        "agent": checkpoint.agent_id,
        "chosen": str(agent),
        "step": checkpoint.step,
        "score": checkpoint.metadata.get("evaluation"),
        "commit": _commit(checkpoint.path),
        "seed": config.train.seed,
        "checkpoint": checkpoint.seal,
    }


def _commit(checkpoint: Path) -> str:
    """The commit of the project that the run of a checkpoint was started from; "" where it is not known."""
    run = run_of(checkpoint)
    return "" if run is None else RunDirectory.open(run).versions.get("git", "")


def _require_alike(policy: Acting, file: Acting, recipe: Recipe) -> None:
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.uniform(-2, 2, (CHECKED, 1))
    rows = (scale * rng.standard_normal((CHECKED, recipe.size))).astype(np.float32)
    expected, found = policy(rows), file(rows)
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise DaseError(f"the file gives {found.dtype} of shape {found.shape[1:]}; it was not kept")
    width = np.broadcast_to(recipe.high - recipe.low, (CHECKED, len(recipe.low))).reshape(expected.shape)
    differences = np.abs(expected.astype(np.float64) - found) / width
    if not (differences <= TOLERANCE + recipe.rounding(rows).reshape(expected.shape) / 2).all():
        raise DaseError(
            f"the file's actions differ by {differences.max():.1e} of their range; it was not kept"
        )
