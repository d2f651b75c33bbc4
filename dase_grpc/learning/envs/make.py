"""Environments by name, made and tried out, without those that no agent here can act in."""

import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Tuple

from dase_grpc.config.sections import EnvConfig
from dase_grpc.errors import EnvironmentSpecError, MalformedError
from dase_grpc.learning.envs.answers import (
    RAISED,
    ActionMap,
    Call,
    faults,
    kind,
    misuse,
    summary,
    text,
    to_float32,
    to_reward,
)
from dase_grpc.learning.envs.flat import FlatObservation, unflattenable
from dase_grpc.learning.envs.ids import continuous_variant, factory_of, latest_version, resolve_id
from dase_grpc.process.containment import SURROUNDINGS, kept_call, process_kept
from dase_grpc.process.watchdog import Watch
from dase_grpc.schema import Array, TransitionSchema

Environment: TypeAlias = gymnasium.Env[Array, Array]

EXPECTED_WARNING: Final = "compiler attribute 'settotalmass' is deprecated"
"""MuJoCo 4 says so about the half_cheetah.xml that Gymnasium ships, each time a HalfCheetah is made."""

_OWNER: Final = "the environment that was tried out"

_log = logging.getLogger(__name__)
_mujoco_hook = threading.RLock()


def make_env(env_id: str, kwargs: Mapping[str, Any], *, render_mode: str | None = None) -> Environment:
    """An environment with flat Box observations and a bounded Box action space.

    What it does to the process holds in its own calls only (process/containment.py). env_id is what
    `resolve_id` takes. kwargs go to `gymnasium.make` or to whom the id names; render_mode joins them unless
    None. Dict, Tuple and multi-dimensional Box observations are flattened (`FlatObservation`), and
    Gymnasium's passive checker is off unless kwargs ask for it.

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


@contextmanager
def borrowed_env(config: EnvConfig, *, owner: str) -> Iterator[Environment]:
    """An environment to look at within the block; raises as `make_env`."""
    env = make_env(config.id, config.kwargs)
    try:
        yield env
    finally:
        close_env(env, owner=owner)


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
    names = ["environment", "observation_size", "action_size"]
    if then.action_size == now.action_size:
        names += ["action_low", "action_high"]
    pairs = ((name, getattr(then, name), getattr(now, name)) for name in names)
    if found := "; ".join(f"{name}: {was} then, {is_} now" for name, was, is_ in pairs if was != is_):
        raise EnvironmentSpecError(
            f"the environment {now.environment!r} is not the one that the agent learned in ({found}); make "
            f"it as it was, or start a new run"
        )


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
    make = partial(_gymnasium_make, env_id.rpartition(":")[2]) if factory is None else factory
    try:
        env = make(**arguments)
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


def _gymnasium_make(name: str, /, **arguments: Any) -> Environment:
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
            if message.startswith(EXPECTED_WARNING):
                return
            if previous is not None:
                previous(message)
            else:
                _log.warning("MuJoCo: %s", message.strip())

        mujoco.set_mju_user_warning(warn)
        try:
            yield
        finally:
            mujoco.set_mju_user_warning(previous)


class KeptEnv(gymnasium.Wrapper[Array, Array, Array, Array]):
    """An environment that finds in its calls what it has made of the process, while nobody else does.

    Looking at everything takes longer than a step of a small environment. So that is done at its first
    `reset` and `step`, and at later ones where something had to be put back; else only what was changed
    before is looked at. What a later call is the first to change stays, and our own code has to stand it.
    """

    def __init__(self, env: gymnasium.Env[Array, Array]) -> None:
        super().__init__(env)
        self._good: set[Call] = set()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """The environment's own."""
        if "reset" in self._good and not SURROUNDINGS.theirs:
            return self.env.reset(seed=seed, options=options)
        with self._kept("reset"):
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Array) -> Any:
        """The environment's own."""
        if "step" in self._good and not SURROUNDINGS.theirs:
            return self.env.step(action)
        with self._kept("step"):
            return self.env.step(action)

    @contextmanager
    def _kept(self, call: Call) -> Iterator[None]:
        if call in self._good:
            with SURROUNDINGS.as_before():
                yield
            return
        with kept_call() as changed:
            yield
        if not changed:
            self._good.add(call)

    def render(self) -> Any:
        """The environment's own."""
        with SURROUNDINGS.entered():
            return self.env.render()

    def close(self) -> None:
        """The environment's own."""
        with kept_call():
            self.env.close()


# --- tried out before a run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class TryOut:
    """What came of trying an environment out.

    Attributes:
        schema: what its transitions look like; None if it cannot be made or has spaces we cannot use.
        findings: what has to be corrected before an agent can train in it.
        notes: what an agent can train with, but is hardly meant so.
    """

    schema: TransitionSchema | None
    findings: tuple[EnvironmentSpecError, ...] = ()
    notes: tuple[str, ...] = ()


def tried_out(config: EnvConfig, watch: Watch) -> TransitionSchema:
    """Tries an environment out as `try_out` does; what its transitions look like.

    Raises:
        EnvironmentSpecError: the first finding.
    """
    result = try_out(config, watch)
    for note in result.notes:
        _log.warning("note: %s", note)
    if result.findings or result.schema is None:
        raise result.findings[0]
    return result.schema


def try_out(config: EnvConfig, watch: Watch) -> TryOut:
    """Makes an environment, probes and closes it. The watch sees each call; what it raises is a finding."""
    with process_kept():
        try:
            with watch.during("making"):
                env = make_env(config.id, config.kwargs)
        except EnvironmentSpecError as error:
            return TryOut(None, (error,))
        try:
            schema = schema_of(env, config.id)
            result = TryOut(schema, *probe(env, schema, watch))
        finally:
            with watch.during("close"):
                close_env(env, owner=_OWNER)
    return result


def probe(
    env: Environment, schema: TransitionSchema, watch: Watch, *, seed: int = 0
) -> tuple[tuple[EnvironmentSpecError, ...], tuple[str, ...]]:
    """Findings and notes of one reset and one step with the middle of the action space.

    env is one that `make_env` made, and the schema its own.
    """
    size, findings, notes = schema.observation_size, list[EnvironmentSpecError](), list[str]()
    middle = ActionMap(env.action_space)(np.zeros(schema.action_size, np.float32))
    calls: dict[Call, Callable[[], Any]] = {
        "reset": lambda: env.reset(seed=seed, options=None),
        "step": lambda: env.step(middle),
    }
    try:
        for call, ask in calls.items():
            returned = _answer(call, ask, watch)
            found = list(faults(returned, size, call))
            findings += found
            notes += () if found else _not_finite(returned, size, call)
        _require_kept(schema, schema_of(env, schema.environment))
    except EnvironmentSpecError as error:
        findings.append(error)
    return tuple(findings), tuple(notes)


def _answer(call: Call, ask: Callable[[], Any], watch: Watch) -> Any:
    """What a call returned; EnvironmentSpecError: it raised, or its observation is not of its space."""
    try:
        with watch.during(call):
            return ask()
    except EnvironmentSpecError:
        raise
    except RAISED as error:
        if (breach := misuse(call, error)) is not None:
            raise breach from error
        _log.error("%s: the traceback of its %s", _OWNER, call, exc_info=error)
        raise EnvironmentSpecError(
            f"the environment's {call} raised {summary(error)} when it was tried out; correct the "
            f"environment, whose traceback is in the log"
        ) from error


def _require_kept(before: TransitionSchema, after: TransitionSchema) -> None:
    for name in ("observation_size", "action_size", "action_low", "action_high"):
        was, now = getattr(before, name), getattr(after, name)
        if was != now:
            raise EnvironmentSpecError(
                f"the environment changed its spaces in reset or step ({name}: {was} before, {now} after); "
                f"set them in its __init__ and leave them as they are"
            )


def _not_finite(returned: tuple[Any, ...], size: int, call: Call) -> Iterator[str]:
    if not np.isfinite(to_float32(returned[0], size)).all():
        yield f"the environment's first {call} returned an observation that is not finite in float32"
    if call == "step" and not math.isfinite(to_reward(returned[1])):
        yield "the environment's first step returned a reward that is not finite"
