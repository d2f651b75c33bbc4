"""Only one process at a time writes a run's or an agent's results: a lock on the folder."""

import fcntl
import os
from pathlib import Path
from typing import Self

from dase_grpc.errors import RunDirectoryError
from dase_grpc.forking import closed_in_forks


class FolderLock:
    """An advisory lock on a folder (flock): no file, and it ends with its owner, however that ends.

    What the owner forks does not hold it.

    On a file system that knows no locks it holds nothing.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        closed_in_forks(self)

    @classmethod
    def acquire(cls, folder: Path) -> Self:
        """Locks a folder, which is made if it is missing; never waits.

        Raises:
            RunDirectoryError: another holds it, or it cannot be made.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise RunDirectoryError(f"cannot open {folder}: {error.strerror or error}") from None
        lock = cls(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise RunDirectoryError(
                f"another process is still writing to {folder}; stop it, or wait until it has ended"
            ) from None
        except OSError:  # a file system without locks, where nothing can be said about others
            lock.close()
        return lock

    def close(self) -> None:
        """Lets others have the folder; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
