"""Environments by name, without those that no agent here can act in; actions mapped into their units."""

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Tuple

from dase_grpc.errors import EnvironmentSpecError, MalformedError
from dase_grpc.learning.envs.flat import FlatObservation, unflattenable
from dase_grpc.learning.envs.foreign import RAISED, kind, summary, text
from dase_grpc.learning.envs.ids import continuous_variant, factory_of, latest_version, resolve_id
from dase_grpc.process.containment import SURROUNDINGS, kept_call
from dase_grpc.schema import Array, TransitionSchema

Environment: TypeAlias = gymnasium.Env[Array, Array]

EXPECTED_WARNING: Final = "compiler attribute 'settotalmass' is deprecated"
"""MuJoCo 4 says so about the half_cheetah.xml that Gymnasium ships, each time a HalfCheetah is made."""

_log = logging.getLogger(__name__)
_mujoco_hook = threading.RLock()


def make_env(env_id: str, kwargs: Mapping[str, Any], *, render_mode: str | None = None) -> Environment:
    """An environment with flat Box observations and a bounded Box action space.

    What it does to the process holds in its own calls only (process/containment.py).

    env_id is a Gymnasium id, whose latest version is taken if it names none, or `package.module:Name`
    where Name is a class or a function that returns an environment, or an id that importing the module
    registers. For such a module the current directory joins `sys.path`, as with `python -m`. kwargs go
    to `gymnasium.make` or to Name; render_mode joins them unless None. Dict, Tuple and multi-dimensional
    Box observations are flattened (`FlatObservation`), and Gymnasium's passive checker is off unless kwargs
    ask for it.

    Raises:
        EnvironmentSpecError: the environment is missing, cannot be made, or has spaces we cannot use.
    """
    arguments = dict(kwargs) if render_mode is None else {**kwargs, "render_mode": render_mode}
    resolved = resolve_id(env_id)
    with _quiet_mujoco(), kept_call("make"):
        env: Environment = KeptEnv(_create(resolved, arguments))
    try:
        if _is_to_be_flattened(_space(env, env_id, "observation_space"), env_id):
            env = FlatObservation(env)
        schema_of(env, env_id)
    except BaseException:
        close_env(env, owner=f"environment {env_id!r}")
        raise
    return env


def close_env(env: gymnasium.Env[Any, Any], *, owner: str) -> None:
    """Closes an environment; what it raises is logged, for nobody needs it any more."""
    try:
        env.close()
    except RAISED as error:
        _log.warning("%s: closing the environment failed with %s", owner, summary(error))


def schema_of(env: Environment, env_id: str) -> TransitionSchema:
    """The layout of the environment's transitions.

    Raises:
        EnvironmentSpecError: the observation is no flat Box, or the action no bounded one.
    """
    observation, action = (_space(env, env_id, name) for name in ("observation_space", "action_space"))
    if not isinstance(observation, Box) or len(observation.shape) != 1:
        raise EnvironmentSpecError(
            f"environment {env_id!r} has the observation space {text(observation)}, but agents here observe "
            f"a flat Box, so wrap it in gymnasium.wrappers.FlattenObservation or TransformObservation"
        )
    if not isinstance(action, Box):
        variant = continuous_variant(env_id)
        remedy = f"take {variant}" if variant else "choose an environment with continuous actions or wrap it"
        raise EnvironmentSpecError(
            f"environment {env_id!r} has the action space {text(action)}, but agents here act in a Box, "
            f"that is, by continuous actions, so {remedy}"
        )
    # an unbounded Box of integers shows its dtype's limits as bounds
    low = np.where(action.bounded_below, action.low, -np.inf).ravel()
    high = np.where(action.bounded_above, action.high, np.inf).ravel()
    try:
        return TransitionSchema(
            environment=env_id,
            observation_size=observation.shape[0],
            action_size=low.size,
            action_low=tuple(low.tolist()),
            action_high=tuple(high.tolist()),
        )
    except MalformedError as error:
        raise EnvironmentSpecError(f"environment {env_id!r}: {error}") from error


def require_same_environment(now: TransitionSchema, then: TransitionSchema) -> None:
    """Checks that the environment has the sizes and bounds that an agent learned in.

    Raises:
        EnvironmentSpecError: naming all that differs, with both values.
    """
    sizes, bounds = ("environment", "observation_size", "action_size"), ("action_low", "action_high")
    names = sizes if then.action_size != now.action_size else (*sizes, *bounds)
    pairs = ((name, getattr(then, name), getattr(now, name)) for name in names)
    found = "; ".join(
        f"{name}: {before} then, {after} now" for name, before, after in pairs if before != after
    )
    if found:
        raise EnvironmentSpecError(
            f"the environment {now.environment!r} is not the one that the agent learned in ({found}); make "
            f"it as it was, or start a new run"
        )


class ActionMap:
    """Maps normalised actions in [-1, 1] linearly onto a bounded Box; ±1 are exactly its bounds."""

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        if not isinstance(space, Box):
            raise TypeError(f"an ActionMap needs a Box, not {space}")
        self._shape, self._dtype = space.shape, space.dtype
        self._whole = np.issubdtype(space.dtype, np.integer)
        low, high = space.low.ravel(), space.high.ravel()
        self._identity = space.dtype == np.float32 and bool((low == -1).all() and (high == 1).all())
        precision = np.dtype(np.float32 if self._identity else np.float64)
        self._low: npt.NDArray[Any] = low.astype(precision)
        self._high: npt.NDArray[Any] = high.astype(precision)
        self._half_low, self._half_high = self._low / 2, self._high / 2
        self._ends = low, high

    def __call__(self, action: Array) -> npt.NDArray[Any]:
        """(n,) normalised -> the Box's shape and dtype, always a new array.

        Out-of-range actions are clipped to the box; whole-number spaces get the nearest number.
        """
        if self._identity:
            values: npt.NDArray[Any] = action
        else:
            # this form of low + (a + 1) / 2 * (high - low) has no rounding error at both ends
            values = (1.0 - action) * self._half_low + (1.0 + action) * self._half_high
        values = np.minimum(np.maximum(values, self._low), self._high)
        if self._whole:
            return self._rounded(values).reshape(self._shape)
        return values.astype(self._dtype).reshape(self._shape)

    def _rounded(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The nearest whole numbers; the bounds as they are, for float64 may not hold them (2^63 - 1)."""
        low, high = self._ends
        with np.errstate(all="ignore"):  # such a bound is no number of the dtype before it is replaced
            whole = np.rint(values).astype(self._dtype)
        return np.where(values >= self._high, high, np.where(values <= self._low, low, whole))


def _space(env: Environment, env_id: str, name: str) -> object:
    try:
        return getattr(env, name, None)
    except RAISED as error:
        raise EnvironmentSpecError(
            f"environment {env_id!r} has no {name}, for asking for it failed with {summary(error)}; set it "
            f"in the environment's __init__"
        ) from error


def _is_to_be_flattened(space: object, env_id: str) -> bool:
    if not isinstance(space, Dict | Tuple):
        return isinstance(space, Box) and len(space.shape) != 1
    if (found := unflattenable(space)) is not None:
        raise EnvironmentSpecError(
            f"environment {env_id!r} has an observation space whose {found}, and agents here observe "
            f"numbers; leave that out with gymnasium.wrappers.FilterObservation, or turn it into a Box with "
            f"TransformObservation"
        )
    return gymnasium.spaces.flatdim(space) > 0


def _create(env_id: str, arguments: dict[str, Any]) -> Environment:
    factory = factory_of(env_id)
    name = env_id.rpartition(":")[2]
    try:
        env = _gymnasium_make(name, arguments) if factory is None else factory(**arguments)
    except EnvironmentSpecError:
        raise
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise EnvironmentSpecError(_missing_package(env_id, error, registered=factory is None)) from error
    except RAISED as error:
        given = f" with {text(arguments)}" if arguments else ""
        logged = ""
        if not text(error) or not isinstance(error, Exception):  # the sentence alone would not do
            _log.error("the traceback of the environment %r", env_id, exc_info=error)
            logged = ", whose traceback is in the log"
        raise EnvironmentSpecError(
            f"making the environment {env_id!r}{given} failed with {summary(error)}{logged}"
        ) from error
    if not isinstance(env, gymnasium.Env):
        raise EnvironmentSpecError(
            f"{env_id!r} returned {kind(env)} instead of a gymnasium.Env, so make it return one"
        )
    return env


def _gymnasium_make(name: str, arguments: dict[str, Any]) -> Environment:
    with warnings.catch_warnings():
        # `resolve_id` has noted it, once and without colours.
        warnings.filterwarnings("ignore", message=".*is out of date", category=DeprecationWarning)
        # The passive checker costs a call per step and repeats its warnings at every evaluation.
        return gymnasium.make(name, **{"disable_env_checker": True, **arguments})


def _missing_package(env_id: str, error: Exception, *, registered: bool) -> str:
    name = env_id.rpartition(":")[2]
    latest = latest_version(name) if registered else None
    if latest not in (None, name):
        return f"environment {env_id!r} is an old version that needs more, so use {latest} ({summary(error)})"
    if "box2d" in str(error).lower():
        return f'environment {env_id!r} needs Box2D, so run: pip install "dase-grpc[box2d]"'
    return f"environment {env_id!r} cannot be imported, so install what is missing: {summary(error)}"


@contextmanager
def _quiet_mujoco() -> Iterator[None]:
    """Drops `EXPECTED_WARNING`; every other warning of MuJoCo goes where it went, or else to the log."""
    import mujoco  # late, so that a program can still set MUJOCO_GL after importing this module

    with _mujoco_hook:
        previous: Callable[[str], object] | None = mujoco.get_mju_user_warning()

        def warn(message: str) -> None:
            if not message.startswith(EXPECTED_WARNING):
                (previous or _log_mujoco)(message)

        mujoco.set_mju_user_warning(warn)
        try:
            yield
        finally:
            mujoco.set_mju_user_warning(previous)


def _log_mujoco(message: str) -> None:
    _log.warning("MuJoCo: %s", message.strip())


class KeptEnv(gymnasium.Wrapper[Array, Array, Array, Array]):
    """An environment that finds in its calls what it has made of the process, while nobody else does.

    Looking at everything takes longer than a step of a small environment. So that is done at its first
    `reset` and `step`, and at later ones where something had to be put back; else only what was changed
    before is looked at. What a later call is the first to change stays, and our own code has to stand it.
    """

    def __init__(self, env: gymnasium.Env[Array, Array]) -> None:
        super().__init__(env)
        self._good_resets = self._good_steps = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """The environment's own."""
        if self._good_resets:
            if not SURROUNDINGS.theirs:
                return self.env.reset(seed=seed, options=options)
            with SURROUNDINGS.as_before():
                return self.env.reset(seed=seed, options=options)
        with kept_call() as changed:
            returned = self.env.reset(seed=seed, options=options)
        self._good_resets = not changed
        return returned

    def step(self, action: Array) -> Any:
        """The environment's own."""
        if self._good_steps:
            if not SURROUNDINGS.theirs:
                return self.env.step(action)
            with SURROUNDINGS.as_before():
                return self.env.step(action)
        with kept_call() as changed:
            returned = self.env.step(action)
        self._good_steps = not changed
        return returned

    def render(self) -> Any:
        """The environment's own."""
        with SURROUNDINGS.entered():
            return self.env.render()

    def close(self) -> None:
        """The environment's own."""
        with kept_call():
            self.env.close()
