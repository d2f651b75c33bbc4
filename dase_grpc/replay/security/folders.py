"""A node's TLS files: a folder with the names of a Kubernetes TLS secret, read again when it changes."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dase_grpc.errors import CredentialsError
from dase_grpc.wire.live import Live, Stamp, stamp_of
from dase_grpc.wire.private import read_private, read_public

CA: Final = "ca.crt"
CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"


@dataclass(frozen=True)
class TlsFiles:
    """What the files hold, as PEM: whom to trust, and this node's own certificate and its key, if any."""

    authority: bytes
    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class TlsFolder:
    """Where the files are; one that needs no certificate of its own has ca.crt alone."""

    path: Path
    has_certificate: bool = True

    def stamp(self) -> Stamp:
        """Changes whenever a file does."""
        return stamp_of(*(self.path / name for name in self._names()))

    def read(self) -> TlsFiles:
        """The files, which fit together.

        Raises:
            CredentialsError: one is missing, no PEM or open to others, or certificate and key are no pair.
        """
        files = self._read()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(cadata=files.authority.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise CredentialsError(f"{self.path / CA} holds no certificate in PEM form") from error
        if self.has_certificate:
            self._require_pair(context)
            if self._read() != files:
                raise CredentialsError(f"the files in {self.path} are being replaced; start again")
        return files

    def _require_pair(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.path / CERTIFICATE, self.path / KEY, password=b"")
        except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
            raise CredentialsError(
                f"{CERTIFICATE} and {KEY} in {self.path} are no pair of a certificate and its key, as "
                f"unencrypted PEM; put both there from one issue"
            ) from error

    def _read(self) -> TlsFiles:
        authority = read_public(self.path / CA)
        if not self.has_certificate:
            return TlsFiles(authority)
        return TlsFiles(authority, read_public(self.path / CERTIFICATE), read_private(self.path / KEY))

    def _names(self) -> tuple[str, ...]:
        return (CA, CERTIFICATE, KEY) if self.has_certificate else (CA,)


def server_contexts(path: Path) -> Callable[[], ssl.SSLContext]:
    """What an HTTPS server of this folder's certificate needs, as the files are at each call.

    Clients have to show a certificate of the folder's authority.

    Raises:
        CredentialsError: see TlsFolder.read.
    """
    folder = TlsFolder(path)
    live = Live(f"TLS files of {path}", folder.stamp, lambda: _server_context(folder))

    def latest() -> ssl.SSLContext:
        live.refresh()
        return live.value

    return latest


def _server_context(folder: TlsFolder) -> ssl.SSLContext:
    files = folder.read()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=files.authority.decode("ascii"))
    context.load_cert_chain(folder.path / CERTIFICATE, folder.path / KEY, password=b"")
    return context


def live_files(folder: TlsFolder) -> Live[TlsFiles]:
    """The folder's files, for as long as a node runs.

    Raises:
        CredentialsError: see TlsFolder.read.
    """
    return Live(f"TLS files of {folder.path}", folder.stamp, folder.read)
