"""Which names may become the name of a folder of results."""

from pathlib import Path
from typing import Final

MAX_BYTES: Final = 200
"""Of a name in UTF-8; file systems allow 255, and what is being written has a longer name at first."""


def names_a_folder(name: str) -> bool:
    """Whether `name` is one plain path component, so that it cannot lead out of the folder it is put in.

    It has at most MAX_BYTES, is not blank, and nothing in it cannot be printed: no control characters, no
    line ends.
    """
    if not name.isprintable() or len(name.encode(errors="replace")) > MAX_BYTES:
        return False
    return bool(name.strip()) and name not in (".", "..") and Path(name).name == name
