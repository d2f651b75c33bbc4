"""Where a local cluster's buffer lies: in the run's directory, with room for all of it, or in memory."""

import os
import sys
from pathlib import Path
from typing import Final

from dase_grpc.capacity import transitions
from dase_grpc.config import RunConfig
from dase_grpc.errors import ConfigError, RunDirectoryError
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.schema import TransitionSchema
from dase_grpc.store.directory import DataDirectory, stored_identity
from dase_grpc.store.footprint import reserved_bytes

IN_MEMORY: Final = "--set replay.storage=memory"
"""How a user asks for that."""

ASIDE: Final = "replay-before-resume"


def keeps_on_disk(config: RunConfig) -> bool:
    """Whether the buffer of a local cluster is kept on disk, which needs Linux."""
    return config.replay.storage == "disk" and sys.platform == "linux"


def reserve(config: RunConfig, schema: TransitionSchema, root: Path) -> str:
    """Checks that the disk of `root`, which may not be there yet, has room; says how much the buffer takes.

    Nothing is written.

    Raises:
        ConfigError: there is no room.
    """
    if not keeps_on_disk(config):
        why = "" if config.replay.storage == "memory" else ", since only Linux can keep it on disk"
        return f"buffer in memory{why}: it ends with the replay's process"
    wanted = reserved_bytes(schema, transitions(config.replay.capacity, row_bytes=schema.row_bytes))
    free = _free_bytes(root)
    if wanted > free:
        raise ConfigError(
            f"the buffer takes {_size(wanted)} of disk in {root}, and {_size(free)} are free; free space "
            f"there, lower replay.capacity, or keep the buffer in memory with {IN_MEMORY}"
        )
    return (
        f"buffer on disk: {_size(wanted)} are reserved in the run's folder ({IN_MEMORY} keeps it in memory)"
    )


def has_buffer(directory: RunDirectory) -> bool:
    """Whether a run's buffer lies in its directory, for a replay to go on with.

    Raises:
        DataDirectoryError: what lies there is damaged or of another version, or a replay works on it.
    """
    if not directory.replay.exists():
        return False
    DataDirectory.open(directory.replay).close()
    return stored_identity(directory.replay) is not None


def put_buffer_aside(directory: RunDirectory) -> Path | None:
    """Moves what the replay has kept out of the way, so that the next one begins with nothing.

    Returns where it lies now; None where there was nothing.

    Raises:
        RunDirectoryError: it cannot be moved.
        DataDirectoryError: a replay works on it.
    """
    if not directory.replay.exists():
        return None
    DataDirectory.open(directory.replay).close()
    taken = {path.name for path in directory.path.glob(f"{ASIDE}-*")}
    number = next(each for each in range(1, len(taken) + 2) if f"{ASIDE}-{each}" not in taken)
    aside = directory.path / f"{ASIDE}-{number}"
    try:
        directory.replay.rename(aside)
    except OSError as error:
        raise RunDirectoryError(f"cannot move {directory.replay} to {aside}: {error.strerror}") from None
    return aside


def _free_bytes(path: Path) -> int:
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    found = os.statvfs(existing)
    return found.f_bavail * found.f_frsize


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
