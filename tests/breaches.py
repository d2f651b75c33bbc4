"""Environments that break Gymnasium's interface, each in one way; as ids: `breaches:Breaks` and so on."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Sequence, Text, Tuple
from worlds import UNIT, Clock

NAN = float("nan")
HERE, NUMBERS = np.zeros(2), np.ones((2, 3))

STEPS: Mapping[str, tuple[Any, str]] = {
    "terminated is an array of two": (
        (HERE, 1.0, np.zeros(2, bool), False, {}),
        "terminated = ndarray of shape (2,), which is neither true nor false",
    ),
    "terminated is None": ((HERE, 1.0, None, False, {}), "terminated = None, which is neither"),
    "terminated is NaN": ((HERE, 1.0, NAN, False, {}), "terminated = nan, which is neither"),
    "terminated is a half": ((HERE, 1.0, 0.5, False, {}), "terminated = 0.5, which is neither"),
    "terminated is a text": ((HERE, 1.0, "no", False, {}), "terminated = 'no', which is neither"),
    "terminated and info are swapped": ((HERE, 1.0, {}, False, False), "terminated = {}, which is neither"),
    "truncated and info are swapped": ((HERE, 1.0, False, {}, False), "truncated = {}, which is neither"),
    "truncated is None": ((HERE, 1.0, False, None, {}), "truncated = None, which is neither"),
    "the reward is None": ((HERE, None, False, False, {}), "the reward None, which is not one number"),
    "the reward is an array of two": (
        (HERE, np.ones(2), False, False, {}),
        "the reward ndarray of shape (2,), which is not one number",
    ),
    "the reward is complex": ((HERE, 1j, False, False, {}), "the reward 1j, which is not one number"),
    "the reward is a text": ((HERE, "1", False, False, {}), "the reward '1', which is not one number"),
    "info is None": ((HERE, 1.0, False, False, None), "step returned nothing as info instead of a dict"),
    "info is a list": ((HERE, 1.0, False, False, []), "an object of type list as info instead of a dict"),
    "the step has four values": ((HERE, 1.0, False, {}), "step returned 4 values, but in Gymnasium's"),
    "the step has six values": ((HERE, 1.0, False, False, {}, 1), "step returned 6 values, but in"),
    "the step is nothing": (None, "step returned one NoneType, but in Gymnasium's interface step(self,"),
    "the observation has another shape": (
        (np.zeros(3), 1.0, False, False, {}),
        "observation of shape (3,), but its observation space says (2,)",
    ),
    "the observation is nothing": ((None, 1.0, False, False, {}), "no array of numbers (NoneType)"),
    "the observation is a text": (("left", 1.0, False, False, {}), "no array of numbers (str)"),
    "the observation is ragged": (([[1], [2, 3]], 1.0, False, False, {}), "no array of numbers (list: "),
    "the observation holds None": (([1, None], 1.0, False, False, {}), "no array of numbers (list)"),
    "the observation holds texts": ((["1", "2"], 1.0, False, False, {}), "no array of numbers (list)"),
    "the observation is complex": (
        (np.zeros(2, complex), 1.0, False, False, {}),
        "no array of numbers (ndarray of complex128)",
    ),
    "the observation is a date": (
        (np.zeros(2, "datetime64[s]"), 1.0, False, False, {}),
        "no array of numbers (ndarray of datetime64[s])",
    ),
}
"""What a step returns, and what is said of it."""

RESETS: Mapping[str, tuple[Any, str]] = {
    "the reset is an observation alone": (HERE, "reset returned one ndarray, but in Gymnasium's interface"),
    "the reset has three values": ((HERE, {}, 1), "reset returned 3 values, but in"),
    "the reset is a list": ([HERE, {}], "reset returned one list, but in"),
    "the reset's info is None": ((HERE, None), "reset returned nothing as info instead of a dict"),
    "the reset's observation has another shape": ((np.zeros(3), {}), "observation of shape (3,)"),
}

KEYED = Dict({"at": Box(-1, 1, (2, 3)), "one": Discrete(3, start=1), "more": Dict({"on": MultiBinary(2)})})
GOOD: Mapping[str, Any] = {"at": NUMBERS, "one": 1, "more": {"on": np.ones(2, bool)}}

OBSERVATIONS: Mapping[str, tuple[gymnasium.Space[Any], Any, str]] = {
    "a key is missing": (KEYED, {"at": NUMBERS, "one": 1}, "an observation that lacks 'more'"),
    "a key is too many": (KEYED, {**GOOD, "b": 1}, "an observation that has 'b' besides"),
    "an array in place of a Dict": (KEYED, HERE, "that is an object of type ndarray instead of a dict"),
    "nothing in place of a Dict": (KEYED, None, "that is nothing instead of a dict"),
    "an inner key is missing": (KEYED, {**GOOD, "more": {}}, "whose ['more'] lacks 'on'"),
    "above its Discrete": (KEYED, {**GOOD, "one": 4}, "whose ['one'] is 4, outside 1 to 3"),
    "below its Discrete": (KEYED, {**GOOD, "one": 0}, "whose ['one'] is 0, outside 1 to 3"),
    "a half for a Discrete": (KEYED, {**GOOD, "one": 1.5}, "whose ['one'] is 1.5 instead of one whole"),
    "a text for a Discrete": (KEYED, {**GOOD, "one": "a"}, "whose ['one'] is no array of numbers (str)"),
    "two for a Discrete": (KEYED, {**GOOD, "one": [1, 2]}, "whose ['one'] is [1, 2] instead of one whole"),
    "a component of another shape": (
        KEYED,
        {**GOOD, "at": NUMBERS.T},
        "whose ['at'] has the shape (3, 2) instead of (2, 3)",
    ),
    "a ragged component": (KEYED, {**GOOD, "at": [[1], [1, 2]]}, "whose ['at'] is no array of numbers (list"),
    "no zeros and ones": (
        KEYED,
        {**GOOD, "more": {"on": np.array([0, 2])}},
        "whose ['more']['on'] is [0 2] instead of zeros and ones of the shape (2,)",
    ),
    "outside its MultiDiscrete": (
        Tuple((MultiDiscrete([2, 3]),)),
        (np.array([2, 0]),),
        "whose [0] is [2 0], outside MultiDiscrete([2 3])",
    ),
    "below its MultiDiscrete": (
        Tuple((MultiDiscrete([2, 3]),)),
        (np.array([0, -1]),),
        "whose [0] is [ 0 -1], outside MultiDiscrete([2 3])",
    ),
    "a text with other letters": (Dict({"say": Text(3)}), {"say": "!!"}, "whose ['say'] is !!, which is not"),
    "a Tuple that is too short": (Tuple((Discrete(2), Discrete(2))), (0,), "has 1 components instead of 2"),
    "a number in place of a Tuple": (Tuple((Discrete(2),)), 0, "is an object of type int instead of a tuple"),
    "a picture of another shape": (
        Box(0, 255, (2, 3, 3), np.uint8),
        np.zeros((3, 2, 3), np.uint8),
        "an observation that has the shape (3, 2, 3) instead of (2, 3, 3)",
    ),
}
"""A space, what is observed in place of a value of it, and what is said of that."""


class Mission(gymnasium.Space[str]):
    """A space of a package's own, as MiniGrid has one for its missions."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


UNFLATTENABLE: Mapping[str, tuple[gymnasium.Space[Any], str]] = {
    "a space of a package's own": (Dict({"say": Mission()}), "['say'] is a Mission, which has no fixed"),
    "a sequence": (Dict({"past": Sequence(Discrete(2))}), "['past'] is a Sequence, which has no fixed"),
    "a graph": (Tuple((Discrete(2), Graph(Discrete(2), None))), "[1] is a Graph, which has no fixed number"),
    "one that lies deeper": (
        Dict({"a": Tuple((Dict({"b": Mission()}),))}),
        "['a'][0]['b'] is a Mission, which has no fixed number of components",
    ),
}


class Breaks(Clock):
    """A Clock whose steps, from step `at` of its life on, or whose resets are as `STEPS` or `RESETS` say."""

    length = None

    def __init__(self, how: str, at: int = 1) -> None:
        super().__init__()
        self._how, self._at, self._taken = how, at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        good = super().reset(seed=seed)
        return RESETS[self._how][0] if self._how in RESETS else good

    def step(self, action: Any) -> Any:
        self._taken += 1
        good = super().step(action)
        return STEPS[self._how][0] if self._how in STEPS and self._taken >= self._at else good


class Observes(Clock):
    """A Clock with an observation space of `OBSERVATIONS` or `UNFLATTENABLE`, and what is observed there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.observation_space, *self._observed = {**OBSERVATIONS, **UNFLATTENABLE}[how]

    def observe(self) -> Any:
        return self._observed[0]


def _leaves() -> None:
    sys.exit(3)


def _asserts() -> None:
    assert not HERE.shape


def _stops() -> None:
    raise StopIteration


def _closes() -> None:
    raise GeneratorExit


def _breaks() -> None:
    raise RuntimeError("it broke")


RAISES: Mapping[str, tuple[Callable[[], None], str]] = {
    "leaves": (_leaves, "SystemExit, that is, sys.exit(3) (breaches.py, line "),
    "asserts": (_asserts, "AssertionError (breaches.py, line "),
    "stops": (_stops, "StopIteration (breaches.py, line "),
    "closes": (_closes, "GeneratorExit (breaches.py, line "),
    "breaks": (_breaks, "RuntimeError: it broke"),
}
"""What an environment does in place of a call, and what is said of it."""


class Raises(Clock):
    """A Clock that does as `RAISES` says when it is made, or in one of its calls."""

    def __init__(self, how: str, where: str) -> None:
        super().__init__()
        self._raise, self._where = RAISES[how][0], where
        self._if_in("making")

    def _if_in(self, call: str) -> None:
        if self._where == call:
            self._raise()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._if_in("reset")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self._if_in("step")
        return super().step(action)

    def close(self) -> None:
        self._if_in("close")


class HiddenSpace(Clock):
    """Cannot say what it observes."""

    observation_space = property(lambda self: self._nothing[0], lambda self, value: None)  # type: ignore[assignment]
    _nothing: tuple[()] = ()


class ChangesItsSpaces(Clock):
    """Has other bounds for its actions after each reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.action_space = Box(-2.0, 2.0, UNIT.shape)
        return super().reset(seed=seed)


class NoOptions(Clock):
    """Its reset takes a seed and no options."""

    def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


class NotFinite(Clock):
    """Observes NaN and is rewarded with it."""

    def step(self, action: Any) -> Any:
        return np.full(2, np.nan), NAN, False, False, {}
