"""Reads how large a buffer shall be: a number of transitions, or a size in bytes."""

import re
from typing import Final

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b\s*", re.IGNORECASE)


def transitions(capacity: int | str, *, row_bytes: int) -> int:
    """How many transitions of `row_bytes` bytes a capacity is; a text is a size such as "512MiB".

    Raises:
        ValueError: unreadable, or not room for one transition.
    """
    text = str(capacity).strip()
    if text.lstrip("-").isdigit():
        count = int(text)
    else:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError(f'{text!r} is neither a number of transitions nor a size such as "512MiB"')
        count = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) // row_bytes
    if count < 1:
        raise ValueError(f"a capacity of {text} has no room for one transition of {row_bytes} bytes")
    return count
