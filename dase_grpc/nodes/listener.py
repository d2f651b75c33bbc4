"""Listener: what nodes that others call have around their servicers: door, port, health, an end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from prometheus_client import CollectorRegistry

from dase_grpc.errors import AddressError
from dase_grpc.metrics.calls import DoorState
from dase_grpc.metrics.endpoint import Contexts, Probes, metrics_endpoint
from dase_grpc.nodes.options import ServiceOptions
from dase_grpc.process.lifecycle import READY_PREFIX, run_node
from dase_grpc.process.tasks import loop_turns
from dase_grpc.replay.security.door import Door, door_of
from dase_grpc.replay.service.server import Server, add_standard, bind, require_bindable
from dase_grpc.replay.service.streams import calls_ended
from dase_grpc.replay.wire.addresses import Address, require_private

DOOR_LOOK_S: Final = 1.0

Options = TypeVar("Options", bound=ServiceOptions)

Announce = Callable[[Address], None]
"""Called with the real address once the service answers."""


@dataclass(frozen=True)
class Listener(Generic[Options]):
    """Where a node listens, and whom it lets in."""

    options: Options
    door: Door | None
    metrics_tls: Contexts | None

    @classmethod
    def of(cls, options: Options) -> "Listener[Options]":
        """As options say; opens nothing.

        Raises:
            AddressError: an address is not private and neither TLS nor `insecure` is set.
            CredentialsError: a file of credentials cannot be used.
        """
        door = door_of(options.tls, options.tokens, options.crl)
        if door is None:
            require_private(options.listen, insecure=options.insecure)
        return Listener(options, door, options.metrics_contexts())

    def require_free(self) -> None:
        """Checks that its ports can be had, for whoever has much to load first. AddressError where not."""
        options = self.options
        require_bindable(options.listen)
        with metrics_endpoint(CollectorRegistry(), options.metrics_host, options.metrics_port):
            pass

    @asynccontextmanager
    async def serving(
        self,
        server: Server,
        services: Collection[str],
        registry: CollectorRegistry,
        *,
        announce: Announce,
        drain: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[None]:
        """The server answers within the block, and so does the Prometheus endpoint.

        After it health says so first, then `drain` ends what would not end by itself, and open calls have the
        grace to. AddressError if an address is in use.
        """
        options, door = self.options, self.door
        health, probes = add_standard(server, services), Probes(loop_turns())
        where = options.metrics_host, options.metrics_port
        with metrics_endpoint(registry, *where, probes, tls=self.metrics_tls):
            address = bind(server, options.listen, door.credentials() if door else None)
            try:
                await server.start()
                await health.serving(services)
                announce(address)
                with probes.ready():
                    yield
            finally:
                await health.enter_graceful_shutdown()
                drain()
                await server.stop(options.grace_s)

    def door_state(self) -> DoorState:
        """How often callers were refused, and the state of the revocation lists; for any thread."""
        return DoorState() if self.door is None else self.door.state

    async def watch_door(self) -> None:
        """Looks at the door again and again, until cancelled; returns where there is none."""
        while self.door is not None:
            self.door.look()
            await asyncio.sleep(DOOR_LOOK_S)


def listener_main(
    name: str, run: Callable[[asyncio.Event, Announce], Awaitable[None]], about: str, *, stdin_is_leash: bool
) -> int:
    """Runs a node that listens as a process; prints its address on stdout once it answers, logs `about`."""

    def announce(address: Address) -> None:
        try:
            print(f"{READY_PREFIX}{address}", flush=True)  # noqa: T201 - scripts and launchers read it
        except OSError as error:
            raise AddressError(f"cannot tell the address on stdout: {error.strerror or error}") from error
        logging.getLogger("dase").info("%s", about)

    async def main(stop: asyncio.Event) -> None:
        try:
            await run(stop, announce)
        finally:
            await calls_ended()

    return run_node(name, main, stdin_is_leash=stdin_is_leash)
