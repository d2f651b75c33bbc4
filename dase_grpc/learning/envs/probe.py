"""The trial of an environment before a run: a breach of Gymnasium's interface is one sentence."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dase_grpc.config.sections import EnvConfig
from dase_grpc.errors import EnvironmentSpecError
from dase_grpc.learning.envs.answers import Call, faults, misuse, to_float32, to_reward
from dase_grpc.learning.envs.foreign import RAISED, summary
from dase_grpc.learning.envs.make import ActionMap, Environment, close_env, make_env, schema_of
from dase_grpc.process.containment import process_kept
from dase_grpc.process.watchdog import Watch
from dase_grpc.schema import TransitionSchema

_OWNER: Final = "the environment that was tried out"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TryOut:
    """What came of trying an environment out.

    Attributes:
        schema: what its transitions look like; None if it cannot be made or has spaces we cannot use.
        findings: what has to be corrected before an agent can train in it; empty where all is well.
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
    """What a call returned.

    Raises:
        EnvironmentSpecError: it raised, or its observation is not of its space.
    """
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
