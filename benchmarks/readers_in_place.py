"""Readers of against_reverb.py: clients of this project's replay that read its ring in place."""

import asyncio
import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Self

from contestants import AHEAD, BATCH, TOGETHER, Ours, taken_from, timed
from measuring import Round, cpu_s

from dase_grpc.errors import DaseError
from dase_grpc.process.ends import keep_freed_memory
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.schema import TransitionSchema


class Readers:
    """Clients of a replay on its own machine that read in place, each a process of its own.

    Each has an agent id that nobody else has: leases end where others take their turns for long, and an id
    that is free goes to whoever comes next, which ends the streams of who had it.
    """

    def __init__(self, ours: Ours, agent_ids: Iterable[int]) -> None:
        self.server_pid = ours.server_pid
        self._given = ours.address, ours.schema
        self._agent_ids = tuple(agent_ids)

    def __enter__(self) -> Self:
        context = get_context("spawn")
        self._pools = [
            ProcessPoolExecutor(1, context, initializer=_begin_reading, initargs=(*self._given, agent_id))
            for agent_id in self._agent_ids
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        for pool in self._pools:
            pool.shutdown()

    def sample(self, seconds: float) -> Round:
        """Takes batches, all at once; the processor seconds of the clients are those of all."""
        for each in [pool.submit(_read_for, 0.0) for pool in self._pools]:
            each.result()  # they have begun, and so have their streams
        before = cpu_s(self.server_pid)
        rounds = [each.result() for each in [pool.submit(_read_for, seconds) for pool in self._pools]]
        return Round(
            sum(each.events for each in rounds),
            max(each.seconds for each in rounds),
            sum(each.client_s for each in rounds),
            cpu_s(self.server_pid) - before,
        )


_reading: tuple[asyncio.Runner, Sampler] | None = None
"""In a process of Readers: its event loop, and its stream."""


def _begin_reading(address: Address, schema: TransitionSchema, agent_id: int) -> None:
    global _reading  # noqa: PLW0603 - what a pool's process begins with has no other place
    keep_freed_memory()
    runner = asyncio.Runner()
    _reading = runner, runner.run(_in_place(address, schema, agent_id))


async def _in_place(address: Address, schema: TransitionSchema, agent_id: int) -> Sampler:
    channel = open_channel(address)
    client = ClusterClient(channel, str(address))
    member = await client.join(node_name="reader", schema=schema, agent_id=agent_id)
    target = StreamTarget(channel, str(address), member, schema)
    sampler = Sampler(target, batch_size=BATCH, batches_per_frame=TOGETHER, in_place=True)
    await sampler.open(credits=AHEAD)
    await taken_from(sampler, 0.0)
    await taken_from(sampler, 0.0)
    if sampler.ring is None:
        raise DaseError("the replay's ring cannot be read in place here")
    return sampler


def _read_for(seconds: float) -> Round:
    assert _reading is not None
    runner, sampler = _reading
    until = time.perf_counter() + seconds
    return timed(lambda: runner.run(taken_from(sampler, until)), os.getpid(), os.getpid())
