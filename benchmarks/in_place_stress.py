"""Readers of a small ring that fast writers overwrite all the time: no row that counts may be torn or wrong.

Usage: python benchmarks/in_place_stress.py [--minutes 10] [--writers 4] [--readers 4] [--capacity 4096]
       [--disk]

Writers and readers are processes of their own. A row carries its writer's number of it and a checksum of all
its other bytes. A reader looks at every row that it is given: whether the checksum is right, and whether the
rows of each writer have that writer's numbers in the order in which the ring numbers them, which an older or
a newer row of the same slot would break. Batches that were overwritten before they were read are asked for
again, and come over the stream; their share is printed. The exit code is 1 where a row is wrong, or where
nothing was read in place.
"""

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from measuring import markdown
from replay import replay_process

from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.ring_reader import Numbers, RingReader
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.schema import Array, TransitionSchema

M, N = 348, 17
"""Humanoid's: wide rows take long to copy, and the guard holds few of them."""

SCHEMA: Final = TransitionSchema("stress", M, N, (-1.0,) * N, (1.0,) * N)
BATCH: Final = 256
AHEAD, TOGETHER = 16, 8
BLOCK: Final = 64
DIGITS: Final = 4096
"""A row's number takes two columns, each of so many values, which a float32 holds exactly."""

_NUMBER, _DIGIT, _CHECKSUM = 0, 1, SCHEMA.width - 1
_WEIGHTS: Final = np.random.default_rng(0).integers(2**31, size=SCHEMA.width - 1).astype(np.uint32) * 2 + 1

Words = npt.NDArray[np.uint32]


@dataclass
class Seen:
    """What one reader has seen; `wrong` counts rows."""

    rows: int = 0
    in_place: int = 0
    batches: int = 0
    overwritten: int = 0
    wrong: int = 0

    @classmethod
    def total(cls, each: "Sequence[Seen]") -> "Seen":
        """All readers'."""
        return cls(*(sum(getattr(seen, field.name) for seen in each) for field in fields(cls)))


def block_of(agent_id: int, first: int, rng: np.random.Generator) -> Array:
    """Rows first, first + 1, ... of a writer."""
    rows = SCHEMA.empty(BLOCK)
    rows[:, : SCHEMA.float_width] = rng.standard_normal((BLOCK, SCHEMA.float_width), np.float32)
    numbers = np.arange(first, first + BLOCK)
    rows[:, _NUMBER], rows[:, _DIGIT] = numbers // DIGITS, numbers % DIGITS
    SCHEMA.agent_ids(rows)[:] = agent_id
    rows.view(np.uint32)[:, _CHECKSUM] = checksums(rows)
    return rows


def checksums(rows: Array) -> Words:
    """Of everything but the checksum, (B,)."""
    summed: Words = (rows.view(np.uint32)[:, :-1] * _WEIGHTS).sum(axis=1, dtype=np.uint32)
    return summed


def wrong_rows(rows: Array, numbers: Numbers | None) -> int:
    """How many rows of a batch are not what was stored, or not those of their numbers in the ring."""
    wrong = int(np.count_nonzero(checksums(rows) != rows.view(np.uint32)[:, _CHECKSUM]))
    if numbers is None:
        return wrong
    own = rows[:, _NUMBER].astype(np.int64) * DIGITS + rows[:, _DIGIT].astype(np.int64)
    for agent_id in np.unique(writers := SCHEMA.agent_ids(rows)):
        its = np.flatnonzero(writers == agent_id)
        order = its[np.argsort(numbers[its], kind="stable")]
        apart, apart_own = np.diff(numbers[order]), np.diff(own[order])
        # between two numbers of the ring lie at most as many rows of one writer; the same one is one row
        wrong += int(np.count_nonzero((apart_own < np.minimum(apart, 1)) | (apart_own > apart)))
    return wrong


@dataclass(frozen=True)
class Watched(RingReader):
    """A reader of a ring that looks at every row it gives."""

    seen: Seen

    def gather(self, numbers: Numbers) -> Array | None:
        """See RingReader."""
        rows = super().gather(numbers)
        if rows is not None:
            self.seen.in_place += len(rows)
            self.seen.wrong += wrong_rows(rows, numbers)
        return rows


def write(address: Address, agent_id: int, seconds: float) -> int:
    """Stores rows as fast as they are taken; returns how many."""
    return asyncio.run(_write(address, agent_id, time.monotonic() + seconds))


async def _write(address: Address, agent_id: int, until: float) -> int:
    rng, done = np.random.default_rng(agent_id), 0
    async with open_channel(address) as channel, asyncio.TaskGroup() as tasks:
        inserter = await Inserter(await _joined(channel, address, agent_id), writer_id="stress").open()
        tasks.create_task(inserter.receive())
        while time.monotonic() < until and done < DIGITS**2:
            await inserter.append(block_of(agent_id, done, rng))
            done += BLOCK
        await inserter.finish()
    return done


def read(address: Address, agent_id: int, seconds: float) -> Seen:
    """Takes batches as fast as they come, and looks at every row."""
    return asyncio.run(_read(address, agent_id, time.monotonic() + seconds))


async def _read(address: Address, agent_id: int, until: float) -> Seen:
    seen = Seen()
    async with open_channel(address) as channel:
        target = await _joined(channel, address, agent_id)
        sampler = Sampler(target, batch_size=BATCH, batches_per_frame=TOGETHER, in_place=True)
        await sampler.open(credits=AHEAD)
        while time.monotonic() < until:
            lost = 0
            for _ in range(TOGETHER):
                batch = await sampler.next()
                seen.batches += 1
                seen.rows += len(batch.rows)
                lost += batch.overwritten
                if sampler.ring is not None and type(sampler.ring) is RingReader:
                    sampler.ring = Watched(**vars(sampler.ring), seen=seen)
                elif len(batch.rows):
                    seen.wrong += wrong_rows(batch.rows, None)
            seen.overwritten += lost
            await sampler.grant(TOGETHER - lost, again=lost)
        sampler.cancel()
    return seen


async def _joined(channel: Any, address: Address, agent_id: int) -> StreamTarget:
    """A learner that has joined; nobody else asks for its agent id, so it need not renew its lease."""
    member = await ClusterClient(channel, str(address)).join(
        node_name="stress", schema=SCHEMA, agent_id=agent_id
    )
    return StreamTarget(channel, str(address), member, SCHEMA)


def run(given: argparse.Namespace) -> tuple[int, Seen]:
    """Everything; how many rows were stored, and what was seen of them."""
    seconds = given.minutes * 60
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory())) if given.disk else None
        address, _ = opened.enter_context(replay_process(given.capacity, folder))
        workers = multiprocessing.get_context("spawn").Pool(given.writers + given.readers)
        pool = opened.enter_context(workers)
        jobs = [(address, agent_id, seconds) for agent_id in range(given.writers + given.readers)]
        writing = pool.starmap_async(write, jobs[: given.writers], chunksize=1)
        reading = pool.starmap_async(read, jobs[given.writers :], chunksize=1)
        return sum(writing.get()), Seen.total(reading.get())


def main() -> int:
    """Runs it, and says what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=4_096)
    parser.add_argument("--disk", action="store_true", help="the ring on the disk instead of in memory")
    given = parser.parse_args()
    stored, seen = run(given)
    share = f"{seen.overwritten / max(1, seen.batches):.2%}"
    head = ("rows stored", "rows read", "of these in place", "batches drawn again", "wrong rows")
    told = (f"{stored:,}", f"{seen.rows:,}", f"{seen.in_place:,}", share, str(seen.wrong))
    print(markdown(head, [told]))
    return 1 if seen.wrong or not seen.in_place else 0


if __name__ == "__main__":
    sys.exit(main())
