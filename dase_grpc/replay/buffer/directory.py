"""A replay's data directory: who uses it, which buffer, leases and settings lie in it."""

import fcntl
import json
import os
import struct
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from dase_grpc.config.texts import json_value
from dase_grpc.errors import DataDirectoryError
from dase_grpc.progress import FINISHED, MAX_AGENT_ID, Progress
from dase_grpc.replay.buffer.leases import Lease
from dase_grpc.replay.buffer.ledger import AlternatingRecord
from dase_grpc.replay.buffer.mapped import StrictFile, sync_directory
from dase_grpc.replay.buffer.sharding import WHOLE, Shard
from dase_grpc.schema import TransitionSchema

FORMAT: Final = 1
BUFFER: Final = "buffer.json"
ROWS: Final = "rows"
COMMITS: Final = "commits"
LEASES: Final = "leases"
_LOCK: Final = "lock"

_LEASE: Final = struct.Struct("<qBH")
"""Epoch, what became of it, bytes of the name; then the name and, to the end, the reason or the node id."""

_HELD, _GIVEN_BACK, _FINISHED = 0, 1, 2
"""What became of a lease. Version 0.2 wrote the first two, and takes the third for the second."""

_MAX_TEXT_BYTES: Final = 2_000
_SLOT: Final = AlternatingRecord.slot_bytes(_LEASE.size + 2 * _MAX_TEXT_BYTES)
FILE_BYTES: Final = 2 * _SLOT * (MAX_AGENT_ID + 1)

SETTINGS: Final = "settings.json"


@dataclass(frozen=True)
class BufferIdentity:
    """What a buffer on disk is, from its creation to its end.

    `spare` are slots beyond the capacity, so that what is not yet committed never lies on what is;
    `max_writers` is the size of the table of writers.
    """

    buffer_id: str
    run_id: str
    capacity: int
    spare: int
    max_writers: int
    schema: TransitionSchema
    shard: Shard = WHOLE

    @property
    def slots(self) -> int:
        """Rows that the file of rows has room for."""
        return self.capacity + self.spare

    def to_json(self) -> str:
        """The text of buffer.json."""
        stored = {"format": FORMAT, **asdict(self), "schema_fingerprint": self.schema.fingerprint}
        if self.shard == WHOLE:  # as before there were shards
            del stored["shard"]
        return json.dumps({**stored, "check_sum": _check_sum(stored)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> Self:
        """Reads what `to_json` wrote."""
        try:
            stored = json_value(text)
            found, check_sum = stored["format"], stored.pop("check_sum")
            whole = check_sum == _check_sum(stored)
        except (ValueError, KeyError, TypeError, AttributeError):
            found, whole = FORMAT, False
        if found != FORMAT:
            raise DataDirectoryError(
                f"{path} has format {found!r}, this version of dase reads format {FORMAT}; "
                f"use the version that wrote it, or choose another folder"
            )
        if not whole:
            raise DataDirectoryError(f"{path} is damaged; restore it, or choose another folder")
        del stored["format"], stored["schema_fingerprint"]
        shard, schema = Shard(**stored.pop("shard", {})), stored.pop("schema")
        bounds = {name: tuple(schema[name]) for name in ("action_low", "action_high")}
        return cls(**stored, schema=TransitionSchema(**{**schema, **bounds}), shard=shard)


@dataclass(eq=False)
class DataDirectory:
    """A directory that one replay holds, from `open` to `close` or to its death."""

    path: Path
    lock: int

    @classmethod
    def open(cls, path: Path) -> Self:
        """Makes the directory if it is missing, and takes it."""
        if sys.platform != "linux":
            raise DataDirectoryError("--data-dir needs Linux; leave it out to keep the buffer in memory")
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise DataDirectoryError(f"{path} cannot be used ({error.strerror}); choose another") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise DataDirectoryError(
                f"{path} is in use by another replay; stop that one, or choose another directory"
                if isinstance(error, BlockingIOError)
                else f"{path} cannot be locked ({error.strerror}); choose another"
            ) from None
        return cls(path, lock)

    def close(self) -> None:
        """Lets others have the directory."""
        os.close(self.lock)

    def identity(self) -> BufferIdentity | None:
        """See `stored_identity`."""
        return stored_identity(self.path)

    def put_identity(self, identity: BufferIdentity) -> None:
        """Makes the files of rows and commits count: a start before this finds no buffer, one after does."""
        staged = self.path / f"{BUFFER}.new"
        with staged.open("w", encoding="utf-8") as file:
            file.write(identity.to_json())
            file.flush()
            os.fsync(file.fileno())
        staged.replace(self.path / BUFFER)
        sync_directory(self.path)

    def discard(self) -> None:
        """Removes the buffer; leases stay."""
        for name in (BUFFER, f"{BUFFER}.new", ROWS, COMMITS):
            (self.path / name).unlink(missing_ok=True)


def stored_identity(path: Path) -> BufferIdentity | None:
    """The buffer that lies in a directory, if there is one; takes no lock. A damaged one is an error."""
    file = path / BUFFER
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        raise DataDirectoryError(f"{file} cannot be read; restore it, or choose another folder") from None
    return BufferIdentity.from_json(text, file)


def _check_sum(stored: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(stored, sort_keys=True).encode())


class LeaseFile:
    """One alternating record for each agent id. Heartbeats are not kept."""

    def __init__(self, file: StrictFile) -> None:
        self._file = file
        self._records = [
            AlternatingRecord(file, 2 * _SLOT * agent, _SLOT) for agent in range(MAX_AGENT_ID + 1)
        ]

    @classmethod
    def open(cls, directory: DataDirectory) -> Self:
        """The file of a directory, which is made if it is missing; node ids in it are secrets."""
        path = directory.path / LEASES
        try:
            if not path.exists():
                return cls(StrictFile.create(path, FILE_BYTES, mode=0o600))
            file = StrictFile.open(path, FILE_BYTES)
        except OSError as error:
            raise DataDirectoryError(
                f"{directory.path} cannot take the {FILE_BYTES >> 20} MiB of leases "
                f"({error.strerror}); free space there, or choose another"
            ) from None
        with suppress(PermissionError):  # of another user's, or on a file system without modes
            path.chmod(0o600)  # as older versions did not
        return cls(file)

    def read(self, *, now: float, ttl_s: float) -> list[Lease]:
        """The latest lease of each agent id, those that were not given back as if renewed at `now`."""
        return [
            _unpack(agent_id, record.latest, now=now, ttl_s=ttl_s)
            for agent_id, record in enumerate(self._records)
            if record.latest is not None
        ]

    def put(self, lease: Lease) -> None:
        """Keeps a lease; returns once the disk has it, so that no epoch is ever given twice."""
        became, rest = _HELD, lease.node_id
        if lease.left_because is not None:
            became = _FINISHED if lease.progress.state == FINISHED else _GIVEN_BACK
            rest = lease.left_because
        name = _cut(lease.node_name)
        self._records[lease.agent_id].write(_LEASE.pack(lease.epoch, became, len(name)) + name + _cut(rest))
        self._file.sync()

    def require_disk(self) -> None:
        """DataDirectoryError if a sync has failed."""
        self._file.require_disk()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _unpack(agent_id: int, data: bytes, *, now: float, ttl_s: float) -> Lease:
    epoch, became, size = _LEASE.unpack_from(data)
    texts = data[_LEASE.size :]
    rest = texts[size:].decode(errors="replace")
    return Lease(
        agent_id,
        epoch,
        node_name=texts[:size].decode(errors="replace"),
        renewed_at=now,
        ttl_s=ttl_s,
        progress=Progress(state=FINISHED) if became == _FINISHED else Progress(),
        left_because=rest if became else None,
        node_id="" if became else rest,
    )


def _cut(text: str) -> bytes:
    return text.encode(errors="replace")[:_MAX_TEXT_BYTES].decode(errors="ignore").encode()


def note_settings(path: Path, settings: Mapping[str, float]) -> list[str]:
    """Keeps what a replay is started with; returns each difference from the last start as "NAME A, was B".

    Settings come from the command, never from here, so a file that cannot be read or written is no more
    than one that is not there.
    """
    file = path / SETTINGS
    try:
        before = json_value(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    known = before if isinstance(before, dict) else {}
    differences = [
        f"{name} {value:g}, was {known[name]}"
        for name, value in settings.items()
        if name in known and known[name] != value
    ]
    if known != settings:
        staged = file.with_name(f"{SETTINGS}.new")
        try:
            staged.write_text(json.dumps(dict(settings)), encoding="utf-8")
            staged.replace(file)
        except OSError:
            staged.unlink(missing_ok=True)
    return differences
