"""Numbers, sizes, names, TOML and JSON as people write them; what cannot be used is a ValueError."""

import json
import math
import re
import reprlib
import tomllib
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

INTEGER_LIMIT: Final = 2**63
"""Whole numbers lie within it, above and below, as TOML asks for; NumPy's and the wire's do as well."""

BYTE_ORDER_MARK: Final = "\ufeff"
"""What editors on Windows write before the first character of a UTF-8 file; it is no part of the text."""

_PREFIXES: Final = "kmgt"
_COUNT: Final = re.compile(r"-?[0-9]{1,30}")
_SIZE: Final = re.compile(rf"([0-9]{{1,30}}(?:\.[0-9]{{1,30}})?)\s*(?:([{_PREFIXES}])(i?))?b", re.IGNORECASE)

_INFINITE: Final = "float"

MAX_DEPTH: Final = 100
"""Of tables and lists within each other, in JSON and TOML."""
_TOO_DEEP: Final = "it is nested too deeply"

MAX_BYTES: Final = 200
"""Of a name in UTF-8; file systems allow 255, and what is being written has a longer name at first."""
PLAIN_FOLDER: Final = f"use a plain folder name of at most {MAX_BYTES} bytes that begins with no dot"
"""What to do about a name that `names_a_folder` is false of."""

_AGENT_DIGITS: Final = 9


def toml_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, whatever its line ends, with or without a byte order mark.

    Raises:
        OSError, ValueError: it cannot be read, is no UTF-8, or no TOML (`toml_tables`).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start}), so save it as UTF-8") from None
    return toml_tables(text.removeprefix(BYTE_ORDER_MARK))


def toml_tables(text: str) -> dict[str, Any]:
    """The tables of a TOML text; a ValueError where it is none, too deep, or has numbers over 64 bits."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python reads no decimal number of thousands of digits
        raise ValueError("a whole number in it has more than 64 bits") from None
    _require_shallow(tables)
    numbers = (leaf for leaf in leaves(tables) if isinstance(leaf, int))
    if not all(-INTEGER_LIMIT <= number < INTEGER_LIMIT for number in numbers):
        raise ValueError("a whole number in it has more than 64 bits")
    return tables


def json_value(text: str) -> Any:
    """The value of a JSON text; what is none, or is nested too deeply, is a ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _require_shallow(value)
    return value


def _require_shallow(value: Any) -> None:
    """Refuses what is read and yet so deep that going through it comes to the end of Python's stack."""
    held = [value]
    for _ in range(MAX_DEPTH):
        tables = (each.values() if isinstance(each, dict) else each for each in held if _holds(each))
        held = [each for table in tables for each in table]
        if not held:
            return
    raise ValueError(_TOO_DEEP)


def _holds(value: Any) -> bool:
    return isinstance(value, (dict, list))


def finite_json(value: Any) -> Any:
    """The same without infinite numbers, for which JSON has no sign: they are tables, as {"float": "inf"}."""
    if isinstance(value, float) and math.isinf(value):
        return {_INFINITE: str(value)}
    if isinstance(value, Mapping):
        return {key: finite_json(each) for key, each in value.items()}
    return [finite_json(each) for each in value] if isinstance(value, (list, tuple)) else value


def with_infinite(value: Any) -> Any:
    """What `finite_json` was made of."""
    if isinstance(value, Mapping):
        if len(value) == 1 and value.get(_INFINITE) in ("inf", "-inf"):
            return float(value[_INFINITE])
        return {key: with_infinite(each) for key, each in value.items()}
    return [with_infinite(each) for each in value] if isinstance(value, list) else value


def leaves(value: Any) -> Iterable[Any]:
    """What lists and tables hold, keys included, however deeply they are nested."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from leaves(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def could_be_agent_id(text: str) -> bool:
    """Whether a text is a number of so few digits as an agent's id has; Python reads none of thousands."""
    return text.isdecimal() and len(text) <= _AGENT_DIGITS


def shown(value: object) -> str:
    """A value as a sentence names it: short, whatever it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no decimal number of thousands of digits
        return "a number of thousands of digits"


def transitions(capacity: int | str, *, row_bytes: int) -> int:
    """How many transitions of `row_bytes` bytes a capacity is; a text is a size such as "512MiB".

    What is unreadable, or has no room for one transition, is a ValueError.
    """
    text = str(capacity).strip()
    if _COUNT.fullmatch(text):
        count = int(text)
    else:
        try:
            count = size_bytes(text) // row_bytes
        except ValueError:
            raise ValueError(
                f'{reprlib.repr(text)} is neither a number of transitions nor a size such as "512MiB"'
            ) from None
    if count < 1:
        size = f" of {row_bytes} bytes" if row_bytes > 1 else ""
        raise ValueError(f"a capacity of {text} has no room for one transition{size}")
    return count


def size_bytes(text: str) -> int:
    """The bytes that a size such as "512MiB" or "1.5 GB" is; what is none is a ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'{reprlib.repr(text)} is not a size such as "512MiB"')
    power = _PREFIXES.index(match[2].lower()) + 1 if match[2] else 0
    return int(Fraction(match[1]) * (1024 if match[3] else 1000) ** power)


def names_a_folder(name: str) -> bool:
    """Whether `name` is one plain path component, so that it cannot lead out of the folder it is put in.

    It has at most MAX_BYTES, is not blank, and every character can be printed. Hidden folders are not looked
    into where runs are sought, so it begins with no dot.
    """
    if not name.isprintable() or len(name.encode(errors="replace")) > MAX_BYTES:
        return False
    return bool(name.strip()) and not name.startswith(".") and Path(name).name == name
