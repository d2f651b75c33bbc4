"""Batches put together from several shards: drawn as if all their transitions lay in one."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from dase_grpc.errors import Halted
from dase_grpc.process.tasks import first_cause
from dase_grpc.replay.buffer.priorities import Chances
from dase_grpc.replay.buffer.sampling import Sampling
from dase_grpc.replay.buffer.shares import OWN, own_counts
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.priorities import Drawing, Prioritised, Told
from dase_grpc.replay.client.sample import BatchQueue, SampledBatch, Sampler
from dase_grpc.replay.client.shards import Shards
from dase_grpc.schema import Array

Counts = tuple[int, ...]
"""Rows of each side that is drawn from by itself: all, or with an own share the agent's own, and others'."""

LOOK_S: Final = 0.25
"""How often it is looked whether a shard has fallen silent, or batches can be drawn at last."""


class ShardedFetcher:
    """Fills a BatchQueue over one Sample stream for each shard.

    How many of a batch's rows come from each shard is drawn from a multinomial over how many transitions
    each was last heard to hold, which is as old as its latest heartbeat or batch. A shard draws its rows
    uniformly, so every transition of the union is as likely to be a row as any other. With an own share this
    holds for the agent's own transitions and for all others', each by itself. Rows lie in a batch in the
    order in which they arrived: losses and weights are sums over a batch, so that means nothing.

    A shard that is away counts as empty. The rows that it still owed are drawn anew from the others, as if
    it had been empty when they were first drawn. So are rows that had been overwritten when they were read in
    place.
    """

    def __init__(
        self,
        shards: Shards,
        queue: BatchQueue,
        *,
        batch_size: int,
        sampling: Sampling,
        rng: np.random.Generator,
        in_place: bool = False,
    ) -> None:
        target = shards.first.target
        self._shards = shards
        self._parts = [_Part(each, sampling) for each in shards.connections]
        self._queue = queue
        self._batch_shape = (batch_size, target.schema.width)
        self._sampling = sampling
        self._rng = rng
        self._in_place = in_place
        self.overwritten = 0
        self._min_size = target.member.min_size
        self._granted = 0
        self._to_draw: deque[tuple[_Filling, Counts]] = deque()
        self._waiting: str | None = None

    @property
    def waiting(self) -> str | None:
        """See OneFetcher."""
        return self._waiting

    @property
    def reads_in_place(self) -> bool:
        """Whether rows of every shard that serves are read from its own ring now."""
        samplers = [part.sampler for part in self._parts if part.sampler is not None]
        return bool(samplers) and all(each.ring is not None for each in samplers)

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
        self._to_draw.extend((_Filling(self._batch_shape), self._counts()) for _ in range(due))
        sides = list(zip(*(part.drawable for part in self._parts), strict=True))
        drawable = sum(map(sum, sides))
        self._waiting = self._shortage(drawable)
        if self._waiting is not None or not drawable:
            return
        shares = [self._shares(side, sizes) if any(sizes) else None for side, sizes in enumerate(sides)]
        while self._to_draw:
            filling, wanted = self._to_draw.popleft()
            counts = wanted if all(map(any, sides)) else _filled_in(wanted, sides)
            asked = [
                [0] * len(sizes) if not count else split(count, sizes, self._rng, shares=share)
                for count, sizes, share in zip(counts, sides, shares, strict=True)
            ]
            for index, (part, count) in enumerate(zip(self._parts, zip(*asked, strict=True), strict=True)):
                if any(count):
                    scales = [
                        sum(sizes) * share[index] if share is not None else 0.0
                        for sizes, share in zip(sides, shares, strict=True)
                    ]
                    part.ask(filling, count, scales)

    def _shares(self, side: int, sizes: Sequence[int]) -> Chances | None:
        """How likely a draw by priorities is to be from each shard; None where draws are uniform."""
        if (how := self._sampling.prioritisation) is None:
            return None
        told = [part.means[side] if part.means else None for part in self._parts]
        known = [mean for mean in told if mean is not None]
        usual = sum(known) / len(known) if known else 1.0
        means = [usual if mean is None else mean for mean in told]
        masses, counts = np.array(sizes) * np.array(means), np.array(sizes)
        shares: Chances = (1 - how.uniform) * masses / masses.sum() + how.uniform * counts / counts.sum()
        return shares

    def _counts(self) -> Counts:
        """How many rows of each side a batch has."""
        rows, share = self._batch_shape[0], self._sampling.own_share
        if share is None:
            return (rows,)
        own = int(own_counts(share, 1, rows, self._rng)[0])
        return own, rows - own

    def _shortage(self, drawable: int) -> str | None:
        """What a batch has to wait for; a shard that is away counts with what it last held."""
        held = self._shards.buffer_size
        if held < self._min_size:
            more = f"{self._min_size - held} more transitions ({held} of {self._min_size})"
            return f"waiting for {more} in {len(self._parts)} shards"
        if self._sampling.own_rows_only and not drawable and all(part.serves for part in self._parts):
            agent_id = self._shards.first.target.member.agent_id
            return f"waiting for a transition of agent {agent_id} ({held} of others are present)"
        return None

    async def _fetch(self, part: "_Part", target: StreamTarget) -> None:
        sampler = Sampler(
            target, batch_size=self._batch_shape[0], sampling=self._sampling, in_place=self._in_place
        )
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
        filling, count, scales = part.received(batch)
        if not len(batch.rows):
            self.overwritten += batch.overwritten
            self._to_draw.append((filling, count))
            self._queue.moved.set()
            return
        if batch.drawing is not None:
            filling.drawn.append((batch.drawing, part.told))
            own = part.own(batch.rows)
            filling.likelihood.append(batch.drawing.likelihood(own, scales))
        if (whole := filling.add(batch.rows)) is not None:
            prioritised = filling.prioritised(ignored=sum(each.ignored for each in self._parts))
            self._queue.put(whole, self._shards.buffer_size, prioritised)


class _Filling:
    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._rows: Array | None = None
        self._filled = 0
        self.drawn: list[tuple[Drawing, Told]] = []
        self.likelihood: list[Array] = []

    def prioritised(self, *, ignored: int) -> Prioritised | None:
        """How it was drawn, if that was by priorities; `ignored` are those told in vain to all shards."""
        if not self.drawn:
            return None
        return Prioritised.of(self.drawn, np.concatenate(self.likelihood), ignored=ignored)

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

    def __init__(self, connection: Connection, sampling: Sampling) -> None:
        self.connection = connection
        self.sampler: Sampler | None = None
        self._sampling = sampling
        self._owed: deque[tuple[_Filling, Counts, Sequence[float]]] = deque()
        self.told: Told = deque()
        self.means: tuple[float | None, ...] = ()  # of each side's masses, None of an empty one
        self.ignored = 0
        self._counts: list[Counts] = []
        self._asked = asyncio.Event()
        self._heard = connection.buffer
        self._known = self._sides(connection.buffer_size, 0)
        if sampling.own_share is not None:  # nothing is known of its sides before the first heartbeat
            self._known = (0, 0)

    @property
    def serves(self) -> bool:
        """Whether it can be asked for rows."""
        return self.sampler is not None and self.connection.away is None

    @property
    def drawable(self) -> Counts:
        """Transitions of each side that it can draw from, as last heard; 0 while it is away."""
        known = self._last_heard()
        return known if self.serves else (0,) * len(known)

    def own(self, rows: Array) -> npt.NDArray[np.bool_]:
        """Which of the rows are the agent's own."""
        target = self.connection.target
        own: npt.NDArray[np.bool_] = target.schema.agent_ids(rows) == target.member.agent_id
        return own

    def ask(self, filling: _Filling, count: Counts, scales: Sequence[float]) -> None:
        """Has `keep_asking` ask for some rows of a batch, so many of each side; for scales see Drawing."""
        self._owed.append((filling, count, scales))
        self._counts.append(count)
        self._asked.set()

    async def keep_asking(self, sampler: Sampler) -> None:
        """Sends what is asked for, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            counts, self._counts = self._counts, []
            own = [] if self._sampling.own_share is None else [each[OWN] for each in counts]
            sizes = [sum(each) for each in counts]
            await sampler.tell(self.told)
            await sampler.ask(sizes, own_rows=own)

    def received(self, batch: SampledBatch) -> tuple[_Filling, Counts, Sequence[float]]:
        """Notes that rows have come; what `ask` was given for them."""
        if batch.drawing is not None:
            self.means = tuple(
                side.mass / side.present if side.present else None for side in batch.drawing.sides
            )
            self.ignored = batch.drawing.ignored
        self._heard = self.connection.buffer
        self._known = self._sides(batch.buffer_size, batch.drawn_from)
        self.connection.buffer_size = batch.buffer_size
        return self._owed.popleft()

    def drop_if_silent(self) -> None:
        """Ends the stream of a shard that owes rows and does not answer."""
        if self._owed and self.sampler is not None and self.connection.away is not None:
            self.sampler.cancel()

    def end(self) -> deque[tuple[_Filling, Counts]]:
        """Notes that the stream has ended; what it still owed."""
        owed, self._owed = deque((filling, count) for filling, count, _ in self._owed), deque()
        self.sampler, self._counts = None, []
        self._asked.clear()
        return owed

    def _last_heard(self) -> Counts:
        state = self.connection.buffer
        if state is not self._heard:
            self._heard = state
            own = state.size_by_agent[self.connection.target.member.agent_id]
            self._known = self._sides(state.size, own)
        return self._known

    def _sides(self, size: int, own: int) -> Counts:
        if self._sampling.own_share is not None:
            return own, size - own
        return (own if self._sampling.own_rows_only else size,)


def _filled_in(counts: Counts, sides: Sequence[Sequence[int]]) -> Counts:
    """Rows of each side where one is empty: the other's fill in."""
    return tuple(sum(counts) if any(sizes) else 0 for sizes in sides)


def split(
    rows: int, sizes: Sequence[int], rng: np.random.Generator, *, shares: Chances | None = None
) -> list[int]:
    """How many of `rows` independent draws from a union fall on each part, of these sizes.

    Multinomial; uniform, or with `shares` as likely as they say. Drawn as whole numbers, so that a part of
    size 0 gets none, whatever is rounded where. Not all parts may be empty.
    """
    if shares is not None:
        drawn_by: list[int] = rng.multinomial(rows, shares).tolist()
        return drawn_by
    ends = np.cumsum(sizes)
    drawn = np.searchsorted(ends, rng.integers(ends[-1], size=rows), side="right")
    counts: list[int] = np.bincount(drawn, minlength=len(sizes)).tolist()
    return counts
