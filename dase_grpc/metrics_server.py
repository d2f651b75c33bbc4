"""An HTTP server for a small WSGI application, on threads of its own, over TLS where that is asked for."""

import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from dase_grpc.forking import closed_in_forks
from dase_grpc.health import App

PATIENCE_S: Final = 10.0
"""How long a client may take for its handshake, and for each piece of its request."""

Contexts = Callable[[], ssl.SSLContext]
"""The TLS settings of the next connection; asked for each, so that certificates may change."""

log = logging.getLogger("dase")


@contextmanager
def serving(application: App, host: str, port: int, *, tls: Contexts | None = None) -> Iterator[None]:
    """Serves the application while the block runs.

    Raises:
        OSError: it cannot listen there.
    """
    server = _Server(_family(host, port), (host, port), tls)
    server.set_app(application)
    closed_in_forks(server.socket)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Silent(WSGIRequestHandler):
    """Logs no request: a scrape comes every few seconds."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int], tls: Contexts | None) -> None:
        self.address_family = family
        self._tls = tls
        super().__init__(address, _Silent)

    def server_bind(self) -> None:
        """Binds without asking the name service what this host is called, which can take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answers one client, on its own thread: one that is slow to shake hands keeps nobody waiting."""
        request.settimeout(PATIENCE_S)
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        with self._tls().wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or that does not speak TLS or shows no certificate, is none of ours."""
        if isinstance(sys.exception(), OSError):
            log.debug("metrics: %s: %s", client_address[0], sys.exception())
        else:
            super().handle_error(request, client_address)


def _family(host: str, port: int) -> socket.AddressFamily:
    (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return family
