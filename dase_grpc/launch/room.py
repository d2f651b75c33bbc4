"""Room on disk and in memory for what a run keeps there."""

import os
import sys
from pathlib import Path
from typing import Final

from dase_grpc.config.resolve import RunConfig
from dase_grpc.config.texts import transitions
from dase_grpc.errors import CapacityError, ConfigError
from dase_grpc.replay.buffer.durable import reserved_bytes
from dase_grpc.replay.buffer.ring import require_reservable
from dase_grpc.schema import TransitionSchema

IN_MEMORY: Final = "--set replay.storage=memory"
"""How a user asks for that."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""Of a container, as it sees its own: cgroup v2 and v1."""


def keeps_on_disk(config: RunConfig) -> bool:
    """Whether the buffer of a local cluster is kept on disk, which needs Linux."""
    return config.replay.storage == "disk" and sys.platform == "linux"


def reserve(config: RunConfig, schema: TransitionSchema, root: Path) -> str:
    """Checks that the disk of `root`, which may not be there yet, has room; says how much the buffer takes.

    Nothing is written.
    """
    if not keeps_on_disk(config):
        require_memory(config, schema)
        why = "" if config.replay.storage == "memory" else ", since only Linux can keep it on disk"
        return f"buffer in memory{why}: it ends with the replay's process"
    wanted, free = disk_bytes(config, schema), free_disk(root)
    if wanted > free:
        raise ConfigError(
            f"the buffer takes {shown_size(wanted)} of disk in {root}, and {shown_size(free)} are free; free "
            f"space there, lower replay.capacity, or keep the buffer in memory with {IN_MEMORY}"
        )
    return (
        f"buffer on disk: {shown_size(wanted)} are reserved in the run's folder "
        f"({IN_MEMORY} keeps it in memory)"
    )


def disk_bytes(config: RunConfig, schema: TransitionSchema) -> int:
    """What a buffer on disk takes from its start on."""
    return reserved_bytes(schema, transitions(config.replay.capacity, row_bytes=schema.row_bytes))


def require_memory(config: RunConfig, schema: TransitionSchema) -> None:
    """Checks that a buffer that is kept in memory finds room there: all that the run can store in it.

    It takes the memory as it fills up, so without this a run might be killed when it is far on. Addresses
    for the whole capacity are reserved at once, and the system gives none that it could never fill.
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


def free_disk(path: Path) -> int:
    """Bytes that are free on the disk of a folder, which may not be there yet."""
    found = os.statvfs(nearest_folder(path))
    return found.f_bavail * found.f_frsize


def nearest_folder(path: Path) -> Path:
    """The path itself if it is there, else the first of its parents that is."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def free_memory(*, proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int:
    """Bytes of memory that a new process may use without others losing theirs, or a container being ended.

    Where the system does not tell, all that the machine has.
    """
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    available = (line for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:"))
    limits = (line for name in _LIMITS for line in _lines(cgroups / name) if line.isdecimal())
    return min([*found, *(int(line.split()[1]) << 10 for line in available), *map(int, limits)])


def shown_size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**20:,.1f} MiB" if count < 10 * 2**30 else f"{count / 2**30:,.1f} GiB"


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
