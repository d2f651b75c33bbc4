"""Arguments of the Python interface: whole numbers, paths, texts and choices, or one sentence."""

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dase_grpc.config.texts import INTEGER_LIMIT, shown
from dase_grpc.errors import ConfigError


def whole(what: str, given: Any, *, least: int, most: int | None = None) -> int:
    """A whole number within the limits as Python's own, out of that, NumPy's or 1e5; else a ConfigError."""
    try:
        number = operator.index(int(given) if isinstance(given, float) and given.is_integer() else given)
    except TypeError:
        number = None
    if number is None or isinstance(given, bool) or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{what} = {shown(given)} has to be a whole number {limits}")
    if number >= INTEGER_LIMIT:
        raise ConfigError(f"{what} = {shown(given)} is too large; whole numbers have at most 64 bits")
    return number


def path(what: str, given: Any) -> Path:
    """A path; a ConfigError where there can be none."""
    if not isinstance(given, (str, os.PathLike)) or "\0" in str(given):
        raise ConfigError(f"{what} = {given!r} is no path")
    return Path(given)


def optional_text(what: str, given: Any) -> str | None:
    """A text or None; else a ConfigError."""
    if given is None or isinstance(given, str):
        return given
    raise ConfigError(f"{what} = {shown(given)} is no text")


def require_one_of(what: str, given: Any, choices: Sequence[str]) -> None:
    """Refuses with a ConfigError what is none of the choices."""
    if not isinstance(given, str) or given not in choices:
        raise ConfigError(f"{what} = {shown(given)} is none of {', '.join(choices)}")
