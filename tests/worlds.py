"""Small, fast environments and policies for the tests of the whole project, each with one peculiarity.

As environment ids: `worlds:PointGoal` and so on.
"""

import threading
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

Array = npt.NDArray[np.float32]
Info = dict[str, Any]
Step = tuple[Any, float, bool, bool, Info]

UNIT = Box(-1.0, 1.0, (1,), np.float32)


class PointGoal(gymnasium.Env[Array, Array]):
    """A point on a line is to be moved to the goal; the observation is what is missing.

    20 steps of at most 0.25 each, reward -|distance|, truncated at the end. The mean return
    of the best policy, clip(4 * distance), is about -0.4, of no action -10, of uniformly random ones -12.
    """

    metadata: ClassVar[Info] = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, render_mode: str | None = None, length: int = 20, pause_s: float = 0.0) -> None:
        """A step takes `pause_s`: agents that are only waited beside leave the cores to others."""
        self.observation_space = Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = UNIT
        self.render_mode = render_mode
        self.length = length
        self._pause_s = pause_s
        self._distance, self._time = 0.0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed)
        self._distance, self._time = float(self.np_random.uniform(-1, 1)), 0
        return self._observe(), {}

    def step(self, action: Array) -> Step:
        if self._pause_s:
            time.sleep(self._pause_s)
        self._distance -= 0.25 * float(action[0])
        self._time += 1
        return self._observe(), -abs(self._distance), False, self._time >= self.length, {}

    def render(self) -> Any:
        if self.render_mode != "rgb_array":
            return None
        frame = np.zeros((16, 32, 3), np.uint8)
        frame[:, int(np.clip(16 + 8 * self._distance, 0, 31))] = 255
        return frame

    def _observe(self) -> Array:
        return np.array([self._distance], np.float32)


class Unrepeatable(PointGoal):
    """PointGoal that starts anywhere, whatever the seed: no two are alike."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self._offset = 1e-3 * self.made

    def _observe(self) -> Array:
        return super()._observe() + np.float32(self._offset)


class RewardedGoal(PointGoal):
    """PointGoal with 1 more for each step, so that what is good has positive values: at best 19.6."""

    def step(self, action: Array) -> Step:
        observation, reward, *rest = super().step(action)
        return observation, reward + 1.0, *rest


class Clock(gymnasium.Env[Any, Any]):
    """Base of the worlds below: observes [time, 0], rewards 1, truncates after `length`; records calls."""

    length: int | None = 10
    observes: gymnasium.Space[Any] = Box(-np.inf, np.inf, (2,), np.float64)
    acts: gymnasium.Space[Any] = UNIT

    def __init__(self) -> None:
        self.observation_space, self.action_space = self.observes, self.acts
        self.time = 0
        self.seeds: list[int | None] = []
        self.actions: list[Any] = []
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> Step:
        self.time += 1
        self.actions.append(action)
        terminated, truncated = self.over()
        return self.observe(), self.reward(action), terminated, truncated, {}

    def observe(self) -> Any:
        return np.array([self.time, 0.0])

    def reward(self, action: Any) -> float:
        return 1.0

    def over(self) -> tuple[bool, bool]:
        """(terminated, truncated) after this step."""
        return False, self.length is not None and self.time >= self.length

    def close(self) -> None:
        self.closed += 1


class EndpointAction(Clock):
    """Acts in [-1, 1] x [0, 1] x [0, 1], like gas and brakes; the best action is one end of the box.

    The reward is minus the distance to the lower end, or to the upper end with `upper=True`; 0 at best.
    """

    def __init__(self, upper: bool = False) -> None:
        super().__init__()
        self.action_space = Box(np.float32([-1, 0, 0]), np.float32([1, 1, 1]))
        self._best = self.action_space.high if upper else self.action_space.low

    def observe(self) -> Any:
        return np.zeros(2)

    def reward(self, action: Any) -> float:
        return -float(np.abs(action - self._best).sum())


class ConstantReward(Clock):
    """Reward 1, truncated after 10 steps, which the observation hides.

    With bootstrapping through truncation every Q value is 1 / (1 - γ); without, at most 10.
    """

    def observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 2)


class Terminating(Clock):
    """Reward 1, terminated (not truncated) after 10 steps."""

    def over(self) -> tuple[bool, bool]:
        return self.time >= 10, False


class BothFlags(Clock):
    """Terminated and truncated by the same step, the tenth."""

    def over(self) -> tuple[bool, bool]:
        return self.time >= 10, self.time >= 10


class Endless(Clock):
    """Never ends."""

    length = None


class StaggeredEnds(Clock):
    """Truncated after 5 to 14 steps, drawn at the reset from the seed."""

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        observation, info = super().reset(seed=seed)
        self.length = int(self.np_random.integers(5, 15))
        return observation, info


class NanAtStep50(Clock):
    """Observes NaN after the 50th step of an episode of 100."""

    length = 100

    def observe(self) -> Any:
        return np.array([np.nan if self.time == 50 else self.time, 0.0])


class AlwaysNan(Clock):
    """Observes NaN except right after a reset; never ends."""

    length = None

    def observe(self) -> Any:
        return np.array([self.time and np.nan, 0.0])


class NanReward(Clock):
    """Gives a NaN reward at the third step."""

    def reward(self, action: Any) -> float:
        return np.nan if self.time == 3 else 1.0


class HugeReward(Clock):
    """Gives 1e300, which float32 cannot hold, at every seventh step of an episode of 10."""

    def reward(self, action: Any) -> float:
        return 1e300 if self.time % 7 == 0 else 1.0


class HugeObservation(Clock):
    """Observes 1e300, which float32 cannot hold, at the third step."""

    def observe(self) -> Any:
        return np.array([1e300 if self.time == 3 else self.time, 0.0])


class BufferReuse(Clock):
    """Returns the same array at each step and overwrites it."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = np.zeros(2)

    def observe(self) -> Any:
        self._buffer[0] = self.time
        return self._buffer


class SpoilsActions(Clock):
    """Overwrites the action it is given."""

    def step(self, action: Any) -> Step:
        result = super().step(action.copy())
        action[:] = 99
        return result


class RaisesAtStep(Clock):
    """Raises RuntimeError at step `at`."""

    def __init__(self, at: int = 3) -> None:
        super().__init__()
        self._at = at

    def reward(self, action: Any) -> float:
        if self.time == self._at:
            raise RuntimeError(f"the simulator broke at step {self.time}")
        return 1.0


class Gated(PointGoal):
    """Does not return from its 30th step while the gate is closed, but for those that evaluate."""

    gate: ClassVar[threading.Event] = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self._taken = 0

    def step(self, action: Array) -> Step:
        self._taken += 1
        if self._taken == 30:
            self.gate.wait()
        return super().step(action)


class Brittle(PointGoal):
    """Raises at the 7th step of some episodes, by their seeds; in no evaluation, whose seeds are odd."""

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        result = super().reset(seed=seed)
        self._brittle = seed is not None and seed % 2 == 0 and float(self.np_random.random()) < 0.5
        return result

    def step(self, action: Array) -> Step:
        if self._brittle and self._time == 6:
            raise RuntimeError("the simulator broke")
        return super().step(action)


class WrongShape(Clock):
    """Announces 2 components and observes 1."""

    def observe(self) -> Any:
        return np.zeros(1)


class UnboundedAction(Clock):
    """Its second action component has no upper bound."""

    acts = Box(np.float32([-1, -1]), np.float32([1, np.inf]))


class HugeAction(Clock):
    """Its action is bounded by float32's largest number."""

    acts = Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (1,), np.float32)


class UnboundedIntegerAction(Clock):
    """Its action is any int64."""

    acts = Box(-np.inf, np.inf, (1,), np.int64)


class DiscreteAction(Clock):
    """Acts by choosing one of three."""

    acts = Discrete(3)


class IntegerAction(Clock):
    """Acts in whole numbers from -2 to 5."""

    acts = Box(-2, 5, (1,), np.int32)


class MatrixAction(Clock):
    """Acts in a 2 x 3 Box of float64 whose bounds are 0 and 0.1, 0.2, ..., 0.6."""

    acts = Box(np.zeros((2, 3)), np.arange(1, 7).reshape(2, 3) / 10, dtype=np.float64)


class DictObservation(Clock):
    """Observes a Dict of a scalar time, a 2 x 2 picture and one of three."""

    observes = Dict(
        {"time": Box(0, 100, (), np.float32), "picture": Box(0, 1, (2, 2), np.float32), "one": Discrete(3)}
    )

    def observe(self) -> Any:
        return {"time": np.float32(self.time), "picture": np.eye(2, dtype=np.float32), "one": np.int64(2)}


class TupleObservation(Clock):
    """Observes a Tuple of a float32 and a float64 Box."""

    observes = Tuple((Box(-1, 1, (1,), np.float32), Box(-1, 1, (2,), np.float64)))

    def observe(self) -> Any:
        return (np.float32([0.5]), np.array([0.25, -0.25]))


class PictureObservation(Clock):
    """Observes a 2 x 2 x 3 picture of bytes."""

    observes = Box(0, 255, (2, 2, 3), np.uint8)

    def observe(self) -> Any:
        return np.full((2, 2, 3), 7, np.uint8)


class DiscreteObservation(Clock):
    """Observes one of five."""

    observes = Discrete(5)


class DiscretesObservation(Clock):
    """Observes one of two and one of three."""

    observes = MultiDiscrete([2, 3])


class EmptyObservation(Clock):
    """Observes nothing."""

    observes = Dict({})


class WideObservation(Clock):
    """Observes more components than a row may hold."""

    observes = Box(-1, 1, (200_000,), np.float32)


class RefusesToStart(Clock):
    """Raises while it is made, with a message of several lines."""

    def __init__(self) -> None:
        raise ValueError("no licence\nfor this simulator")


class NoSpaces(gymnasium.Env[Any, Any]):
    """Forgot both spaces."""


class OldReset(Clock):
    """An environment from before seeds were given to reset."""

    def reset(self) -> Any:  # type: ignore[override]
        return self.observe(), {}


class OldReturns(Clock):
    """As in Gym before 0.26: reset gives the observation alone, and step four values with `old_step`."""

    def __init__(self, old_step: bool = False, nested: bool = False) -> None:
        super().__init__()
        self._old_step = old_step
        if nested:  # so that Gymnasium's wrapper takes what is returned apart
            self.observation_space = Box(-np.inf, np.inf, (1, 3), np.float64)

    def observe(self) -> Any:
        return np.zeros(self.observation_space.shape or ())

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> Any:
        observation, info = super().reset(seed=seed)
        return (observation, info) if self._old_step else observation

    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


def returns_nothing() -> None:
    """A factory without a return statement."""


def limited(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    """A factory: Endless under Gymnasium's TimeLimit of 7, or of `max_episode_steps`."""
    return gymnasium.wrappers.TimeLimit(Endless(), kwargs.get("max_episode_steps", 7))


an_instance = Endless()
not_callable = 7

for version in (0, 2, 10):
    gymnasium.register(f"VersionedWorld-v{version}", entry_point="worlds:PointGoal")
gymnasium.register("NeedyWorld-v1", entry_point="no_such_package:World")
gymnasium.register("NeedyWorld-v2", entry_point="worlds:PointGoal")
gymnasium.register("RegisteredWorld-v0", entry_point="worlds:PointGoal", max_episode_steps=5)
