"""Files of credentials: private to their node, written as a whole, read again when they change."""

import fcntl
import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, TypeVar

from dase_grpc.errors import CredentialsError

CA: Final = "ca.crt"
CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
CRL: Final = "ca.crl"

Stamp = tuple[tuple[int, int, int] | None, ...]
"""What tells one state of some files from another: when changed, how long, and which file."""

T = TypeVar("T")
log = logging.getLogger("dase")


@dataclass(frozen=True)
class TlsFiles:
    """What the files hold, as PEM: whom to trust, and this node's own certificate and its key, if any."""

    authority: bytes
    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class TlsFolder:
    """Where the files are; of one that needs no certificate of its own, ca.crt alone."""

    path: Path
    has_certificate: bool = True

    def stamp(self) -> Stamp:
        """Changes whenever a file does."""
        names = (CA, CERTIFICATE, KEY) if self.has_certificate else (CA,)
        return stamp_of(*(self.path / name for name in names))

    def read(self) -> TlsFiles:
        """The files, which fit together."""
        files = self._read()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(cadata=files.authority.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise CredentialsError(f"{self.path / CA} holds no certificate in PEM form") from error
        if not self.has_certificate:
            return files
        try:
            context.load_cert_chain(self.path / CERTIFICATE, self.path / KEY, password=b"")
        except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
            raise CredentialsError(
                f"{CERTIFICATE} and {KEY} in {self.path} are no pair of a certificate and its key, as "
                f"unencrypted PEM; put both there from one issue"
            ) from error
        if self._read() != files:
            raise CredentialsError(f"the files in {self.path} are being replaced; start again")
        return files

    def _read(self) -> TlsFiles:
        authority = read_public(self.path / CA)
        if not self.has_certificate:
            return TlsFiles(authority)
        return TlsFiles(authority, read_public(self.path / CERTIFICATE), read_private(self.path / KEY))


def server_contexts(path: Path) -> Callable[[], ssl.SSLContext]:
    """What an HTTPS server of this folder's certificate needs, as the files are at each call.

    Clients have to show a certificate of the folder's authority. See TlsFolder.read for what it raises.
    """
    folder = TlsFolder(path)

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=folder.read().authority.decode("ascii"))
        context.load_cert_chain(path / CERTIFICATE, path / KEY, password=b"")
        return context

    live = Live(f"TLS files of {path}", folder.stamp, read)

    def latest() -> ssl.SSLContext:
        live.refresh()
        return live.value

    return latest


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

    @property
    def unfit(self) -> bool:
        """Whether the files that `refresh` found last cannot be used, so that those before still are."""
        return bool(self._complaint)

    def refresh(self) -> bool:
        """Looks at the files; whether there are new contents.

        Contents that are not fit leave the old ones in use, which is logged once: whoever replaces the files
        may be half way.
        """
        with self._lock:
            stamp = self._stamp_now()
            if stamp == self._stamp:
                self._complaint = ""  # of files that were in their place meanwhile
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


def live_files(folder: TlsFolder) -> Live[TlsFiles]:
    """The folder's files, see TlsFolder.read, for as long as a node runs."""
    return Live(f"TLS files of {folder.path}", folder.stamp, folder.read)


def stamp_of(*files: Path) -> Stamp:
    """The state of some files; a file that is not there has one too."""

    def stamp(file: Path) -> tuple[int, int, int] | None:
        try:
            found = file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    return tuple(stamp(file) for file in files)


def read_private(file: Path) -> bytes:
    """The contents of a file that holds a secret.

    Its group may read it only where root owns the file: so Kubernetes lets a pod's user read a secret.
    """
    try:
        with file.open("rb") as opened:
            found = os.fstat(opened.fileno())
            content = opened.read()
    except OSError as error:
        raise CredentialsError(f"cannot read {file}: {error.strerror or error}") from error
    open_to = stat.S_IRWXO | (stat.S_IWGRP if found.st_uid == 0 else stat.S_IRWXG)
    if found.st_mode & open_to:
        raise CredentialsError(
            f"{file} holds a secret and others can read or change it (mode "
            f"{stat.S_IMODE(found.st_mode):04o}); run `chmod 600 {file}`, and replace the secret if they did"
        )
    return content


def read_public(file: Path) -> bytes:
    """The contents of a file that everybody may read; a CredentialsError where it cannot be."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise CredentialsError(f"cannot read {file}: {error.strerror or error}") from error


def is_there(file: Path) -> bool:
    """Whether there is such a file or folder; a CredentialsError where this user cannot tell."""
    try:
        return file.exists()
    except OSError as error:
        raise CredentialsError(f"cannot read {file}: {error.strerror or error}") from error


def refuse_existing(*files: Path, remedy: str = "take another folder") -> None:
    """Refuses, with a CredentialsError, to write over what is there."""
    for file in files:
        if is_there(file):
            raise CredentialsError(f"{file} is there already and is not written over; {remedy}")


@contextmanager
def writing_into(directory: Path) -> Iterator[None]:
    """Turns what the system refuses in the block into one sentence of a CredentialsError."""
    try:
        yield
    except OSError as error:
        raise CredentialsError(f"cannot write into {directory}: {error.strerror or error}") from error


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Waits until nobody else is in such a block for a directory; not on a file system without locks."""
    with writing_into(directory):
        descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def put(file: Path, content: bytes, *, private: bool = False) -> None:
    """Writes a file that is there as a whole or not at all, and never, if private, readable by others."""
    staged = file.with_name(f".{file.name}.new")
    staged.unlink(missing_ok=True)
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content)
    staged.replace(file)
