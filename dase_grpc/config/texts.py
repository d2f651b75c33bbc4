"""Reads TOML and JSON that anybody may have edited: whatever cannot be used is a ValueError."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

INTEGER_LIMIT: Final = 2**63
"""Whole numbers lie within it, above and below, as TOML asks for; NumPy's and the wire's do as well."""


BYTE_ORDER_MARK: Final = "\ufeff"
"""What editors on Windows write before the first character of a UTF-8 file; it is no part of the text."""


def toml_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, whatever its line ends, with or without a byte order mark.

    Raises:
        OSError: it cannot be read.
        ValueError: as `toml_tables`, or it is no UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start}), so save it as UTF-8") from None
    return toml_tables(text.removeprefix(BYTE_ORDER_MARK))


def toml_tables(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        ValueError: it is no TOML, is nested too deeply, or holds a whole number of more than 64 bits.
    """
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python reads no decimal number of thousands of digits
        raise ValueError("a whole number in it has more than 64 bits") from None
    numbers = (leaf for leaf in leaves(tables) if isinstance(leaf, int))
    if not all(-INTEGER_LIMIT <= number < INTEGER_LIMIT for number in numbers):
        raise ValueError("a whole number in it has more than 64 bits")
    return tables


def json_value(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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


def is_utf8(text: str) -> bool:
    """Whether a text can be written; one that came from bytes of another encoding cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
