"""Which names may become the name of a folder of results."""

from pathlib import Path


def names_a_folder(name: str) -> bool:
    """Whether `name` is one plain path component, so that it cannot lead out of the folder it is put in."""
    return bool(name) and name not in (".", "..") and Path(name).name == name
