"""Policy servers in the test's own event loop, and clients on threads beside it."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from inference.policies import ABOUT, HeldPolicy, policy_threads
from patience import PATIENCE_S
from replay.wire.services import LOOPBACK, free_port, promptly

from dase_grpc.inference.client import PolicyClient
from dase_grpc.launch.serve import ServedPolicy, run_policy
from dase_grpc.nodes.listener import Listener
from dase_grpc.nodes.policy_options import PolicyOptions
from dase_grpc.process.tasks import first_cause
from dase_grpc.replay.wire.addresses import Address


@dataclass
class RunningServer:
    """A policy server, its address, and the two ways to end it."""

    address: Address
    metrics_port: int
    policy: HeldPolicy
    stop: asyncio.Event
    ended: "asyncio.Task[None]"

    async def end(self) -> None:
        """Asks it to stop; returns when it has, which must not take long."""
        self.stop.set()
        await promptly(self.ended)

    async def shows(self, path: str = "metrics") -> str:
        """What its HTTP endpoint answers."""
        return str(await called(fetched, f"http://127.0.0.1:{self.metrics_port}/{path}"))

    async def until_waiting(self, count: int) -> None:
        """Returns as soon as so many observations wait in it."""
        async with asyncio.timeout(PATIENCE_S):
            while (
                f"dase_inference_queued_observations {float(count)}" not in (await self.shows()).splitlines()
            ):
                pass


@asynccontextmanager
async def policy_server(served: ServedPolicy | None = None, **changes: Any) -> AsyncIterator[RunningServer]:
    """A policy server on a free port, of a HeldPolicy where no other is given; `changes` are options."""
    stop, found, policy = asyncio.Event(), asyncio.get_running_loop().create_future(), HeldPolicy()
    options = PolicyOptions(**{"listen": LOOPBACK, "metrics_port": free_port(), **changes})
    run = run_policy(Listener.of(options), served or ServedPolicy(policy, ABOUT), stop, found.set_result)
    node = asyncio.ensure_future(run)
    await asyncio.wait({node, found}, return_when=asyncio.FIRST_COMPLETED)
    if node.done():
        with first_cause():
            node.result()
    running = RunningServer(await found, options.metrics_port, policy, stop, node)
    try:
        yield running
    finally:
        await running.end()
    assert policy_threads() == []


async def called(what: Callable[..., Any], *given: Any) -> Any:
    """What a client's call on a thread of its own gives; it must not hang."""
    return await promptly(asyncio.to_thread(what, *given))


def client_of(server: RunningServer, **more: Any) -> PolicyClient:
    """A client of a server in this loop."""
    return PolicyClient(str(server.address), **more)


def fetched(url: str) -> str:
    """What an HTTP server answers."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())
