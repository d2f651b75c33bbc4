"""Errors and values of other people's code, in one line."""

import traceback
from pathlib import PurePath
from typing import Final

RAISED: Final = (Exception, SystemExit, GeneratorExit)
"""What an environment may raise by mistake; KeyboardInterrupt is the user's."""


def kind(value: object) -> str:
    """What a value is, in words."""
    return "nothing" if value is None else f"an object of type {type(value).__name__}"


def summary(error: BaseException) -> str:
    """An error of someone else's in one line; where it says too little itself, with its file and line."""
    if isinstance(error, SystemExit):
        called = "sys.exit()" if error.code is None else f"sys.exit({text(error.code)})"
        return f"{type(error).__name__}, that is, {called}{_place(error)}"
    said = text(error)
    return f"{type(error).__name__}: {said}" if said else f"{type(error).__name__}{_place(error)}"


def text(value: object) -> str:
    """A value in one line of at most 300 characters."""
    try:
        line = " ".join(str(value).split())
    except Exception:  # noqa: BLE001 - someone else's __str__
        line = f"<{type(value).__name__} that cannot be shown>"
    return line if len(line) <= 300 else line[:297] + "..."


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({PurePath(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
