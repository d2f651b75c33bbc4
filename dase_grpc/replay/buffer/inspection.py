"""Inspection of a data directory, which takes and changes nothing, also while a replay works on it."""

from dataclasses import dataclass
from pathlib import Path

from dase_grpc.replay.buffer.directory import (
    COMMITS,
    FILE_BYTES,
    LEASES,
    ROWS,
    BufferIdentity,
    stored_identity,
)
from dase_grpc.replay.buffer.ledger import FORGOTTEN, CommitFile, Committed
from dase_grpc.replay.buffer.mapped import MappedFile


@dataclass(frozen=True)
class BufferState:
    """What lies in a data directory.

    Attributes:
        identity: which buffer.
        transitions: how many it holds, as of the last commit or, after the machine has stopped, the last
            sync; a start may leave out some of the oldest then.
        writers: how many have written and were not forgotten.
        machine_stopped: whether the machine has stopped since a replay was last started there.
    """

    identity: BufferIdentity
    transitions: int
    writers: int
    machine_stopped: bool


def inspect(path: Path, *, boot_id: str) -> BufferState | None:
    """The buffer in a data directory; None where there is none.

    Checked are the check sums of buffer.json, of the latest records and of the writers' names, and the
    sizes of all files. Rows carry none, and of the leases a start takes what is whole.

    Raises:
        DataDirectoryError: a file is missing, damaged or of another version.
    """
    identity = stored_identity(path)
    if identity is None:
        return None
    MappedFile.open(path / ROWS, identity.slots * identity.schema.row_bytes).close()
    if (path / LEASES).exists():  # else a start makes it
        MappedFile.open(path / LEASES, FILE_BYTES).close()
    commits = CommitFile.open(path / COMMITS, identity.max_writers)
    try:
        _, packed = commits.synced_state()
        latest = commits.commits.latest if commits.same_boot(boot_id) else None
        state = Committed.unpack(packed if latest is None else latest)
        writers = commits.writers(state.sequences).keys() - {FORGOTTEN}
        return BufferState(identity, state.size, len(writers), machine_stopped=latest is None)
    finally:
        commits.close()
