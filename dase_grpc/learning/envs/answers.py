"""Answers of an environment: what reset and step return, taken apart, and raise, in a line; its actions.

Each breach of Gymnasium's interface is one sentence. What can be meant in one way only is accepted:
an array of one number for a number, 0 or 1 for a flag, a tensor that still has a gradient for its numbers.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import PurePath
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.spaces import Box

from dase_grpc.errors import EnvironmentSpecError
from dase_grpc.schema import Array

Call = Literal["reset", "step"]

_INTERFACE: Final[dict[Call, tuple[int, str]]] = {
    "reset": (2, "reset(self, *, seed=None, options=None) returns (observation, info)"),
    "step": (5, "step(self, action) returns (observation, reward, terminated, truncated, info)"),
}
_NO_SEED: Final = re.compile(r"\breset\(\) got an unexpected keyword argument '(seed|options)'")
SHOWN: Final = 80
"""Characters of a value that are shown."""

WHOLE_LIMIT: Final = 2**24
"""Up to here float32 holds every whole number."""

_NUMBERS: Final = "fiub"
"""The kinds of NumPy's dtypes that are real numbers."""

RAISED: Final = (Exception, SystemExit, GeneratorExit)
"""What an environment may raise by mistake; KeyboardInterrupt is the user's."""


def begun(returned: Any, size: int) -> Array:
    """The observation of what a reset returned, (size,) float32; raises as `taken`."""
    given, info = parts(returned, "reset")
    observation = to_float32(given, size)
    if type(info) is not dict:
        _require_info(info, "reset")
    return observation


def taken(returned: Any, size: int) -> tuple[Array, float, bool, bool]:
    """What a step returned: the observation, (size,) float32, the reward, terminated, truncated.

    Raises:
        EnvironmentSpecError: it is not what Gymnasium's interface says.
    """
    observation, reward, terminated, truncated, info = parts(returned, "step")
    step = (
        to_float32(observation, size),
        to_reward(reward),
        to_flag(terminated, "terminated"),
        to_flag(truncated, "truncated"),
    )
    if type(info) is not dict:
        _require_info(info, "step")
    return step


def faults(returned: Any, size: int, call: Call) -> Iterator[EnvironmentSpecError]:
    """All that is wrong with what a call returned; where `begun` and `taken` raise the first of them."""
    try:
        given = parts(returned, call)
    except EnvironmentSpecError as error:
        yield error
        return
    checks: list[Callable[[], object]] = [partial(to_float32, given[0], size)]
    if call == "step":
        checks.append(partial(to_reward, given[1]))
        checks += [partial(to_flag, given[2], "terminated"), partial(to_flag, given[3], "truncated")]
    checks.append(partial(_require_info, given[-1], call))
    for check in checks:
        try:
            check()
        except EnvironmentSpecError as error:
            yield error


def misuse(call: Call, error: BaseException) -> EnvironmentSpecError | None:
    """The breach that Python or a wrapper of Gymnasium has complained of; None for any other error."""
    said, (_, interface) = text(error), _INTERFACE[call]
    if isinstance(error, TypeError) and (unknown := _NO_SEED.search(said)):
        return EnvironmentSpecError(
            f"the environment's reset does not take {unknown[1]}, but in Gymnasium's interface {interface}"
        )
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    within = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    if isinstance(error, (TypeError, ValueError)) and "unpack" in said and within.startswith("gymnasium."):
        return EnvironmentSpecError(
            f"the environment's {call} returned another number of values than in Gymnasium's interface, "
            f"where {interface}"
        )
    return None


def parts(returned: Any, call: Call) -> tuple[Any, ...]:
    """The values that a call returned; an EnvironmentSpecError where they are too many or too few."""
    length, interface = _INTERFACE[call]
    if not isinstance(returned, tuple) or len(returned) != length:
        what = f"{len(returned)} values" if isinstance(returned, tuple) else f"one {type(returned).__name__}"
        raise EnvironmentSpecError(
            f"the environment's {call} returned {what}, but in Gymnasium's interface {interface}"
        )
    return returned


def to_float32(observation: Any, size: int) -> Array:
    """A float32 copy of what an environment returned as a flat observation; too large a value becomes ±inf.

    Raises:
        EnvironmentSpecError: it is no array of numbers, or its shape is not (size,).
    """
    if type(observation) is not np.ndarray or observation.dtype.kind not in _NUMBERS:
        try:
            observation = to_numbers(observation)
        except ValueError as error:
            raise EnvironmentSpecError(
                f"the environment returned an observation that {error}; correct the environment's reset and "
                f"step"
            ) from error.__cause__
    with np.errstate(all="ignore"):
        copied: Array = np.array(observation, np.float32)
    if copied.shape != (size,):
        raise EnvironmentSpecError(
            f"the environment returned an observation of shape {copied.shape}, but its observation space "
            f"says {(size,)}; correct the environment's reset and step"
        )
    return copied


def coarsened(observation: Any) -> str | None:
    """The first number beyond ±2^24 that float32 changes, in words; None where there is none.

    Neighbours are 2 apart and more there, so that a clock in Unix seconds stands still for two minutes.
    """
    given = to_numbers(observation)
    if np.can_cast(given.dtype, np.float32):
        return None
    with np.errstate(all="ignore"):
        stored = given.astype(np.float32)
        changed = (
            np.isfinite(stored) & (np.abs(stored) >= WHOLE_LIMIT) & (stored.astype(given.dtype) != given)
        )
    if not changed.any():
        return None
    index = int(changed.argmax())
    return f"observation {index} is {given[index]!s} and is stored as {stored[index]:.0f}"


def to_reward(given: Any) -> float:
    """What an environment returned as a reward, as a float; an array with one element counts as that.

    Raises:
        EnvironmentSpecError: it is no single number.
    """
    if type(given) is float:
        return given
    value = given if isinstance(given, (float, int)) else _single(given)
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise EnvironmentSpecError(
        f"the environment returned the reward {_shown(given)}, which is not one number; correct the "
        f"environment's step"
    )


def to_flag(given: Any, name: str) -> bool:
    """What an environment returned as `terminated` or `truncated`; 0, 1 and an array of one count too.

    Raises:
        EnvironmentSpecError: it is neither true nor false: NaN, None, several values, a text.
    """
    if given is True or given is False:
        return bool(given)
    value = _single(given)
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise EnvironmentSpecError(
        f"the environment returned {name} = {_shown(given)}, which is neither true nor false; in Gymnasium's "
        f"interface {_INTERFACE['step'][1]}"
    )


def to_numbers(given: Any) -> npt.NDArray[Any]:
    """Anything that is an array of real numbers, as such; of a tensor its values, without a gradient.

    Raises:
        ValueError: it is none; says what it is, as in "... is no array of numbers (str)".
    """
    if type(given) is np.ndarray and given.dtype.kind in _NUMBERS:
        return given
    why = type(given).__name__
    try:
        array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
        if array.dtype.kind == "O" and array.ndim:
            array = np.asarray(array.tolist())
        if array.dtype.kind in _NUMBERS:
            return array
        if array.dtype.kind not in "OUS":
            why = f"{why} of {array.dtype}"
    except Exception as error:  # someone else's object
        raise ValueError(f"is no array of numbers ({why}: {summary(error)[:SHOWN]})") from error
    raise ValueError(f"is no array of numbers ({why})")


def _require_info(info: Any, call: Call) -> None:
    if not isinstance(info, dict):
        raise EnvironmentSpecError(
            f"the environment's {call} returned {kind(info)} as info instead of a dict; in Gymnasium's "
            f"interface {_INTERFACE[call][1]}"
        )


def _single(given: Any) -> Any:
    """The one element of what holds one, else None."""
    try:
        return (given if hasattr(given, "item") else np.asarray(given)).item()
    except Exception:  # noqa: BLE001 - someone else's object
        return None


def _shown(given: Any) -> str:
    if shape := getattr(given, "shape", ()):
        return f"{type(given).__name__} of shape {tuple(shape)}"
    return text(repr(given) if isinstance(given, str) else given)[:SHOWN]


class ActionMap:
    """Maps normalised actions in [-1, 1] linearly onto a bounded Box; ±1 are exactly its bounds."""

    def __init__(self, space: Space[Any]) -> None:
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
        """(..., n) normalised -> (..., *shape) of the Box's shape and dtype, always a new array.

        Out-of-range actions are clipped to the box; whole-number spaces get the nearest number.
        """
        if self._identity:
            values: npt.NDArray[Any] = action
        else:
            # this form of low + (a + 1) / 2 * (high - low) has no rounding error at both ends
            values = (1.0 - action) * self._half_low + (1.0 + action) * self._half_high
        values = np.minimum(np.maximum(values, self._low), self._high)
        shape = (*action.shape[:-1], *self._shape)
        if self._whole:
            return self._rounded(values).reshape(shape)
        return values.astype(self._dtype).reshape(shape)

    def _rounded(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The nearest whole numbers; the bounds as they are, for float64 may not hold them (2^63 - 1)."""
        low, high = self._ends
        with np.errstate(all="ignore"):  # such a bound is no number of the dtype before it is replaced
            whole = np.rint(values).astype(self._dtype)
        return np.where(values >= self._high, high, np.where(values <= self._low, low, whole))


def kind(value: object) -> str:
    """What a value is, in words."""
    return "nothing" if value is None else f"an object of type {type(value).__name__}"


def summary(error: BaseException) -> str:
    """An error of someone else's in one line; where it says too little itself, with its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({PurePath(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SystemExit):
        called = "sys.exit()" if error.code is None else f"sys.exit({text(error.code)})"
        return f"{type(error).__name__}, that is, {called}{place}"
    said = text(error)
    return f"{type(error).__name__}: {said}" if said else f"{type(error).__name__}{place}"


def text(value: object) -> str:
    """A value in one line of at most 300 characters."""
    try:
        line = " ".join(str(value).split())
    except Exception:  # noqa: BLE001 - someone else's __str__
        line = f"<{type(value).__name__} that cannot be shown>"
    return line if len(line) <= 300 else line[:297] + "..."
