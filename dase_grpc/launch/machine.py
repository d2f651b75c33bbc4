"""What this machine has room for: on a disk, and in memory."""

import os
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""Of a container, as it sees its own: cgroup v2 and v1."""


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
