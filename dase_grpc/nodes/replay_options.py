"""Options of a replay node: flags, what a data directory says instead, and what does not go together."""

import secrets
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from dase_grpc.config.texts import PLAIN_FOLDER, names_a_folder, transitions
from dase_grpc.errors import CapacityError, ConfigError
from dase_grpc.nodes.options import DEFAULT_ADDRESS, RunNodeOptions, ServiceOptions, flag
from dase_grpc.replay.buffer.sharding import WHOLE, Shard
from dase_grpc.replay.wire.addresses import Address, parse_address

DEFAULT_CAPACITY: Final = "1000000"
LEASE_TTL_S: Final = 10.0
SYNC_EVERY_S: Final = 5.0

_flag = partial(flag, panel="Replay node")


def _sync_every_s(seconds: float) -> float:
    if not seconds > 0:
        raise ConfigError(f"--sync-every {seconds:g} is not a time; give seconds above 0")
    return seconds


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(RunNodeOptions, ServiceOptions):
    """What a replay node is told on its command line.

    A run that is not named, and a capacity and shard that are not given, are those in the data directory;
    else the run gets a name of its own, the capacity is a million, and the replay whole.
    """

    listen: Address = _flag(
        parse_address(DEFAULT_ADDRESS),
        "--listen",
        f"Where to listen, else {DEFAULT_ADDRESS}; port 0 is any.",
        read=parse_address,
        metavar="HOST:PORT",
    )
    capacity: int | str = _flag(
        DEFAULT_CAPACITY,
        "--capacity",
        f'Transitions kept, else {DEFAULT_CAPACITY}; or a size such as "512MiB".',
    )
    min_size: int = _flag(
        1, "--min-size", "Transitions present before batches are served, else 1.", int, min=1
    )
    data_dir: Path | None = _flag(
        None,
        "--data-dir",
        "Keep the buffer there, so that it outlives the process; else in memory.",
        Path,
        metavar="DIR",
    )
    sync_every_s: float = _flag(
        SYNC_EVERY_S,
        "--sync-every",
        "With --data-dir, seconds between writes to the disk, the bound on what a power loss takes; else "
        f"{SYNC_EVERY_S:g}.",
        float,
        read=_sync_every_s,
        metavar="SECONDS",
    )
    shard: Shard = _flag(
        WHOLE,
        "--shard",
        "Which part of a sharded replay this is, e.g. 0/2 and 1/2 (docs/sharding.md); else all of it.",
        read=Shard.parse,
        metavar="INDEX/COUNT",
    )
    seed: int = 0
    lease_ttl_s: float = LEASE_TTL_S
    lease_check_s: float = 1.0

    @classmethod
    def parse(cls, **given: Any) -> Self:
        """See `NodeOptions.parse`."""
        data_dir, sync_every_s = given.get("data_dir"), given.get("sync_every_s")
        if sync_every_s is not None and data_dir is None:
            raise ConfigError("--sync-every needs --data-dir; a buffer in memory is never written to a disk")
        given = {name: value for name, value in given.items() if value is not None}
        options = super().parse(**(_stored(data_dir) | given))
        capacity, shard = options.capacity, options.shard
        if options.min_size > _most_held(capacity, in_memory=data_dir is None) * shard.count:
            of_all = "" if shard == WHOLE else f" of each of {shard.count} shards"
            raise ConfigError(
                f"--min-size {options.min_size} exceeds --capacity {capacity}{of_all}, so no batch would "
                f"ever be served"
            )
        if not options.run_id:
            if shard != WHOLE:
                raise ConfigError(f"--shard {shard} needs --run-id, the same at every shard")
            return replace(options, run_id=f"run-{secrets.token_hex(4)}")
        if not names_a_folder(options.run_id):
            raise ConfigError(f"--run-id {options.run_id!r} names a folder of results; {PLAIN_FOLDER}")
        return options


def _stored(data_dir: Path | None) -> dict[str, Any]:
    from dase_grpc.replay.buffer.directory import stored_identity

    stored = None if data_dir is None else stored_identity(data_dir)
    if stored is None:
        return {}
    return {"run_id": stored.run_id, "capacity": str(stored.capacity), "shard": str(stored.shard)}


def _most_held(capacity: int | str, *, in_memory: bool) -> int:
    """The most transitions that a buffer of this capacity could hold, a byte each; ConfigError if none."""
    from dase_grpc.replay.buffer.ring import require_reservable
    from dase_grpc.schema import LEAST_ROW_BYTES

    try:
        held = transitions(capacity, row_bytes=1)
    except ValueError as error:
        raise ConfigError(f"--capacity: {error}") from None
    if in_memory:
        try:
            require_reservable(capacity, row_bytes=LEAST_ROW_BYTES)
        except CapacityError as error:
            said = (
                str(error).replace("replay.capacity =", "--capacity", 1).replace("needs", "needs at least", 1)
            )
            raise ConfigError(said) from None
    return held
