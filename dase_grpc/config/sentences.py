"""Sentences that say what is wrong with a configuration, out of pydantic's errors."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

_BRANCHES: Final = ("constrained-int", "int", "str")
"""What pydantic adds to a location for the alternatives of a union."""

_ALIKE: Final = 0.6
"""How alike (difflib's ratio) two names must be for one to be suggested for the other."""

_PHRASES: Final[Mapping[str, str]] = {
    "boolean": "must not be true or false",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "is too large",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be finite",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "too_large": "is too large; whole numbers have at most 64 bits",
    "too_short": "must not be empty",
    "tuple_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table of settings",
}
"""Pydantic's kinds of error in words that follow `key = value`."""


def sentence(error: ValidationError, *, known: Sequence[str]) -> str:
    """The first problem of a pydantic error in one sentence; `known` are all settings as `section.key`."""
    first = error.errors(include_url=False)[0]
    kind, value = first["type"], first["input"]
    key = ".".join(str(part) for part in first["loc"] if part not in _BRANCHES)
    if kind == "extra_forbidden":
        return unknown_setting(key, value, known)
    if kind == "value_error":  # our own words, which name the value
        message = str(first["msg"]).removeprefix("Value error, ")
        named = any(
            name.startswith(f"{key}.") and message.startswith(f"{name[len(key) + 1 :]} ") for name in known
        )
        return f"{key}{'.' if named else ': '}{message}" if key else message
    phrase = _PHRASES.get(kind)
    words = phrase.format(**first.get("ctx", {})) if phrase else f"is refused: {first['msg']}"
    return f"{key} = {_shown(value)} {words}"


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:  # Python writes no decimal number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def unknown_setting(key: str, value: Any, known: Sequence[str]) -> str:
    """Says that `known` has no such key, and which one may be meant."""
    if "." not in key and isinstance(value, Mapping) and value:
        key = f"{key}.{next(iter(value))}"
    guess = nearest_setting(key, known)
    hint = f"did you mean {guess}?" if guess else "`dase config` lists all settings"
    return f"unknown setting {key}; {hint}"


def nearest_setting(key: str, known: Sequence[str]) -> str | None:
    """The one of `known`, all `section.key`, that `key`, with or without a section, may stand for."""
    section, _, name = key.rpartition(".")

    def likeness(candidate: str) -> tuple[float, float]:
        its_section, _, its_name = candidate.partition(".")
        return _likeness(name, its_name), _likeness(section, its_section)

    likely = max(known, key=likeness, default=None)
    return likely if likely is not None and likeness(likely)[0] >= _ALIKE else None


def _likeness(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()
