"""What a node says of itself to a probe: whether it lives, and whether it can do its work.

Plain HTTP beside /metrics, so that a probe needs no credentials: gRPC's own health service lies behind the
same TLS as all calls.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

LIVE_PATH: Final = "/healthz"
READY_PATH: Final = "/readyz"

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""A WSGI application."""


class Health:
    """The state of one node, which sets it; probes read it from threads of their own.

    A node lives if its event loop turns; nothing else counts, and no other node, for a node that does not
    live is killed. It is ready while it can do its work: a replay serves, whoever needs a replay has joined.

    Args:
        is_alive: whether the event loop turns; may block for seconds.
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


def probed(app: App, health: Health) -> App:
    """The application with the two paths of the probes: 200 where all is well, else 503."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == LIVE_PATH:
            return _said(start_response, well=health.is_alive(), yes="alive", no="the event loop is stuck")
        if path == READY_PATH:
            return _said(start_response, well=health.is_ready, yes="ready", no="not ready")
        return app(environ, start_response)

    return answer


def _said(start_response: Callable[..., Any], *, well: bool, yes: str, no: str) -> Iterable[bytes]:
    start_response("200 OK" if well else "503 Service Unavailable", [("Content-Type", "text/plain")])
    return [f"{yes if well else no}\n".encode()]
