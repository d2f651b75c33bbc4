"""Locks of an experiment's folder: one command that runs or queues its cells, one process for each cell.

They are flocks on files, which NFS takes to its server: other hosts heed them, and those of a host that has
died end after a while. They are held by open files, so children that keep these open hold them too.
"""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from dase_grpc.errors import RunDirectoryError
from dase_grpc.process.signals import LEASHLESS_S

ORPHANS_S: Final = LEASHLESS_S + 10
"""How long the children of a `dase experiment` that was killed may still write."""

GONE_HOST_S: Final = 240.0
"""How long a file server may keep the locks of a host that has died: 90 s for NFS, and as long once more
where the server itself has just been started."""

COMMAND, CELLS, EACH_CELL = "lock", "cells.lock", "locks"

_POLL_S: Final = 0.1


class ExperimentLocks:
    """The locks in `own`, the folder of an experiment's own files.

    lock          held by the one `dase experiment` that runs or queues cells
    cells.lock    held alone by who runs all cells, or shared by those that run one each
    locks/        a file for each cell, held by who runs that one alone
    """

    def __init__(self, own: Path) -> None:
        self._own = own

    @contextlib.contextmanager
    def all_cells(self, say: Callable[[str], None]) -> Iterator[int]:
        """Makes the folder and keeps everybody else from running or queueing its cells for the block.

        Gives a file descriptor that children keep open: where the parent is killed, the next one waits
        until they have ended, and `say` tells so.
        """
        with self.queueing(), self._opened(CELLS) as cells:
            if not self._lock(cells):
                say("waiting for the processes of an experiment that was killed here")
                if not self._lock(cells, within_s=ORPHANS_S):
                    raise RunDirectoryError(
                        f"processes of an experiment that was killed, or jobs of a cluster, still write to "
                        f"{self._own.parent} after {ORPHANS_S:g} s; end them"
                    )
            yield cells

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        """Makes the folder and keeps others from running or queueing all cells; jobs may run one each."""
        with self._opened(COMMAND) as command:
            if not self._lock(command):
                raise RunDirectoryError(
                    f"another dase experiment runs in {self._own.parent}; wait for its end, or choose "
                    f"another name"
                )
            yield

    @contextlib.contextmanager
    def one_cell(self, name: str, say: Callable[[str], None]) -> Iterator[Sequence[int]]:
        """Keeps everybody else, whatever the host, from running a cell.

        Gives file descriptors that children keep open. `say` tells that it waits for another who runs it.
        """
        with self._opened(CELLS) as cells, self._opened(f"{EACH_CELL}/{name}.lock") as own:
            if not self._lock(cells, shared=True):
                raise RunDirectoryError(
                    f"a dase experiment runs all cells of {self._own.parent}; wait for its end"
                )
            if not self._lock(own):
                say(f"{name} is run by another process; waiting for its end")
                if not self._lock(own, within_s=GONE_HOST_S):
                    raise RunDirectoryError(
                        f"another process still runs {self._own.parent / name} after {GONE_HOST_S:g} s; "
                        f"leave it to that one, or end it"
                    )
            yield (cells, own)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        path = self._own / name
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b")  # readable too, for NFS shares no lock on what is not
        with file:
            yield file.fileno()

    def _lock(self, descriptor: int, *, shared: bool = False, within_s: float = 0.0) -> bool:
        kind, limit = fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + within_s
        while True:
            try:
                with self._writing():
                    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= limit:
                    return False
                time.sleep(_POLL_S)
            else:
                return True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            raise
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write to {self._own.parent}: {error.strerror or error}"
            ) from None
