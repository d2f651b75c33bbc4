"""A node's metrics endpoint: registry, HTTP server with TLS, /metrics, /healthz and /readyz.

Names carry base units; no series is labelled by run, host or episode. docs/metrics.md lists all.
"""

import logging
import platform
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)

from dase_grpc.errors import AddressError
from dase_grpc.process.ends import closed_in_forks

_LAG_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

PATIENCE_S: Final = 10.0
"""How long a client may take for its handshake, and for each piece of its request."""

Contexts = Callable[[], ssl.SSLContext]
"""The TLS settings of the next connection; asked for each, so that certificates may change."""

log = logging.getLogger("dase")

OTHER_PORT: Final = "choose another metrics port, or 0 for none"
"""What to do where a port is taken."""

LIVE_PATH: Final = "/healthz"
READY_PATH: Final = "/readyz"

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""A WSGI application."""


def make_registry() -> CollectorRegistry:
    """A registry of its own, with what this process is built from and, on Linux, what it takes."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library's signature
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Gauge(
        "dase_build_info", "Constant 1, labelled by version.", ["version", "python"], registry=registry
    ).labels(version("dase-grpc"), platform.python_version()).set(1)
    return registry


def loop_lag(registry: CollectorRegistry) -> Histogram:
    """For how much later than asked an event loop wakes its tasks."""
    return Histogram(
        "dase_event_loop_lag_seconds",
        "How much later than asked the event loop wakes a task; looked at four times a second.",
        buckets=_LAG_SECONDS,
        registry=registry,
    )


class _Silent(WSGIRequestHandler):
    """Logs no request: a scrape comes every few seconds."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, app: App, host: str, port: int, tls: Contexts | None) -> None:
        (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = family
        self._tls = tls
        super().__init__((host, port), _Silent)
        self.set_app(app)

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


class Probes:
    """What one node answers to probes: it sets this, they read it from threads of their own.

    A node lives if its event loop turns (`is_alive`, which may block for seconds); nothing else counts, for
    one that does not live is killed. It is ready while it can do its work: a replay serves, whoever needs a
    replay has joined.
    """

    def __init__(self, is_alive: Callable[[], bool]) -> None:
        self.is_alive = is_alive
        self.is_ready = False

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The node can do its work for as long as the block runs."""
        self.is_ready = True
        try:
            yield
        finally:
            self.is_ready = False


@contextmanager
def metrics_endpoint(
    registry: CollectorRegistry,
    host: str,
    port: int,
    health: Probes | None = None,
    *,
    tls: Contexts | None = None,
    remedy: str = OTHER_PORT,
) -> Iterator[int | None]:
    """Serves /metrics while the block runs; yields the port, or None when `port` is 0 (off).

    With `health` it answers probes at /healthz and /readyz, too; with `tls` it does all that over HTTPS, to
    clients whose certificate it trusts. A port in use is an AddressError, which ends on the remedy.
    """
    if port == 0:
        yield None
        return
    app = make_wsgi_app(registry)
    try:
        server = _Server(app if health is None else _probed(app, health), host, port, tls)
    except OSError as error:
        raise AddressError(f"cannot serve metrics on {host}:{port} ({error.strerror}); {remedy}") from error
    closed_in_forks(server.socket)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _probed(app: App, health: Probes) -> App:
    """The application with the two paths of the probes: 200 where all is well, else 503."""
    probes = {
        LIVE_PATH: (health.is_alive, "alive", "the event loop is stuck"),
        READY_PATH: (lambda: health.is_ready, "ready", "not ready"),
    }

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] not in probes:
            return app(environ, start_response)
        is_well, yes, no = probes[environ["PATH_INFO"]]
        well = is_well()
        start_response("200 OK" if well else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [f"{yes if well else no}\n".encode()]

    return answer
