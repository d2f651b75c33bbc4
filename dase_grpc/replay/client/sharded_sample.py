"""Batches put together from several shards: uniform over all their transitions together."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np

from dase_grpc.errors import Halted
from dase_grpc.process.tasks import first_cause
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.connection import Connection, Shards, Stream
from dase_grpc.replay.client.sample import BatchQueue, SampledBatch, Sampler
from dase_grpc.schema import Array

LOOK_S: Final = 0.25
"""How often it is looked whether a shard has fallen silent, or batches can be drawn at last."""


class ShardedFetcher:
    """Fills a BatchQueue over one Sample stream for each shard.

    How many of a batch's rows come from each shard is drawn from a multinomial over how many transitions
    each was last heard to hold, which is as old as its latest heartbeat or batch. A shard draws its rows
    uniformly, so every transition of the union is as likely to be a row as any other. Rows lie in a batch in
    the order in which they arrived: losses and weights are sums over a batch, so that means nothing.

    A shard that is away counts as empty. The rows that it still owed are drawn anew from the others, as if
    it had been empty when they were first drawn.
    """

    def __init__(
        self,
        shards: Shards,
        queue: BatchQueue,
        *,
        batch_size: int,
        own_rows_only: bool,
        rng: np.random.Generator,
    ) -> None:
        target = shards.first.target
        self._shards = shards
        self._parts = [_Part(each, own_rows_only=own_rows_only) for each in shards.connections]
        self._queue = queue
        self._batch_shape = (batch_size, target.schema.width)
        self._own_rows_only = own_rows_only
        self._rng = rng
        self._min_size = target.member.min_size
        self._granted = 0
        self._to_draw: deque[tuple[_Filling, int]] = deque()
        self._waiting: str | None = None

    @property
    def waiting(self) -> str | None:
        """See OneFetcher."""
        return self._waiting

    async def run(self) -> None:
        """See OneFetcher."""
        with first_cause():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_drawing())
                for part in self._parts:
                    tasks.create_task(part.connection.keep(Stream.SAMPLE, partial(self._fetch, part)))

    async def _keep_drawing(self) -> None:
        while True:
            await self._queue.asked.wait()
            self._queue.moved.clear()
            for part in self._parts:
                part.drop_if_silent()
            self._draw()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._queue.moved.wait()

    def _draw(self) -> None:
        """Asks the shards for the rows of batches that are due, and for those that one of them owes."""
        due = self._queue.due(self._granted)
        self._granted += due
        self._to_draw.extend((_Filling(self._batch_shape), self._batch_shape[0]) for _ in range(due))
        sizes = [part.drawable for part in self._parts]
        self._waiting = self._shortage(sizes)
        if self._waiting is not None or not sum(sizes):
            return
        while self._to_draw:
            filling, rows = self._to_draw.popleft()
            for part, count in zip(self._parts, split(rows, sizes, self._rng), strict=True):
                if count:
                    part.ask(filling, count)

    def _shortage(self, sizes: list[int]) -> str | None:
        """What a batch has to wait for; a shard that is away counts with what it last held."""
        held = self._shards.buffer_size
        if held < self._min_size:
            more = f"{self._min_size - held} more transitions ({held} of {self._min_size})"
            return f"waiting for {more} in {len(self._parts)} shards"
        if self._own_rows_only and not sum(sizes) and all(part.serves for part in self._parts):
            agent_id = self._shards.first.target.member.agent_id
            return f"waiting for a transition of agent {agent_id} ({held} of others are present)"
        return None

    async def _fetch(self, part: "_Part", target: StreamTarget) -> None:
        sampler = Sampler(target, batch_size=self._batch_shape[0], own_rows_only=self._own_rows_only)
        try:
            await sampler.open(credits=0)
            part.connection.up(Stream.SAMPLE)
            part.sampler = sampler
            self._queue.moved.set()
            async with asyncio.TaskGroup() as tasks:
                asking = tasks.create_task(part.keep_asking(sampler))
                with suppress(Halted):
                    while True:
                        self._take(part, await sampler.next())
                asking.cancel()
        finally:
            sampler.cancel()
            self._to_draw.extend(part.end())
            self._queue.moved.set()

    def _take(self, part: "_Part", batch: SampledBatch) -> None:
        """Takes the rows that a shard has sent, which are as many as it was asked for, or none."""
        filling, count = part.received(batch)
        if not len(batch.rows):
            self._to_draw.append((filling, count))
            self._queue.moved.set()
        elif (whole := filling.add(batch.rows)) is not None:
            self._queue.put(whole, self._shards.buffer_size)


class _Filling:
    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._rows: Array | None = None
        self._filled = 0

    def add(self, rows: Array) -> Array | None:
        """Takes (N, width) rows; returns the batch once it is full, read-only."""
        if len(rows) == self._shape[0]:
            return rows
        if self._rows is None:
            self._rows = np.empty(self._shape, np.float32)
        self._rows[self._filled : self._filled + len(rows)] = rows
        self._filled += len(rows)
        if self._filled < self._shape[0]:
            return None
        self._rows.flags.writeable = False
        return self._rows


class _Part:
    """One shard: its stream while it is open, and what it was asked for, in order."""

    def __init__(self, connection: Connection, *, own_rows_only: bool) -> None:
        self.connection = connection
        self.sampler: Sampler | None = None
        self._own_rows_only = own_rows_only
        self._owed: deque[tuple[_Filling, int]] = deque()
        self._sizes: list[int] = []
        self._asked = asyncio.Event()
        self._heard = connection.buffer
        self._known = 0 if own_rows_only else connection.buffer_size

    @property
    def serves(self) -> bool:
        """Whether it can be asked for rows."""
        return self.sampler is not None and self.connection.away is None

    @property
    def drawable(self) -> int:
        """Transitions that it can draw from, as last heard; 0 while it is away."""
        return self._last_heard() if self.serves else 0

    def ask(self, filling: _Filling, count: int) -> None:
        """Has `keep_asking` ask for some rows of a batch."""
        self._owed.append((filling, count))
        self._sizes.append(count)
        self._asked.set()

    async def keep_asking(self, sampler: Sampler) -> None:
        """Sends what is asked for, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            sizes, self._sizes = self._sizes, []
            await sampler.ask(sizes)

    def received(self, batch: SampledBatch) -> tuple[_Filling, int]:
        """Notes that rows have come; which batch they are of, and how many were asked for."""
        self._heard, self._known = self.connection.buffer, batch.drawn_from
        self.connection.buffer_size = batch.buffer_size
        return self._owed.popleft()

    def drop_if_silent(self) -> None:
        """Ends the stream of a shard that owes rows and does not answer."""
        if self._owed and self.sampler is not None and self.connection.away is not None:
            self.sampler.cancel()

    def end(self) -> deque[tuple[_Filling, int]]:
        """Notes that the stream has ended; what it still owed."""
        owed, self._owed = self._owed, deque()
        self.sampler, self._sizes = None, []
        self._asked.clear()
        return owed

    def _last_heard(self) -> int:
        state = self.connection.buffer
        if state is not self._heard:
            agent_id = self.connection.target.member.agent_id
            self._heard = state
            self._known = state.size_by_agent[agent_id] if self._own_rows_only else state.size
        return self._known


def split(rows: int, sizes: Sequence[int], rng: np.random.Generator) -> list[int]:
    """How many of `rows` independent uniform draws from a union fall on each part, of these sizes.

    Multinomial. Drawn as whole numbers, so that a part of size 0 gets none, whatever is rounded where. Not
    all parts may be empty.
    """
    ends = np.cumsum(sizes)
    drawn = np.searchsorted(ends, rng.integers(ends[-1], size=rows), side="right")
    counts: list[int] = np.bincount(drawn, minlength=len(sizes)).tolist()
    return counts
