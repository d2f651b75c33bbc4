"""Evaluation: noise-free episodes of a policy in fresh environments whose seeds no training ever uses."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dase_grpc.errors import EnvironmentSpecError
from dase_grpc.learning.envs.answers import RAISED, ActionMap, summary
from dase_grpc.learning.envs.explorer import Policy, require_finite_action
from dase_grpc.learning.envs.make import Environment, close_env
from dase_grpc.learning.envs.restarts import EnvironmentBroke, given_up, reset, step
from dase_grpc.schema import Array, TransitionSchema

_log = logging.getLogger("dase")

SIDE_BY_SIDE: Final = 1_000
"""Environments at once, at most: each takes memory, and files may be few."""


@dataclass(frozen=True)
class Evaluation:
    """The undiscounted returns of one evaluation, in the order of its seeds; NaN rewards stay NaN.

    Attributes:
        return_std: the population's (ddof = 0).
        cut: episodes that had not ended after `max_episode_steps`; their returns so far count.
        restarts: how often it was begun anew because an environment raised.
    """

    return_mean: float
    return_std: float
    episodes: int
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    cut: int
    restarts: int = 0


class Evaluator:
    """Evaluates policies, always on the same episodes: number i is reset with `seed + 2 * i`.

    Evaluation seeds are odd and all others even (seeding.py), so that step of two keeps them apart.
    `make` returns a new environment at each call; the evaluator closes it. Where it gives a `WatchedEnv`
    that raises, the whole evaluation is begun anew, up to `max_restarts` times; `name` says whose it is.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        schema: TransitionSchema,
        *,
        episodes: int,
        max_episode_steps: int,
        seed: int,
        max_restarts: int = 0,
        name: str = "evaluation",
    ) -> None:
        self._make, self._schema = make, schema
        self._episodes, self._max_episode_steps, self._seed = episodes, max_episode_steps, seed
        self._max_restarts, self._name = max_restarts, name

    def evaluate(self, policy: Policy) -> Evaluation:
        """Plays up to `SIDE_BY_SIDE` episodes at once, a batched policy call per step over those that go on.

        Environments are made for this call and closed after it. The same policy gives the same result.

        Raises:
            DivergedError: the policy gave an action that is not finite.
            EnvironmentSpecError: the environment cannot be made or breaks its own spaces, and is no
                `WatchedEnv`, or no reset of its agent's environments had been right before.
            EnvironmentFailedError: it did so later, or raised, and again each time the evaluation was begun
                anew.
        """
        restarts = 0
        last: EnvironmentBroke | None = None
        while True:
            try:
                firsts = range(0, self._episodes, SIDE_BY_SIDE)
                return replace(_together([self._part(policy, first) for first in firsts]), restarts=restarts)
            except EnvironmentBroke as broke:
                same = broke.is_like(last)
                if same or restarts == self._max_restarts:
                    raise given_up(broke, where=self._name, restarts=restarts, same=same) from broke.error
                restarts, last = restarts + 1, broke
                _log.warning("%s: %s, so it is begun anew", self._name, broke, exc_info=broke.error)

    def _part(self, policy: Policy, first: int) -> Evaluation:
        with ExitStack() as stack:
            envs = [self._open(stack) for _ in range(min(SIDE_BY_SIDE, self._episodes - first))]
            return self._play(policy, envs, first)

    def _open(self, stack: ExitStack) -> Environment:
        env = self._make()
        stack.callback(close_env, env, owner=self._name)
        return env

    def _play(self, policy: Policy, envs: list[Environment], first: int) -> Evaluation:
        size = self._schema.observation_size
        to_env = ActionMap(envs[0].action_space)
        observations = np.empty((len(envs), size), np.float32)
        for index, env in enumerate(envs):
            observations[index] = reset(env, seed=self._seed + 2 * (first + index), size=size)
        returns, lengths = [0.0] * len(envs), [0] * len(envs)
        active = list(range(len(envs)))
        for _ in range(self._max_episode_steps):
            actions = greedy_actions(policy, observations[active], self._schema.action_size)
            ended = set()
            for index, action in zip(active, actions, strict=True):
                taken = step(envs[index], to_env(action), size=size)
                observations[index], reward, terminated, truncated = taken
                returns[index] += reward
                lengths[index] += 1
                if terminated or truncated:
                    ended.add(index)
            active = [index for index in active if index not in ended]
            if not active:
                break
        return _evaluation(returns, lengths, cut=len(active))


def _evaluation(returns: Sequence[float], lengths: Sequence[int], *, cut: int) -> Evaluation:
    with np.errstate(all="ignore"):
        mean, std = float(np.mean(returns)), float(np.std(returns))
    return Evaluation(mean, std, len(returns), tuple(returns), tuple(lengths), cut)


def _together(parts: Sequence[Evaluation]) -> Evaluation:
    if len(parts) == 1:
        return parts[0]
    returns = [each for part in parts for each in part.returns]
    lengths = [each for part in parts for each in part.lengths]
    return _evaluation(returns, lengths, cut=sum(part.cut for part in parts))


def greedy_actions(policy: Policy, observation: Array, action_size: int) -> Array:
    """The policy's actions, (B, m) -> (B, n), which have to be finite; zero where an observation is not."""
    finite: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(observation), axis=1)
    if not finite.any():
        return np.zeros((len(observation), action_size), np.float32)
    if finite.all():
        actions = policy.act(observation)
    else:
        actions = policy.act(np.where(finite[:, np.newaxis], observation, np.float32(0)))
        actions = np.where(finite[:, np.newaxis], actions, np.float32(0))
    require_finite_action(actions)
    return actions


def record_episode(
    env: Environment, policy: Policy, schema: TransitionSchema, *, seed: int, max_episode_steps: int
) -> tuple[list[npt.NDArray[np.uint8]], float]:
    """Plays one noise-free episode; returns its (H, W, 3) frames, the first state's included, and its return.

    env is made with `render_mode="rgb_array"` and stays open. All frames are held in memory.

    Raises:
        EnvironmentSpecError: the environment cannot render on this machine, or not to RGB arrays.
        DivergedError: the policy gave an action that is not finite.
    """
    to_env = ActionMap(env.action_space)
    size = schema.observation_size
    observation = reset(env, seed=seed, size=size)
    frames, total = [_frame(env, schema)], 0.0
    for _ in range(max_episode_steps):
        action = greedy_actions(policy, observation[np.newaxis], schema.action_size)[0]
        observation, reward, terminated, truncated = step(env, to_env(action), size=size)
        total += reward
        frames.append(_frame(env, schema))
        if terminated or truncated:
            break
    return frames, total


def _frame(env: Environment, schema: TransitionSchema) -> npt.NDArray[np.uint8]:
    try:
        frame: Any = env.render()
    except RAISED as error:
        raise EnvironmentSpecError(
            f"environment {schema.environment!r} cannot be rendered here ({summary(error)}); for MuJoCo "
            f"without a display set MUJOCO_GL=egl or osmesa"
        ) from error
    if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3:
        raise EnvironmentSpecError(
            f"environment {schema.environment!r} did not render an RGB array, so make it with "
            f'render_mode="rgb_array", which it must support'
        )
    return np.array(frame, np.uint8)
