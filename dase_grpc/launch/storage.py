"""Room for a local cluster's buffer: on disk and in memory."""

import os
import sys
from pathlib import Path
from typing import Final

from dase_grpc.config.resolve import RunConfig
from dase_grpc.config.texts import transitions
from dase_grpc.errors import CapacityError, ConfigError, DataDirectoryError, RunDirectoryError
from dase_grpc.nodes.replay import boot_id
from dase_grpc.replay.buffer.directory import DataDirectory
from dase_grpc.replay.buffer.durable import inspect, reserved_bytes
from dase_grpc.replay.buffer.ring import require_reservable
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.schema import TransitionSchema

IN_MEMORY: Final = "--set replay.storage=memory"
"""How a user asks for that."""

ASIDE: Final = "replay-before-resume"

BEGIN_EMPTY: Final = (
    "with --empty-buffer the agents go on with an empty one, each without an update until it has stored "
    "agent.start_steps new transitions"
)
"""What `dase resume` offers where the buffer cannot be gone on with."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""Of a container, as it sees its own: cgroup v2 and v1."""


def keeps_on_disk(config: RunConfig) -> bool:
    """Whether the buffer of a local cluster is kept on disk, which needs Linux."""
    return config.replay.storage == "disk" and sys.platform == "linux"


def reserve(config: RunConfig, schema: TransitionSchema, root: Path) -> str:
    """Checks that the disk of `root`, which may not be there yet, has room; says how much the buffer takes.

    Nothing is written.

    Raises:
        ConfigError: there is no room on the disk or, for a buffer in memory, there.
    """
    if not keeps_on_disk(config):
        require_memory(config, schema)
        why = "" if config.replay.storage == "memory" else ", since only Linux can keep it on disk"
        return f"buffer in memory{why}: it ends with the replay's process"
    wanted = reserved_bytes(schema, transitions(config.replay.capacity, row_bytes=schema.row_bytes))
    free = free_disk(root)
    if wanted > free:
        raise ConfigError(
            f"the buffer takes {shown_size(wanted)} of disk in {root}, and {shown_size(free)} are free; free "
            f"space there, lower replay.capacity, or keep the buffer in memory with {IN_MEMORY}"
        )
    return (
        f"buffer on disk: {shown_size(wanted)} are reserved in the run's folder "
        f"({IN_MEMORY} keeps it in memory)"
    )


def require_memory(config: RunConfig, schema: TransitionSchema) -> None:
    """Checks that a buffer that is kept in memory finds room there: all that the run can store in it.

    It takes the memory as it fills up, so without this a run might be killed when it is far on. Addresses
    for the whole capacity are reserved at once, and the system gives none that it could never fill.

    Raises:
        ConfigError: there is no room.
    """
    try:
        require_reservable(config.replay.capacity, row_bytes=schema.row_bytes)
    except CapacityError as error:
        raise ConfigError(str(error)) from None
    capacity = transitions(config.replay.capacity, row_bytes=schema.row_bytes)
    stored = min(capacity, config.train.agents * config.train.steps)
    wanted, free = stored * schema.row_bytes, free_memory()
    if wanted > free:
        raise ConfigError(
            f"the buffer takes {shown_size(wanted)} of memory when it holds {stored:,} transitions, and "
            f"{shown_size(free)} are available; lower replay.capacity, or end what else takes memory"
        )


def has_buffer(directory: RunDirectory) -> bool:
    """Whether a run's buffer lies in its directory, for a replay to go on with. Looks as `dase verify` does.

    Raises:
        DataDirectoryError: a file of it is damaged or of another version, or a replay works on it.
    """
    if not directory.replay.exists():
        return False
    _require_unused(directory.replay)
    try:
        return inspect(directory.replay, boot_id=boot_id()) is not None
    except DataDirectoryError as error:
        raise DataDirectoryError(f"{_cause(error)}; {BEGIN_EMPTY}") from None


def put_buffer_aside(directory: RunDirectory) -> Path | None:
    """Moves what the replay has kept out of the way, so that the next one begins with nothing.

    Returns where it lies now; None where there was nothing.

    Raises:
        RunDirectoryError: it cannot be moved.
        DataDirectoryError: a replay works on it.
    """
    if not directory.replay.exists():
        return None
    _require_unused(directory.replay)
    taken = {path.name for path in directory.path.glob(f"{ASIDE}-*")}
    number = next(each for each in range(1, len(taken) + 2) if f"{ASIDE}-{each}" not in taken)
    aside = directory.path / f"{ASIDE}-{number}"
    try:
        directory.replay.rename(aside)
    except OSError as error:
        raise RunDirectoryError(f"cannot move {directory.replay} to {aside}: {error.strerror}") from None
    return aside


def _require_unused(folder: Path) -> None:
    """Checks that no replay works on a buffer.

    Raises:
        DataDirectoryError: one does, or the folder cannot be written.
    """
    try:
        DataDirectory.open(folder).close()
    except DataDirectoryError as error:
        raise DataDirectoryError(
            f"{_cause(error)}; end what works on it, and see that you may write there"
        ) from None


def _cause(error: DataDirectoryError) -> str:
    """What a sentence says is wrong, without the remedy for those who start a replay by hand."""
    return str(error).partition("; ")[0]


def free_disk(path: Path) -> int:
    """Bytes that are free on the disk of a folder, which may not be there yet."""
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    found = os.statvfs(existing)
    return found.f_bavail * found.f_frsize


def free_memory(*, proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int:
    """Bytes of memory that a new process may use without others losing theirs, or a container being ended.

    Where the system does not tell, all that the machine has.
    """
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    found += [
        int(line.split()[1]) << 10 for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:")
    ]
    limits = (line for name in _LIMITS for line in _lines(cgroups / name))
    return min([*found, *(int(limit) for limit in limits if limit.isdecimal())])


def shown_size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**20:,.1f} MiB"


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
