"""What lies in files that are replaced while a node runs; the old contents stay while the new are unfit."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from dase_grpc.errors import CredentialsError

Stamp = tuple[tuple[int, int, int] | None, ...]
"""What tells one state of some files from another: when changed, how long, and which file."""

T = TypeVar("T")
log = logging.getLogger("dase")


class Live(Generic[T]):
    """The contents of some files as they were when they were last fit for use. For any thread.

    Args:
        what: names it in the log.
        stamp: the state of the files; called at each look, so it has to be cheap.
        read: the contents; raises CredentialsError where they are not fit, and does so at once here.
    """

    def __init__(self, what: str, stamp: Callable[[], Stamp], read: Callable[[], T]) -> None:
        self._what, self._stamp_now, self._read = what, stamp, read
        self._lock = threading.Lock()
        self._complaint = ""
        self._stamp = stamp()
        self._value = read()

    @property
    def value(self) -> T:
        """The contents, as `refresh` last found them."""
        return self._value

    def refresh(self) -> bool:
        """Looks at the files; whether there are new contents.

        Contents that are not fit leave the old ones in use, which is logged once, and are looked at again
        the next time: whoever replaces the files may be half way.
        """
        with self._lock:
            stamp = self._stamp_now()
            if stamp == self._stamp:
                return False
            try:
                value = self._read()
            except CredentialsError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.warning("%s from before: still in use, for %s", self._what, error)
                return False
            self._stamp, self._complaint = stamp, ""
            if value == self._value:
                return False
            self._value = value
            log.info("%s: new ones in use from now on", self._what)
            return True


def stamp_of(*files: Path) -> Stamp:
    """The state of some files; a file that is not there has one too."""
    return tuple(_stamp(file) for file in files)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
