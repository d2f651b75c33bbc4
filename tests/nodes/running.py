"""Nodes in the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replay.wire.services import LOOPBACK, SCHEMA, promptly

from dase_grpc.nodes import replay
from dase_grpc.nodes.replay import run_replay
from dase_grpc.nodes.replay_options import ReplayOptions
from dase_grpc.replay.buffer.directory import DataDirectory
from dase_grpc.replay.buffer.durable import DurableStore
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.schema import TransitionSchema

OPTIONS = ReplayOptions(run_id="the-run", listen=LOOPBACK, capacity=10_000, min_size=1, seed=7)


@dataclass
class RunningReplay:
    """A replay node, its address, and the two ways to end it."""

    address: Address
    stop: asyncio.Event
    ended: "asyncio.Task[None]"

    async def end(self) -> None:
        """Asks it to stop; returns when it has, which must not take long."""
        self.stop.set()
        await promptly(self.ended)


@asynccontextmanager
async def replay_node(**changes: Any) -> AsyncIterator[RunningReplay]:
    """A replay node on a free port; `changes` are options."""
    stop, found = asyncio.Event(), asyncio.get_running_loop().create_future()
    node = asyncio.ensure_future(run_replay(replace(OPTIONS, **changes), stop, found.set_result))
    await asyncio.wait({node, found}, return_when=asyncio.FIRST_COMPLETED)
    if node.done():
        node.result()
    running = RunningReplay(await found, stop, node)
    try:
        yield running
    finally:
        await running.end()


@asynccontextmanager
async def in_this_loop(run: Callable[..., Coroutine[Any, Any, Any]], options: Any) -> AsyncIterator[Any]:
    """A node in this event loop: its task and the event that stops it; it has ended with the block."""
    stop = asyncio.Event()
    task = asyncio.ensure_future(run(options, stop))
    try:
        yield task, stop
    finally:
        stop.set()
        await promptly(asyncio.gather(task, return_exceptions=True))


async def ended(task: "asyncio.Task[Any]", stop: asyncio.Event) -> Any:
    """What a node gives that is told to stop."""
    stop.set()
    return await promptly(task)


@contextmanager
def store_at(path: Path, boot_id: str | None = None) -> Iterator[DurableStore]:
    """The buffer in a directory that no replay holds."""
    with closing(DataDirectory.open(path)) as directory:
        store = DurableStore.open(directory, directory.identity(), boot_id=boot_id or replay.boot_id())
        yield store
        store.abandon()


@asynccontextmanager
async def joined(
    address: Address, *, agent_id: int = 0, schema: TransitionSchema = SCHEMA
) -> AsyncIterator[StreamTarget]:
    """What a new member's streams connect to."""
    async with open_channel(address) as channel:
        client = ClusterClient(channel, str(address))
        member = await client.join(node_name="test", schema=schema, agent_id=agent_id)
        yield StreamTarget(channel, str(address), member, schema)
