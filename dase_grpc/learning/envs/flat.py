"""Observations of Dict, Tuple and multi-dimensional Box spaces as flat arrays, checked on the way.

The order and the values are those of `gymnasium.spaces.flatten`, which takes a value outside its space for
another one, or fails with an error that names no component.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from dase_grpc.errors import EnvironmentSpecError
from dase_grpc.learning.envs.answers import SHOWN, kind, summary, text, to_numbers

Flat = list[npt.NDArray[Any]]
_Flatten = Callable[[Any, Flat], None]


class FlatObservation(gymnasium.ObservationWrapper[Any, Any, Any]):
    """An environment whose observations are flat arrays, by the space that it had when it was made.

    `reset` and `step` raise an EnvironmentSpecError for an observation that is not of that space.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._flatten = _flattening(env.observation_space)
        self.observation_space = spaces.flatten_space(env.observation_space)

    def observation(self, observation: Any) -> npt.NDArray[Any]:
        """The observation's components one after the other.

        Raises:
            EnvironmentSpecError: it is not of the space.
        """
        flat: Flat = []
        try:
            self._flatten(observation, flat)
        except _MisfitError as misfit:
            described = f"whose {misfit.path} {misfit.what}" if misfit.path else f"that {misfit.what}"
            raise EnvironmentSpecError(
                f"the environment returned an observation {described}, so it is not of its space; "
                f"correct the environment's reset and step"
            ) from misfit.__cause__
        return np.concatenate(flat)


def raw_space(env: Any) -> tuple[Any, FlatObservation | None]:
    """The observation space as the user's environment has it, and what flattens its observations."""
    layer = env
    while layer is not None:
        if isinstance(layer, FlatObservation):
            return layer.env.observation_space, layer
        layer = getattr(layer, "env", None)
    return env.observation_space, None


def observation_shape(env: Any) -> tuple[int, ...]:
    """The shape of an observation as the user's environment gives it; flat where that is no array."""
    raw, _ = raw_space(env)
    shape: tuple[int, ...] = env.observation_space.shape if (own := box_shape(raw)) is None else own
    return shape


def box_shape(space: object) -> tuple[int, ...] | None:
    """The shape of the space's arrays; None of a space that is no Box."""
    return space.shape if isinstance(space, spaces.Box) else None


def unflattenable(space: object) -> str | None:
    """Which part of a space no flat array of numbers can hold, in words; None if all can be flattened."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for name, part in inner:
            if (found := unflattenable(part)) is not None:
                return f"[{name!r}]{found}" if found.startswith("[") else f"[{name!r}] {found}"
        return None
    if not isinstance(space, gymnasium.Space):
        return f"is {kind(space)} and not a Space of Gymnasium's"
    try:
        spaces.flatdim(space)
    except Exception:  # noqa: BLE001 - someone else's space
        return f"is a {type(space).__name__}, which has no fixed number of components"
    return None


class _MisfitError(Exception):
    """A component of an observation, at `path`, is not of its space; `what` it is, in words."""

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.path = path


def _flattening(space: gymnasium.Space[Any]) -> _Flatten:
    """What appends the flat components of a value of the space to a list, or raises a _MisfitError."""
    flatten: _Flatten = partial(_flatten_other, space)
    match space:
        case spaces.Dict():
            flatten = partial(_flatten_dict, {name: _flattening(part) for name, part in space.spaces.items()})
        case spaces.Tuple():
            flatten = partial(_flatten_tuple, [_flattening(part) for part in space.spaces])
        case spaces.Box():
            flatten = partial(_flatten_box, space.shape)
        case spaces.Discrete():
            flatten = partial(_flatten_discrete, int(space.start), int(space.n))
        case spaces.MultiDiscrete():
            offsets = np.concatenate(([0], np.cumsum(space.nvec.ravel())))
            flatten = partial(_flatten_multi_discrete, space, offsets)
        case spaces.MultiBinary():
            flatten = partial(_flatten_multi_binary, space.shape)
    return flatten


def _flatten_dict(parts: Mapping[str, _Flatten], value: Any, flat: Flat) -> None:
    if type(value) is not dict and not isinstance(value, Mapping):
        raise _MisfitError(f"is {kind(value)} instead of a dict")
    if value.keys() != parts.keys():
        missing = [name for name in parts if name not in value]
        extra = [name for name in value if name not in parts]
        raise _MisfitError(f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r} besides")
    _flatten_each(parts.items(), value, flat)


def _flatten_tuple(parts: list[_Flatten], value: Any, flat: Flat) -> None:
    if not isinstance(value, (tuple, list, np.ndarray)):
        raise _MisfitError(f"is {kind(value)} instead of a tuple")
    if len(value) != len(parts):
        raise _MisfitError(f"has {len(value)} components instead of {len(parts)}")
    _flatten_each(enumerate(parts), value, flat)


def _flatten_each(parts: Iterable[tuple[Any, _Flatten]], value: Any, flat: Flat) -> None:
    for name, flatten in parts:
        try:
            flatten(value[name], flat)
        except _MisfitError as misfit:
            raise _MisfitError(misfit.what, f"[{name!r}]{misfit.path}") from misfit.__cause__


def _flatten_box(shape: tuple[int, ...], value: Any, flat: Flat) -> None:
    array = _array(value)
    if array.shape != shape and not (array.size == 1 == np.prod(shape)):
        raise _MisfitError(f"has the shape {array.shape} instead of {shape}")
    flat.append(array.ravel())


def _flatten_discrete(start: int, count: int, value: Any, flat: Flat) -> None:
    if type(value) is not int:
        array = _array(value)
        if array.size != 1 or array.dtype.kind == "f":
            raise _MisfitError(f"is {text(value)[:SHOWN]} instead of one whole number")
        value = int(array.item())
    if not 0 <= value - start < count:
        raise _MisfitError(f"is {value}, outside {start} to {start + count - 1}")
    chosen = np.zeros(count, np.int64)
    chosen[value - start] = 1
    flat.append(chosen)


def _flatten_multi_discrete(
    space: spaces.MultiDiscrete, offsets: npt.NDArray[Any], value: Any, flat: Flat
) -> None:
    array = _array(value)
    if array.shape != space.shape or array.dtype.kind == "f":
        raise _MisfitError(f"is {text(value)[:SHOWN]} instead of whole numbers of the shape {space.shape}")
    places = array.astype(np.int64) - space.start
    if ((places < 0) | (places >= space.nvec)).any():
        raise _MisfitError(f"is {text(value)[:SHOWN]}, outside {text(space)[:SHOWN]}")
    chosen = np.zeros(offsets[-1], np.int64)
    chosen[offsets[:-1] + places.ravel()] = 1
    flat.append(chosen)


def _flatten_multi_binary(shape: tuple[int, ...], value: Any, flat: Flat) -> None:
    array = _array(value)
    if array.shape != shape or not ((array == 0) | (array == 1)).all():
        raise _MisfitError(f"is {text(value)[:SHOWN]} instead of zeros and ones of the shape {shape}")
    flat.append(array.astype(np.int8).ravel())


def _flatten_other(space: gymnasium.Space[Any], value: Any, flat: Flat) -> None:
    try:
        if space.contains(value):
            flat.append(np.array(spaces.flatten(space, value)))
            return
    except Exception as error:  # someone else's space
        raise _MisfitError(f"cannot be flattened ({summary(error)[:SHOWN]})") from error
    raise _MisfitError(f"is {text(value)[:SHOWN]}, which is not in {text(space)[:SHOWN]}")


def _array(value: Any) -> npt.NDArray[Any]:
    try:
        return to_numbers(value)
    except ValueError as error:
        raise _MisfitError(str(error)) from error.__cause__
