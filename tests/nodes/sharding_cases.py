"""Shards in the test's own event loop, and a learner's link to all of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
from replay.wire.services import Service, eventually, promptly, rows_of, serving

from dase_grpc.progress import Progress
from dase_grpc.replay.buffer.sharding import Shard
from dase_grpc.replay.client.handoff import Times
from dase_grpc.replay.client.link import ReplayLink
from dase_grpc.replay.client.membership import LearnerConnection
from dase_grpc.replay.client.shards import Shards

PATIENT_S = 60.0


@asynccontextmanager
async def shards_serving(count: int, **options: Any) -> AsyncIterator[list[Service]]:
    """The services of a sharded replay."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(serving(shard=Shard(index, count), **options))
            for index in range(count)
        ]


async def connections_to(services: list[Service], *, agent_id: int = 0, **options: Any) -> Shards:
    """An agent that has joined each shard."""
    options = {"timeout_s": PATIENT_S, "timing": Times(beat_s=0.01), **options}
    return Shards([LearnerConnection(await each.target(agent_id), **options) for each in services])


def link_over(shards: Shards, *, batch_size: int = 8, prefetch: int = 2, **options: Any) -> ReplayLink:
    return ReplayLink(
        shards,
        batch_size=batch_size,
        prefetch=prefetch,
        writer_id="w",
        rng=np.random.default_rng(5),
        **options,
    )


@asynccontextmanager
async def running(link: ReplayLink, shards: Shards) -> AsyncIterator[dict[str, "asyncio.Task[None]"]]:
    """Runs the link's streams and the heartbeats, which end with the block."""
    async with asyncio.TaskGroup() as tasks:
        jobs = {
            "insert": tasks.create_task(link.insert_rows()),
            "sample": tasks.create_task(link.fetch_batches()),
            "heartbeat": tasks.create_task(shards.heartbeats(Progress)),
        }
        try:
            yield jobs
        finally:
            link.close()
            for job in jobs.values():
                job.cancel()


async def all_serve(link: ReplayLink) -> None:
    """Returns once batches are drawn from every shard, and not only from those whose streams opened first."""
    parts = getattr(link._fetcher, "_parts", ())  # one service alone is not passed over
    await eventually(lambda: all(part.serves for part in parts))


async def rows_until_each_has_one(link: ReplayLink, services: list[Service]) -> int:
    """Stores rows one by one until every shard's stream carries some; how many those were."""
    count = 0
    while not all(each.stored() for each in services):
        count += 1
        await store(link, rows_of(count, count))
        await eventually(lambda: link.unacknowledged == 0)
    return count


async def take(link: ReplayLink, count: int) -> list[np.ndarray]:
    """The next batches."""
    return [(await promptly(asyncio.to_thread(link.next)))[0] for _ in range(count)]


async def store(link: ReplayLink, rows: np.ndarray) -> None:
    await asyncio.to_thread(lambda: [link.store(row) for row in rows])
