"""Room on disk and in memory for what a run keeps there."""

import os
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.config.gpus import Gpus
from dase_grpc.config.resolve import RunConfig
from dase_grpc.config.texts import transitions
from dase_grpc.errors import CapacityError, ConfigError
from dase_grpc.progress import several
from dase_grpc.replay.buffer.durable import reserved_bytes
from dase_grpc.replay.buffer.ring import require_reservable
from dase_grpc.schema import TransitionSchema

IN_MEMORY: Final = "--set replay.storage=memory"
"""How a user asks for that."""

_COPIES: Final[Mapping[str, tuple[int, int]]] = {"td3": (5, 10), "ddpg": (5, 5), "sac": (4, 10)}
"""How many copies of the actor's parameters and of one critic's an algorithm keeps in memory.

For each network the values, the gradient, Adam's two moments, and the values of its target.
"""
_OF_OWN: Final = (1, 0)
"""All that is known of an algorithm of the user's: it has a policy."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""Of a container, as it sees its own: cgroup v2 and v1."""


def keeps_on_disk(config: RunConfig) -> bool:
    """Whether the buffer of a local cluster is kept on disk, which needs Linux."""
    return config.replay.storage == "disk" and sys.platform == "linux"


def reserve(config: RunConfig, schema: TransitionSchema, root: Path, *, gpus: Gpus | None = None) -> str:
    """Checks that the disk of `root`, which may not be there yet, has room; says how much the buffer takes.

    Where the buffer is kept in memory, that is checked (`require_memory`). Nothing is written.
    """
    if not keeps_on_disk(config):
        require_memory(config, schema, gpus=gpus)
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


def require_memory(config: RunConfig, schema: TransitionSchema, *, gpus: Gpus | None = None) -> None:
    """Checks that a buffer that is kept in memory finds room there: all that the run can store in it.

    It takes the memory as it fills up, so without this a run might be killed when it is far on. Addresses
    for the whole capacity are reserved at once, and the system gives none that it could never fill.
    """
    wanted, free = buffer_bytes(config, schema), free_memory() - networks_bytes(config, schema, gpus)
    if wanted > free:
        raise ConfigError(
            f"the buffer takes {shown_size(wanted)} of memory when it holds {wanted // schema.row_bytes:,} "
            f"transitions, and {shown_size(max(free, 0))} are available beside the networks; lower "
            f"replay.capacity, or end what else takes memory"
        )


def buffer_bytes(config: RunConfig, schema: TransitionSchema) -> int:
    """The most that a buffer in memory comes to take; ConfigError where addresses for it cannot be had."""
    try:
        require_reservable(config.replay.capacity, row_bytes=schema.row_bytes)
    except CapacityError as error:
        raise ConfigError(str(error)) from None
    capacity = transitions(config.replay.capacity, row_bytes=schema.row_bytes)
    return min(capacity, config.train.agents * config.train.steps) * schema.row_bytes


def require_networks(config: RunConfig, schema: TransitionSchema, *, gpus: Gpus | None = None) -> None:
    """Checks that the networks of all agents find room in this machine's memory."""
    wanted, free = networks_bytes(config, schema, gpus), free_memory()
    if wanted > free:
        agents = several(config.train.agents, "agent")
        layers = "the numbers in the members' hidden" if config.members else "the numbers in agent.hidden"
        raise ConfigError(
            f"the networks of {agents} take at least {shown_size(wanted)} of memory, and {shown_size(free)} "
            f"are available; lower {layers}{', or train.agents' if config.train.agents > 1 else ''}"
        )


def networks_bytes(config: RunConfig, schema: TransitionSchema, gpus: Gpus | None) -> int:
    """The least that the networks of all agents take of this machine's memory; nothing on GPUs."""
    agents = [config.for_agent(agent_id).agent for agent_id in range(config.train.agents)]
    return 0 if gpus is not None else sum(network_bytes(agent, schema) for agent in agents)


def network_bytes(agent: AgentConfig, schema: TransitionSchema) -> int:
    """The least that one agent's networks take once it learns."""
    actors, critics = _COPIES.get(agent.algorithm, _OF_OWN)
    m, n = schema.observation_size, schema.action_size
    actor, critic = _parameters(m, *agent.hidden, n), _parameters(m + n, *agent.hidden, 1)
    return 4 * (actors * actor + critics * critic)


def _parameters(*units: int) -> int:
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(units))


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
