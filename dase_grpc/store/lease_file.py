"""The leases of a run on disk, so that epochs grow across restarts and holders keep their ids."""

import struct
from typing import Final, Self

from dase_grpc.errors import DataDirectoryError
from dase_grpc.replay.buffer.directory import LEASES, DataDirectory
from dase_grpc.replay.buffer.leases import Lease
from dase_grpc.replay.buffer.mapped import MappedFile
from dase_grpc.replay.buffer.ring import MAX_AGENT_ID
from dase_grpc.store.records import AlternatingRecord

_LEASE: Final = struct.Struct("<q?H")
"""Epoch, given back, bytes of the name; then follow the name and, to the end, the reason or the node id."""

_MAX_TEXT_BYTES: Final = 2_000
_SLOT: Final = AlternatingRecord.slot_bytes(_LEASE.size + 2 * _MAX_TEXT_BYTES)
FILE_BYTES: Final = 2 * _SLOT * (MAX_AGENT_ID + 1)


class LeaseFile:
    """One alternating record for each agent id. Heartbeats are not kept."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._records = [
            AlternatingRecord(file, 2 * _SLOT * agent, _SLOT) for agent in range(MAX_AGENT_ID + 1)
        ]

    @classmethod
    def open(cls, directory: DataDirectory) -> Self:
        """The file of a directory, which is made if it is missing.

        Raises:
            DataDirectoryError: it is damaged, or there is no space for it.
        """
        path, size = directory.path / LEASES, FILE_BYTES
        if path.exists():
            return cls(MappedFile.open(path, size))
        try:
            return cls(MappedFile.create(path, size))
        except OSError as error:
            raise DataDirectoryError(
                f"{directory.path} cannot take the {size >> 20} MiB of leases "
                f"({error.strerror}); free space there, or choose another"
            ) from None

    def read(self, *, now: float, ttl_s: float) -> list[Lease]:
        """The latest lease of each agent id, those that were not given back as if renewed at `now`."""
        return [
            _unpack(agent_id, record.latest, now=now, ttl_s=ttl_s)
            for agent_id, record in enumerate(self._records)
            if record.latest is not None
        ]

    def put(self, lease: Lease) -> None:
        """Keeps a lease; returns once the disk has it, so that no epoch is ever given twice.

        Raises:
            DataDirectoryError: the disk refuses.
        """
        given_back = lease.left_because is not None
        name, rest = _cut(lease.node_name), _cut(lease.left_because or "" if given_back else lease.node_id)
        self._records[lease.agent_id].write(_LEASE.pack(lease.epoch, given_back, len(name)) + name + rest)
        self._file.sync()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _unpack(agent_id: int, data: bytes, *, now: float, ttl_s: float) -> Lease:
    epoch, given_back, size = _LEASE.unpack_from(data)
    texts = data[_LEASE.size :]
    rest = texts[size:].decode(errors="replace")
    return Lease(
        agent_id,
        epoch,
        node_name=texts[:size].decode(errors="replace"),
        renewed_at=now,
        ttl_s=ttl_s,
        left_because=rest if given_back else None,
        node_id="" if given_back else rest,
    )


def _cut(text: str) -> bytes:
    return text.encode(errors="replace")[:_MAX_TEXT_BYTES].decode(errors="ignore").encode()
