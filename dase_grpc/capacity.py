"""Reads how large a buffer shall be: a number of transitions, or a size in bytes."""

import re
import reprlib
from fractions import Fraction
from typing import Final

_PREFIXES: Final = "kmgt"
_COUNT: Final = re.compile(r"-?[0-9]{1,30}")
_SIZE: Final = re.compile(rf"([0-9]{{1,30}}(?:\.[0-9]{{1,30}})?)\s*(?:([{_PREFIXES}])(i?))?b", re.IGNORECASE)


def transitions(capacity: int | str, *, row_bytes: int) -> int:
    """How many transitions of `row_bytes` bytes a capacity is; a text is a size such as "512MiB".

    Raises:
        ValueError: unreadable, or not room for one transition.
    """
    text = str(capacity).strip()
    if _COUNT.fullmatch(text):
        count = int(text)
    else:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError(
                f'{reprlib.repr(text)} is neither a number of transitions nor a size such as "512MiB"'
            )
        power = _PREFIXES.index(match[2].lower()) + 1 if match[2] else 0
        count = int(Fraction(match[1]) * (1024 if match[3] else 1000) ** power) // row_bytes
    if count < 1:
        size = f" of {row_bytes} bytes" if row_bytes > 1 else ""
        raise ValueError(f"a capacity of {text} has no room for one transition{size}")
    return count
