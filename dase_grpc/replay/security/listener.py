"""A listener's side of security: its certificate, renewed while it listens, and the door behind it."""

import time
from collections.abc import Callable
from pathlib import Path

import grpc

from dase_grpc.errors import CredentialsError
from dase_grpc.progress import several
from dase_grpc.replay.security.door import Denial, Door, Handshakes, from_certificate, from_token
from dase_grpc.replay.security.folders import Live, TlsFiles, TlsFolder, live_files
from dase_grpc.replay.security.selfcheck import require_accepted
from dase_grpc.replay.security.tokens import Secret, TokenBook, live_secrets


class Entrance:
    """How a service lets callers in: by client certificates or, where it has tokens, by tokens alone.

    Reads its files at once, and again when they change: those of TLS at each new connection, tokens when
    `look` is called.

    Args:
        tls: the folder with ca.crt, tls.crt and tls.key.
        tokens: a file or folder of tokens (replay/security/tokens.py); clients then show no certificates.
        clock: monotonic seconds.
        wall_clock: Unix seconds, which tokens are compared with.

    Raises:
        CredentialsError: the files cannot be used.
    """

    def __init__(
        self,
        tls: Path,
        tokens: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._files = live_files(TlsFolder(tls))
        require_accepted(self._files.value, where=tls, as_server=True)
        self._secrets: Live[list[Secret]] | None = None if tokens is None else live_secrets(tokens)
        self._book = TokenBook(self._secrets.value if self._secrets else [], clock=wall_clock)
        self._handshakes = Handshakes(clock=clock)
        self.door = Door(
            from_token(self._book) if self._secrets else from_certificate,
            clock=clock,
            handshakes=self._handshakes,
        )

    @property
    def denied(self) -> dict[str, int]:
        """How often callers were refused, by reason."""
        return dict(self.door.denied)

    def credentials(self) -> grpc.ServerCredentials:
        """What a port is bound with."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(self._files.value),
            self._renewed,  # type: ignore[arg-type]  # the stubs do not know that None means: as before
            require_client_authentication=self._secrets is None,
        )

    def look(self) -> None:
        """Takes tokens that have changed into use, and counts connections that came to nothing."""
        if self._secrets is not None and self._secrets.refresh():
            self._book.replace(self._secrets.value)
        if count := self._handshakes.failed():
            self.door.deny(
                Denial.HANDSHAKE,
                f"of {several(count, 'connection')} no call came: no TLS, no certificate, one of "
                f"another authority, or "
                f"an expired one (start with GRPC_VERBOSITY=INFO to see which)",
                "unknown callers",
                count=count,
            )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC asks for, on a thread of its own, at each connection; None means: as before."""
        self._handshakes.begun()
        return self._configuration(self._files.value) if self._files.refresh() else None

    def _configuration(self, files: TlsFiles) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(files.key, files.certificate)],
            root_certificates=files.authority if self._secrets is None else None,
        )


def entrance(tls: Path | None, tokens: Path | None) -> Entrance | None:
    """What a listener was told on its command line; None where it was told neither.

    Raises:
        CredentialsError: tokens without TLS, or files that cannot be used.
    """
    if tls is None and tokens is not None:
        raise CredentialsError(
            "--tokens needs --tls, so that nobody on the way can read them or pass for the replay"
        )
    return None if tls is None else Entrance(tls, tokens)
