"""What the Prometheus metrics of every role share, and the endpoint that serves them.

Names carry base units; no series is labelled by run, host or episode. docs/metrics.md lists all.
"""

import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)

from dase_grpc.errors import AddressError
from dase_grpc.health import Health, probed
from dase_grpc.metrics_server import Contexts, serving

MAX_PAIRED_AGENTS: Final = 64
"""Agents below this number have series for each pair of them: 64 x 64 at most."""

_LAG_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


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


@contextmanager
def metrics_endpoint(
    registry: CollectorRegistry,
    host: str,
    port: int,
    health: Health | None = None,
    *,
    tls: Contexts | None = None,
) -> Iterator[int | None]:
    """Serves /metrics while the block runs; yields the port, or None when `port` is 0 (off).

    With `health` it answers probes at /healthz and /readyz, too; with `tls` it does all that over HTTPS, to
    clients whose certificate it trusts.

    Raises:
        AddressError: the port is in use.
    """
    if port == 0:
        yield None
        return
    app = make_wsgi_app(registry)
    if health is not None:
        app = probed(app, health)
    with ExitStack() as served:
        try:
            served.enter_context(serving(app, host, port, tls=tls))
        except OSError as error:
            raise AddressError(
                f"cannot serve metrics on {host}:{port} ({error.strerror}); "
                f"choose another metrics port, or 0 for none"
            ) from error
        yield port
