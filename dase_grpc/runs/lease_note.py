"""Lease note: which process holds an agent's lease, so that the next one can prove that it has ended."""

import errno
import os
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self

from dase_grpc.config.texts import json_value
from dase_grpc.process.ends import boot_id
from dase_grpc.runs.files import FileLock, json_text, written


class LeaseNote(FileLock):
    """An agent's lease.json, which the process that holds the agent's lease keeps locked until it ends.

    In it stands the node id by which the replay knows that process: a secret, so nobody else may read it. The
    kernel ends the lock with the process, however that ends, and not before. So whoever finds it free under
    the same kernel, on the very file that was locked, knows that the process has ended, also in another
    container of its pod, where process ids say nothing.
    """

    @classmethod
    def keep(cls, path: Path, node_id: str) -> Self:
        """Locks the note and writes it; never waits. The caller holds the lock on the agent's folder.

        Where the kernel has no boot id, the file system has no locks or no modes, or another process looks at
        the note in this very moment, none is kept: whoever comes next waits for the lease to end.

        Raises:
            RunDirectoryError: it cannot be written.
        """
        with written(path):
            note = cls(_opened(path))
            try:
                if boot_id() and note.taken() and note.is_private():
                    note.write(node_id)
                else:
                    note.close()
            except BaseException:
                note.close()
                raise
        return note

    def taken(self) -> bool:
        """Whether the lock is ours now; never on a file system without locks."""
        try:
            return self.take()
        except OSError:
            return False

    def is_private(self) -> bool:
        """Whether nobody else may read the note from now on; not on a file system without modes, as FAT."""
        with suppress(PermissionError):
            os.fchmod(self.descriptor, 0o600)
        return not os.fstat(self.descriptor).st_mode & 0o077

    def write(self, node_id: str) -> None:
        """Writes the note in place, for the lock is on this very file."""
        text = json_text({"node_id": node_id, **self._here()})
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text.encode(), 0)

    def node_id(self) -> str:
        """Whose note it is; empty where it was not written under this kernel and on this very file."""
        note = None
        with suppress(OSError, ValueError):
            note = json_value(os.pread(self.descriptor, 4_096, 0).decode())
        if not isinstance(note, dict):
            return ""
        node_id = note.pop("node_id", "")
        return node_id if isinstance(node_id, str) and note == self._here() else ""

    def _here(self) -> dict[str, Any]:
        """What a copy of the file does not have, nor one of another machine or of before a restart."""
        found = os.fstat(self.descriptor)
        return {"boot_id": boot_id(), "device": found.st_dev, "inode": found.st_ino}


def _opened(path: Path) -> int:
    """The note, or a new one in the place of another user's, who shares the run's directory with this one.

    So is a link replaced, through which another user could have a file of this one written over.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP):
            raise
        path.unlink()
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


def ended_node_id(path: Path) -> str:
    """The node id of the process that kept the note at `path`, if that has certainly ended, or empty.

    Never waits. A note that is still kept, a copy, one of another machine or of before a restart of this one,
    and one that cannot be read prove nothing.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return ""
    with closing(LeaseNote(descriptor)) as note:
        return note.node_id() if note.taken() else ""
