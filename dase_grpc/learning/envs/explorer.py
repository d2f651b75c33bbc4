"""One agent's exploration of its own copy of the environment, one packed transition for each step."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np

from dase_grpc import seeding
from dase_grpc.errors import DivergedError
from dase_grpc.learning.envs.answers import ActionMap, coarsened, summary
from dase_grpc.learning.envs.make import Environment
from dase_grpc.learning.envs.noise import Gaussian, Noise, require_action
from dase_grpc.learning.envs.restarts import KEPT, EnvironmentBroke, RestartableEnv, reset, step
from dase_grpc.learning.envs.steps import Episode, ExploredStep, NStep, Reason
from dase_grpc.schema import Array, TransitionSchema

REFUSED_IN_A_ROW: Final = 100
"""Refused rows in a row after which an environment is taken for broken and reset."""

REPLAYED_STEPS: Final = 10_000
"""The longest episode that a resumed run goes on with; of a longer one the actions are not kept."""

_HELD: Final = "held"
_NOISE: Final = "noise."

_log = logging.getLogger(__name__)


def require_finite_action(action: Array, *, of: str = "the policy") -> None:
    """Raises a DivergedError unless a policy's actions, (..., n), are finite; `of` says whose they are."""
    if not np.isfinite(action).all():
        raise diverged(of, "its actions are not finite")


def diverged(who: str, finding: str) -> DivergedError:
    """The error that says who has diverged, by what that was noticed, and what to do."""
    return DivergedError(
        f"{who} has diverged: {finding}; lower agent.actor_lr or agent.critic_lr, or scale the reward "
        f"({KEPT})"
    )


class Policy(Protocol):
    """A deterministic policy."""

    def act(self, observation: Array) -> Array:
        """Noise-free actions in [-1, 1]; (B, m) float32 -> (B, n) float32, a new array."""
        ...


class Explorer:
    """Steps one environment with a noisy policy; one thread at a time.

    The first `start_steps` actions are uniform in [-1, 1]; later ones are what `noise` makes of
    the policy's, clipped to [-1, 1]. Where the current observation is not finite the action is uniform
    too, and where there is no policy. Episode number k, from 0, begins with a reset with the seed
    `episode_seed(k)`, so that it can be played again. The environment stays its maker's to close.

    A `RestartableEnv` that raises is made anew, and the next episode begins in it. Of the broken one what
    was stored stays, for each row is whole in itself; of the step that raised nothing is stored, and it
    does not count.

    With `n_step` n over 1 rows hold n-step returns with the discount γ (`NStep`), one row for each step that
    is not refused. Steps are held back until their return is whole. A refused step ends the returns of those
    before it, and so does a break of the episode: what is held then goes out with the next step.

    With `anew`, `resume` leaves the generator as it was given: what comes then is drawn from streams of its
    own, as are the episodes after the one that is gone on with.

    Attributes:
        restarts: the calls that raised in the last `step`, each a restart; also where that failed in the end.
    """

    def __init__(
        self,
        env: Environment,
        schema: TransitionSchema,
        *,
        agent_id: int,
        rng: np.random.Generator,
        episode_seed: Callable[[int], int],
        start_steps: int,
        noise: Noise,
        n_step: int = 1,
        discount: float = 1.0,
        anew: bool = False,
    ) -> None:
        self._env = env
        self._restartable = env if isinstance(env, RestartableEnv) else None
        self._schema = schema
        self._agent_id = agent_id
        self._rng, self._anew = rng, anew
        self._episode_seed, self._seed = episode_seed, 0
        self._start_steps, self._noise = start_steps, noise
        self._looks_at_noise = type(noise) is not Gaussian
        self._returns = NStep(schema, n=n_step, discount=discount) if n_step > 1 else None
        self._to_env = ActionMap(env.action_space)
        self._steps, self._episodes = 0, 0
        self._refused_in_a_row, self._warned, self._said_coarse = 0, False, False
        self._observed, self.restarts = False, list[str]()
        self._observation: Array | None = None
        self._finite = False
        # the actions and the last observation of an episode that is gone on with, unless too long; its return
        self._broken_off: tuple[tuple[Array, Array] | None, str] | None = None
        self._actions, self._return, self._length = list[Array](), 0.0, 0

    def observe(self) -> Array:
        """The observation that the next step acts on, (m,); a reset comes first where an episode begins.

        If the environment breaks in that step, it acts on another one. Raises as `step`.
        """
        self.restarts.clear()
        self._observed = True
        while True:
            try:
                return self._reset() if self._observation is None else self._observation
            except EnvironmentBroke as broke:
                self._restart(broke)
                self.restarts.append(broke.call)

    def step(self, policy: Policy | None, version: int) -> ExploredStep:
        """Performs exactly one environment step, with a reset before it where a new episode begins.

        version is the policy's, stored modulo 2^32.

        Raises:
            DivergedError: the policy gave an action that is not finite.
            AlgorithmError: the noise did.
            EnvironmentSpecError: the first reset, or anything of an environment that cannot be made anew,
                gave an observation of another shape than its space's, or a reward that is not one number.
            EnvironmentFailedError: it raised or gave such, and again each time it was made anew.
            Exception: whatever an environment raises that cannot be made anew.
        """
        if not self._observed:
            self.restarts.clear()
        self._observed = False
        while True:
            try:
                explored = self._attempt(policy, version)
            except EnvironmentBroke as broke:
                self._restart(broke)
                self.restarts.append(broke.call)
            else:
                if self._restartable is not None:
                    self._restartable.went_well(ended=explored.episode is not None)
                return replace(explored, restarts=tuple(self.restarts)) if self.restarts else explored

    def _attempt(self, policy: Policy | None, version: int) -> ExploredStep:
        observation = self._reset() if self._observation is None else self._observation
        action = self._choose(policy, version, observation)
        next_observation, reward, terminated, truncated = self._act(action)
        was_finite, self._finite = self._finite, bool(np.isfinite(next_observation).all())
        row = self._pack(observation, action, next_observation, reward, bootstrap=not terminated)
        row.view(np.uint32)[-2:] = self._agent_id, version & 0xFFFF_FFFF

        self._observation = next_observation
        self._steps += 1
        episode = None
        if terminated or truncated:
            episode, self._observation = Episode(self._return, self._length), None
        reason: Reason | None = None
        if not (was_finite and self._finite):
            reason = "observation"
        elif not math.isfinite(row[self._schema.columns["reward"].start]):
            reason = "reward"
        if reason is None:
            self._refused_in_a_row = 0
        else:
            self._refuse(reason)
        explored = ExploredStep((row,) if reason is None else (), reason, episode)
        return explored if self._returns is None else self._returns.after(explored, first=self._length == 1)

    def flush(self) -> tuple[Array, ...]:
        """The rows of all steps that are held back, as if the episode had been truncated after the last.

        For whoever explores no more; an episode that goes on does so without them.
        """
        return () if self._returns is None else tuple(self._returns.cut())

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """All that exploring goes on from: what JSON can hold, and arrays.

        Of the environment, its episode's number, hence its seed, and the actions, up to `REPLAYED_STEPS`; the
        rows that are held back; what the noise remembers.
        """
        numbers = {
            "generator": seeding.generator_state(self._rng),
            "steps": self._steps,
            "episodes": self._episodes,
            "refused_in_a_row": self._refused_in_a_row,
            "warned": self._warned,
            "length": self._length,
            "return": repr(self._return),  # NaN and infinity included, which JSON has not
            "seed": self._seed,
        }
        if self._restartable is not None:
            numbers["failures"] = self._restartable.failures
            numbers["good_steps"] = self._restartable.good_steps
        held = {f"{_NOISE}{name}": each for name, each in self._noise.state_dict().items()}
        if self._returns is not None and len(self._returns):
            held[_HELD] = self._returns.state()
        if self._observation is None or self._length > REPLAYED_STEPS:
            return {**numbers, "within_episode": self._observation is not None}, held
        actions = np.array(self._actions, np.float32).reshape(-1, self._schema.action_size)
        arrays = {"actions": actions, "observation": self._observation, **held}
        return {**numbers, "within_episode": True}, arrays

    def resume(self, numbers: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Goes on from what `state` gave, once `replay` has been called.

        Raises:
            KeyError, TypeError, ValueError: they are not what `state` gave.
        """
        if not self._anew:
            seeding.restore_generator(self._rng, numbers["generator"])
        self._steps, self._episodes = int(numbers["steps"]), int(numbers["episodes"])
        self._refused_in_a_row, self._warned = int(numbers["refused_in_a_row"]), bool(numbers["warned"])
        self._observation, self._broken_off = None, None
        if self._restartable is not None:
            self._restartable.failures = int(numbers.get("failures", 0))
            self._restartable.good_steps = int(numbers.get("good_steps", 0))
        if self._returns is not None:
            self._returns.resume(arrays.get(_HELD, self._schema.empty(0)))
        self._noise.load_state_dict(
            {name.removeprefix(_NOISE): arrays[name] for name in arrays if name.startswith(_NOISE)}
        )
        if numbers["within_episode"]:
            before = self._episodes - 1
            self._seed = int(numbers["seed"]) if "seed" in numbers else self._episode_seed(before)
            kept = (arrays["actions"], arrays["observation"]) if "actions" in arrays else None
            self._broken_off = kept, str(numbers["return"])

    def replay(self) -> bool:
        """Has the environment play its episode again, up to where `resume` found it; whether it came there.

        Where it does not come to the same observation and return to the last bit, or where the episode was
        too long to keep, a new one begins, which is said in the log; what is held back goes out with its
        first step.

        Raises:
            EnvironmentFailedError: the environment raised, and cannot be made anew.
            Exception: whatever an environment raises that cannot be made anew.
        """
        episode, self._broken_off = self._broken_off, None
        if episode is None:
            return True
        kept, return_ = episode
        if kept is None:
            reason = f"its episode had more than {REPLAYED_STEPS:,} steps"
        else:
            try:
                if self._replays(*kept, return_):
                    return True
                reason = "it does not repeat its episode from the same seed and actions"
            except EnvironmentBroke as broke:
                self._restart(broke)
                reason = f"it raised {summary(broke.error)} when it played its episode again"
        self._observation = None
        _log.warning(
            "agent %d at step %s: the environment is not where it was, because %s; a new episode begins, so "
            "what follows is not what it would have been without the break",
            self._agent_id,
            f"{self._steps:,}",
            reason,
        )
        return False

    def _replays(self, actions: Array, observation: Array, return_: str) -> bool:
        """Plays the current episode again; whether it comes to this observation and return."""
        reached = self._reset_to(self._seed)
        for action in actions:
            reached, _, terminated, truncated = self._act(action)
            if terminated or truncated:
                return False
        self._observation, self._finite = reached, bool(np.isfinite(reached).all())
        return reached.tobytes() == observation.tobytes() and repr(self._return) == return_

    def _restart(self, broke: EnvironmentBroke) -> None:
        """Has the environment made anew, if it can be; the next step begins the next episode."""
        self._observation = None
        if self._restartable is None:
            raise broke
        self._restartable.restart(broke, where=f"agent {self._agent_id} at step {self._steps:,}")
        self._to_env = ActionMap(self._env.action_space)

    def _reset(self) -> Array:
        self._seed = self._episode_seed(self._episodes)
        self._episodes += 1  # before the reset: if that raises, the next attempt has another seed
        return self._reset_to(self._seed)

    def _reset_to(self, seed: int) -> Array:
        size = self._schema.observation_size
        observation = reset(self._env, seed=seed, size=size, look=self._look_for_coarse)
        self._observation, self._finite = observation, bool(np.isfinite(observation).all())
        self._actions, self._return, self._length = [], 0.0, 0
        return observation

    def _act(self, action: Array) -> tuple[Array, float, bool, bool]:
        """One environment step: next observation, reward, terminated, truncated."""
        size, given = self._schema.observation_size, self._to_env(action)
        taken = step(self._env, given, size=size, look=self._look_for_coarse)
        self._return += taken[1]
        self._length += 1
        if self._length <= REPLAYED_STEPS:
            self._actions.append(action)
        return taken

    def _look_for_coarse(self, received: Any) -> None:
        """Says once for what of an observation float32 is too coarse; looks where episodes begin and end."""
        if self._said_coarse or (found := coarsened(received)) is None:
            return
        self._said_coarse = True
        _log.warning(
            "agent %d: observations are float32 here, and %s, so that small changes of it are lost; have the "
            "environment return it scaled, or its difference from a start value",
            self._agent_id,
            found,
        )

    def _choose(self, policy: Policy | None, version: int, observation: Array) -> Array:
        size = self._schema.action_size
        if policy is None or self._steps < self._start_steps or not self._finite:
            return self._rng.uniform(-1.0, 1.0, size).astype(np.float32)
        action = policy.act(observation[np.newaxis])[0]
        require_finite_action(action, of=f"agent {self._agent_id} at step {self._steps:,}")
        noisy = self._noise(action, version=version, length=self._length, rng=self._rng)
        if self._looks_at_noise:
            noisy = require_action(noisy, size)
        clipped: Array = np.minimum(np.maximum(noisy, np.float32(-1)), np.float32(1))
        return clipped

    def _pack(
        self, observation: Array, action: Array, next_observation: Array, reward: float, *, bootstrap: bool
    ) -> Array:
        m, n = self._schema.observation_size, self._schema.action_size
        row = np.empty(self._schema.width, np.float32)
        row[:m] = observation
        row[m : m + n] = action
        row[m + n : 2 * m + n] = next_observation
        with np.errstate(all="ignore"):
            row[2 * m + n] = reward
        row[2 * m + n + 1] = bootstrap
        return row

    def _refuse(self, reason: Reason) -> None:
        self._refused_in_a_row += 1
        if self._refused_in_a_row < REFUSED_IN_A_ROW:
            return
        self._observation, self._refused_in_a_row = None, 0
        if not self._warned:
            _log.warning(
                "agent %d: %d transitions in a row were not finite (the last because of the %s); "
                "the environment is reset, now and whenever it happens again",
                self._agent_id,
                REFUSED_IN_A_ROW,
                reason,
            )
        self._warned = True
