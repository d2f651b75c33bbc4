"""Volumes of files on this machine, as a kubelet keeps them: seen at once, or not at all."""

import os
import shutil
from pathlib import Path
from typing import Final

from pods.translation import Files

_CURRENT: Final = "..data"


def write_volume(folder: Path, files: Files, *, group: int | None) -> Path:
    """Puts the files of a volume into a folder; what was there before is replaced in one moment.

    Each path leads through a link to a version of all files, so that whoever reads a key and then its
    certificate reads two that belong together. `group` is a pod's fsGroup, which may read them all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    current = folder / _CURRENT
    before = current.resolve() if current.is_symlink() else None
    version = folder / f"..{int(before.name[2:]) + 1 if before else 1}"
    for path, data in files.contents.items():
        place = version / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        place.chmod(files.mode | (0o440 if group is not None else 0))
    for place in (version, *version.rglob("*")):
        os.chown(place, 0, group if group is not None else 0)
    fresh = folder / f"{_CURRENT}.new"
    fresh.symlink_to(version.name)
    fresh.rename(current)
    for top in {path.partition("/")[0] for path in files.contents}:
        if not (folder / top).is_symlink():
            (folder / top).symlink_to(f"{_CURRENT}/{top}")
    if before is not None:
        shutil.rmtree(before)
    return folder
