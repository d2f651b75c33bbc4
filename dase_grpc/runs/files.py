"""Whole lines, whole files, check sums and locks: a crash leaves nothing half written."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from dase_grpc.config.texts import json_value
from dase_grpc.errors import DiskFullError, RunDirectoryError
from dase_grpc.process.ends import closed_in_forks

STAGING_PREFIX: Final = ".staging-"

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a disk says that has no room, or none for this user."""

SEAL: Final = "sha256"


@contextlib.contextmanager
def written(what: Path | str) -> Iterator[None]:
    """For a block that writes what is named."""
    try:
        yield
    except OSError as error:
        raise disk_refusal(f"cannot write {what}", error) from None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """For a block that reads `path`."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}: {error.strerror or error}") from None


def disk_refusal(what: str, error: OSError) -> RunDirectoryError:
    """The error of ours that says what could not be written."""
    why = f"{what}: {error.strerror or error}"
    if error.errno in FULL:
        return DiskFullError(f"{why}; free space, or restore it")
    return RunDirectoryError(f"{why}; see that it can be written")


def append_line(path: Path, line: str, *, header: str = "") -> None:
    """Appends one line in one write; `header` becomes the first line of a new or empty file.

    The rest of a line that a killed process left unfinished at the end is cut off first. One writer
    per file; survives the process, not a power loss.
    """
    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        with path.open("ab", buffering=0) as file:
            prefix = f"{header}\n" if header and file.tell() == 0 else ""
            data = f"{prefix}{line}\n".encode()
            # A disk that is nearly full takes a part of it, and says why not more when asked again.
            while data:
                data = data[file.write(data) :]


def _drop_torn_line(path: Path) -> None:
    """Cuts off what follows the last line end, if anything does."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def whole_lines(path: Path) -> list[str]:
    """The finished lines of a text file, without a byte order mark; none if there is no file."""
    try:
        return _halves(path)[0].decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise RunDirectoryError(f"{path} is damaged: it is not text") from None


def unfinished_line(path: Path) -> str:
    """What follows the last finished line of a text file; empty where nothing does, or there is no file."""
    return _halves(path)[1].decode(errors="replace")


def _halves(path: Path) -> tuple[bytes, bytes]:
    """A file's finished lines, and what follows them."""
    with reading(path):
        data = path.read_bytes() if path.is_file() else b""
    end = data.rfind(b"\n") + 1
    return data[:end], data[end:]


def last_line(path: Path, *, within_bytes: int = 65_536) -> str:
    """The last finished line of a text file without reading all of it; empty where there is none.

    So it is, too, where NFS has lost the file that was opened, since another machine has put a new one there.
    """
    try:
        end = end_of(path, within_bytes=within_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return ""
    return end[: end.rfind("\n") + 1].rstrip("\n").rpartition("\n")[2]


def end_of(path: Path, *, within_bytes: int = 2**20) -> str:
    """The end of a text file, however long it is; an OSError where it cannot be read."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - within_bytes))
        return file.read(within_bytes).decode(errors="replace")


def utf8(text: str) -> bytes:
    """The text as it is written to files.

    What has no UTF-8, as in a path whose bytes are of another encoding, has an escape in its place.
    """
    return text.encode(errors="backslashreplace")


def require_utf8(path: Path, what: str = "run") -> None:
    """Checks that a run, or what is named, can lie somewhere.

    Raises:
        RunDirectoryError: the path is in another encoding, which TensorBoard, torch and ONNX refuse.
    """
    text = str(path.absolute())
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RunDirectoryError(
            f"the path {utf8(text).decode()} is not UTF-8, so no {what} can be kept there; choose another one"
        ) from None


def write_synced(path: Path, data: bytes) -> None:
    """Writes a new file and returns once the disk has it."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Returns once the disk has what was appended to a file; at once if there is none."""
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def replace_file(path: Path, data: bytes | memoryview) -> None:
    """Makes `path` hold `data`, all at once: a reader sees the old file or the new one."""
    with staged_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def staged_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path`, all at once, on leaving the block without an error."""
    staged = path.with_name(f"{STAGING_PREFIX}{path.name}-{secrets.token_hex(4)}")
    try:
        with staged.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


@contextlib.contextmanager
def staged_directory(target: Path, *, aside: Path | None = None) -> Iterator[Path]:
    """A fresh directory beside `target` which takes its place, with all its files, on leaving the block.

    What is at `target` goes `aside`, if that is given, once all that takes its place is on the disk. A
    process that is killed between those two renames leaves it there, and nothing at `target`.

    Raises:
        OSError: `target` exists, is not an empty directory, and has nowhere to go; what was staged is gone.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f"{STAGING_PREFIX}{target.name}-{os.getpid()}-{secrets.token_hex(4)}")
    staged.mkdir()
    try:
        yield staged
        sync_directory(staged)
        if aside is not None and target.exists():
            target.rename(aside)
        staged.rename(target)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Returns once the disk has the directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checked_bytes(path: Path, checksum: Any, *, damaged: str) -> bytes:
    """What is in a file whose SHA-256 is known; `damaged` is the sentence for another."""
    with reading(path):
        data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != checksum:
        raise RunDirectoryError(damaged)
    return data


def read_document(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        with reading(path):
            document = json_value(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from None
    if not isinstance(document, dict):
        raise RunDirectoryError(f"{path} is damaged: it is not a JSON object")
    return document


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document, which is JSON without NaN, with the checksum of all its other entries under `sha256`."""
    unsealed = {key: value for key, value in document.items() if key != SEAL}
    return {**unsealed, SEAL: hashlib.sha256(json_text(unsealed).encode()).hexdigest()}


def require_seal(document: Mapping[str, Any], what: str) -> None:
    """Checks a document's checksum; `what` begins the sentence that says it is wrong."""
    try:
        sound = document.get(SEAL) == sealed(document)[SEAL]
    except ValueError:  # NaN, which no sealed document holds
        sound = False
    if not sound:
        raise RunDirectoryError(f"{what} does not have the checksum that it names")


def json_text(document: Mapping[str, Any]) -> str:
    """The document as it lies on disk: the same text for the same entries."""
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"


class FileLock:
    """An advisory lock (flock) on an open file, which it owns; it ends with its owner, however that ends.

    What the owner forks does not hold it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        closed_in_forks(self)

    @property
    def descriptor(self) -> int:
        """The open file; a ValueError once it was closed."""
        if self._descriptor is None:
            raise ValueError("the lock was closed")
        return self._descriptor

    def take(self) -> bool:
        """Locks the file unless another has; never waits. An OSError on a file system without locks."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Lets others have the file; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class FolderLock(FileLock):
    """A lock on a folder, without a file. On a file system that knows no locks it holds nothing."""

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
            taken = lock.take()
        except OSError:  # a file system without locks, where nothing can be said about others
            lock.close()
            return lock
        if not taken:
            lock.close()
            raise RunDirectoryError(
                f"another process is still writing to {folder}; stop it, or wait until it has ended"
            )
        return lock
