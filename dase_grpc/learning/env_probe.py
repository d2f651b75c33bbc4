"""Tries an environment out before a run, so that a breach of Gymnasium's interface is one sentence."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from dase_grpc.config import EnvConfig
from dase_grpc.errors import EnvironmentSpecError
from dase_grpc.learning.containment import process_kept
from dase_grpc.learning.envs import ActionMap, Environment, make_env, schema_of, to_float32, to_reward
from dase_grpc.learning.watch import Watch
from dase_grpc.schema import TransitionSchema

_NO_SEED: Final = re.compile(r"\breset\(\) got an unexpected keyword argument '(seed|options)'")
_RESET: Final = "reset(self, *, seed=None, options=None) returns (observation, info)"
_STEP: Final = "step(self, action) returns (observation, reward, terminated, truncated, info)"


def tried_out(config: EnvConfig, watch: Watch) -> TransitionSchema:
    """Makes an environment, probes and closes it; what its transitions look like. The watch sees each call.

    Raises:
        EnvironmentSpecError: it cannot be made, or no agent here can act in it.
        Exception: whatever the environment itself raises, unchanged.
    """
    with process_kept():
        with watch.during("making"):
            env = make_env(config.id, config.kwargs)
        try:
            schema = schema_of(env, config.id)
            probe(env, watch)
        finally:
            with watch.during("close"):
                env.close()
    return schema


def probe(env: Environment, watch: Watch, *, seed: int = 0) -> None:
    """One reset and one step with the middle of the action space; env is one that `make_env` made.

    Raises:
        EnvironmentSpecError: what came back is not what Gymnasium's interface says.
        Exception: whatever the environment itself raises, unchanged.
    """
    (size,) = env.observation_space.shape or (0,)
    with watch.during("reset"), _breaches("reset", _RESET):
        given: Any = env.reset(seed=seed)
    _require_tuple(given, 2, "reset", _RESET)
    _require_numbers(given[0], size, "reset")
    middle = np.zeros(env.action_space.shape or (1,), np.float32).ravel()
    with watch.during("step"), _breaches("step", _STEP):
        given = env.step(ActionMap(env.action_space)(middle))
    _require_tuple(given, 5, "step", _STEP)
    _require_numbers(given[0], size, "step")
    to_reward(given[1])


@contextmanager
def _breaches(method: str, interface: str) -> Iterator[None]:
    """Turns Python's and a wrapper's complaints about the interface into ours; other errors pass."""
    try:
        yield
    except TypeError as error:
        if not (unknown := _NO_SEED.search(str(error))):
            raise
        raise EnvironmentSpecError(
            f"the environment's reset does not take {unknown[1]}, but in Gymnasium's interface {interface}"
        ) from error
    except ValueError as error:
        last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        in_wrapper = str(last.f_globals.get("__name__", "")).startswith("gymnasium.")
        if not (in_wrapper and "to unpack" in str(error)):
            raise
        raise EnvironmentSpecError(
            f"the environment's {method} returned another number of values than in Gymnasium's interface, "
            f"where {interface}"
        ) from error


def _require_tuple(given: Any, length: int, method: str, interface: str) -> None:
    if not isinstance(given, tuple) or len(given) != length:
        what = f"{len(given)} values" if isinstance(given, tuple) else f"one {type(given).__name__}"
        raise EnvironmentSpecError(
            f"the environment's {method} returned {what}, but in Gymnasium's interface {interface}"
        )


def _require_numbers(observation: Any, size: int, method: str) -> None:
    try:
        to_float32(observation, size)
    except (TypeError, ValueError) as error:
        raise EnvironmentSpecError(
            f"the environment's {method} returned an observation that is no array of numbers "
            f"({type(observation).__name__}), so correct it"
        ) from error
