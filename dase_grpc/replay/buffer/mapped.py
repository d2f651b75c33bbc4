"""A file of fixed size in memory: what is put into it outlives the process at once, and power once synced."""

import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

from dase_grpc.errors import DataDirectoryError
from dase_grpc.replay.buffer.large_pages import LargePages, advise

_NEW: Final = ".new"
_OUT_OF_REACH: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Reservation:
    """A new file of zeros, all its space reserved, under another name than the `path` that it is for.

    To be dropped, or taken by a MappedFile.
    """

    path: Path
    descriptor: int
    size: int

    @classmethod
    def make(cls, path: Path, size: int, *, mode: int = 0o666) -> Self:
        """Reserves the space, which takes minutes where a file system cannot but writes all of it (NFSv3).

        Without that, a write to a full disk would be a signal that ends the process. An OSError, where the
        disk refuses, leaves nothing behind.
        """
        staged = _staged(path)
        staged.unlink(missing_ok=True)
        descriptor = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        reserved = cls(path, descriptor, size)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except BaseException:
            reserved.drop()
            raise
        return reserved

    def drop(self) -> None:
        """Gives the space back."""
        os.close(self.descriptor)
        _staged(self.path).unlink(missing_ok=True)


class MappedFile:
    """Bytes that are a file's; `put` is the only way into them.

    Not locked. `sync` blocks and may be called from any thread, also while another one puts.
    """

    def __init__(self, path: Path, descriptor: int, data: memoryview) -> None:
        self.path = path
        self.bytes = data
        self.descriptor = descriptor
        self._close: Callable[[], object] = partial(os.close, descriptor)
        self._reach: Callable[[int], object] = lambda _end: None

    @classmethod
    def in_memory(cls, size: int) -> Self:
        """A file of zeros that no disk holds, of a size that nobody can change; it ends with its last user.

        Pages are taken, large ones where there are any, as it is written to from its begin on.
        """
        descriptor = os.memfd_create("dase", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            pages = LargePages(descriptor, size, writable=True)
        except BaseException:
            os.close(descriptor)
            raise
        file = cls(Path(f"/proc/{os.getpid()}/fd/{descriptor}"), descriptor, pages.bytes)
        file._close = weakref.finalize(file, os.close, descriptor)
        file._reach = pages.reach
        return file

    @classmethod
    def create(cls, path: Path, size: int, *, mode: int = 0o666) -> Self:
        """A new file of zeros in place of any that has this name; see Reservation."""
        return cls.of(Reservation.make(path, size, mode=mode))

    @classmethod
    def of(cls, reserved: Reservation) -> Self:
        """The file that space was reserved for, in place of any that has its name; OSError as there."""
        try:
            file = cls(reserved.path, reserved.descriptor, _mapped(reserved.descriptor, reserved.size))
            _staged(reserved.path).replace(reserved.path)
        except BaseException:
            reserved.drop()
            raise
        return file

    @classmethod
    def open(cls, path: Path, size: int, *, writable: bool = True) -> Self:
        """An existing file; a DataDirectoryError where it is missing, out of reach, or of another size.

        One that is not to be `writable` is only read.
        """
        try:
            descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            remedy = "let this user in" if error.errno in _OUT_OF_REACH else "restore it"
            raise DataDirectoryError(
                f"{path} cannot be opened ({error.strerror}); {remedy}, or choose another folder"
            ) from None
        try:
            require_size(path, os.fstat(descriptor).st_size, size)
        except DataDirectoryError:
            os.close(descriptor)
            raise
        return cls(path, descriptor, _mapped(descriptor, size, writable=writable))

    def put(self, offset: int, data: bytes | memoryview) -> None:
        """Copies bytes into the file, in order, before it returns; O(len(data))."""
        end = offset + len(data)
        self._reach(end)
        self.bytes[offset:end] = data

    def sync(self) -> None:
        """Returns once the disk has all that was put before the call, else a DataDirectoryError."""
        try:
            os.fdatasync(self.descriptor)
        except OSError as error:
            raise DataDirectoryError(
                f"{self.path} cannot be written to its disk ({error.strerror}); check the disk"
            ) from None

    def close(self) -> None:
        """Gives the descriptor back; the bytes stay mapped for as long as someone views them."""
        self._close()


class StrictFile(MappedFile):
    """A mapped file that no sync brings to the disk any more once one has failed.

    Linux says once, and to one caller alone, that pages could not be written, and takes them for written
    from then on: the next sync would return as if the disk had them.

    Attributes:
        on_refusal: called when the disk refuses, by the thread that syncs.
    """

    def __init__(self, path: Path, descriptor: int, data: memoryview) -> None:
        super().__init__(path, descriptor, data)
        self.on_refusal: Callable[[], object] = lambda: None
        self._one_sync = threading.Lock()
        self._refusal = ""

    def require_disk(self) -> None:
        """DataDirectoryError if a sync has failed, whoever called it."""
        if self._refusal:
            raise DataDirectoryError(self._refusal)

    def sync(self) -> None:
        """See MappedFile; one call at a time, for another may be told what this one is not."""
        with self._one_sync:
            self.require_disk()
            try:
                super().sync()
            except DataDirectoryError as error:
                self._refusal = str(error)
                self.on_refusal()
                raise


def _staged(path: Path) -> Path:
    return path.with_name(path.name + _NEW)


def require_size(path: Path, found: int, size: int) -> None:
    """Checks the size that a file was found to have."""
    if found != size:
        raise DataDirectoryError(
            f"{path} has {found} bytes instead of {size}, so it is damaged; "
            f"restore it, or choose another folder"
        )


def _mapped(descriptor: int, size: int, *, writable: bool = True) -> memoryview:
    mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    advise(mapped)
    return memoryview(mapped)


def sync_directory(path: Path) -> None:
    """Returns once the disk has the directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
