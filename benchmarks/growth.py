"""How the replay's cost grows: with learners, buffer size, width of an observation, and batch size.

python benchmarks/growth.py [--turns 3] [--seconds 1] [--results FILE.csv]
python benchmarks/growth.py --quick
python benchmarks/growth.py --show FILE.csv

Every point has a replay node of its own; all are up at once and take turns. Unless it is what grows: one
client, narrow transitions (17 observation and 6 action components), 10,000 in the buffer, batches of 256.
Learners are light ones: each has a lease that it renews, takes batches as fast as they come, and stores 16
transitions for each. All of them share one process, so look at the server's processor time for each batch.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

import numpy as np
from contestants import BATCH, Ours, timed
from measuring import TASKS, Entry, Figure, Round, answer, conditions, markdown, median, take_turns, values
from replay import random_rows, replay_process

from dase_grpc.process.ends import keep_freed_memory
from dase_grpc.progress import Progress
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.schema import TransitionSchema

LEARNERS: Final = (1, 2, 4, 8, 16, 32, 64)
BUFFERS: Final = (10_000, 100_000, 1_000_000, 10_000_000)
WIDTHS: Final = (4, 16, 64, 256, 1024, 4096)
BATCHES: Final = (64, 256, 1024, 4096)
QUICK: Final[Mapping[str, Sequence[int]]] = {
    "learners": (1, 3),
    "transitions in the buffer": (1_000, 2_000),
    "observation components": (4, 16),
    "batch size": (16, 64),
}
FULL: Final[Mapping[str, Sequence[int]]] = {
    "learners": LEARNERS,
    "transitions in the buffer": BUFFERS,
    "observation components": WIDTHS,
    "batch size": BATCHES,
}
HELD: Final = 10_000
PREFETCHED: Final = 2
STORED_A_BATCH: Final = 16
HEARTBEAT_S: Final = 1.0
WHAT: Final = "batches/s"


class Learners:
    """A replay node and light learners of it, on an event loop that runs during rounds only."""

    def __init__(self, runner: asyncio.Runner, count: int) -> None:
        m, n = TASKS["narrow"]
        self._schema = TransitionSchema("benchmark", m, n, (-1.0,) * n, (1.0,) * n)
        self._count = count
        self._process = replay_process(HELD, None)
        self._runner = runner

    def __enter__(self) -> Self:
        self._address, server = self._process.__enter__()
        self._server_pid = server.pid
        self._runner.run(self._join())
        return self

    def __exit__(self, *error: Any) -> None:
        self._runner.run(self._channel.close())
        self._process.__exit__(None, None, None)

    def sample(self, seconds: float) -> Round:
        """Lets all of them take batches and store transitions; counts batches."""
        work = self._all(time.perf_counter() + seconds)
        return timed(lambda: self._runner.run(work), os.getpid(), self._server_pid)

    async def _join(self) -> None:
        self._channel = open_channel(self._address)
        self._cluster = ClusterClient(self._channel, str(self._address))
        self._targets = [
            StreamTarget(
                self._channel,
                str(self._address),
                await self._cluster.join(node_name=f"light-{index}", schema=self._schema, agent_id=index),
                self._schema,
            )
            for index in range(self._count)
        ]
        self._rounds = 0
        await self._store(self._targets[0], HELD, writer="fill")

    async def _store(self, target: StreamTarget, count: int, *, writer: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            inserter = await Inserter(target, writer_id=writer).open()
            tasks.create_task(inserter.receive())
            await inserter.append(random_rows(self._schema, count, target.member.agent_id))
            await inserter.finish()

    async def _all(self, until: float) -> int:
        self._rounds += 1
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(self._one(target, until)) for target in self._targets]
        return sum(each.result() for each in working)

    async def _one(self, target: StreamTarget, until: float) -> int:
        rows = random_rows(self._schema, STORED_A_BATCH, target.member.agent_id)
        sampler = await Sampler(target, batch_size=BATCH).open(credits=PREFETCHED)
        inserter = await Inserter(target, writer_id=f"round-{self._rounds}").open()
        done, beat_at = 0, time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(inserter.receive())
            while time.perf_counter() < until:
                await sampler.next()
                await sampler.grant(1)
                await inserter.append(rows)
                done += 1
                if time.perf_counter() - beat_at > HEARTBEAT_S:
                    beat_at = time.perf_counter()
                    await self._cluster.heartbeat(target.member, Progress())
            await inserter.finish()
        sampler.cancel()
        return done


def entry(started: ExitStack, runner: asyncio.Runner, what: str, size: int, held: int) -> Entry:
    """One point: a replay node that is ready to be sampled from."""
    if what == "learners":
        return Entry(str(size), started.enter_context(Learners(runner, size)).sample)
    m, n = TASKS["narrow"]
    held = size if what == "transitions in the buffer" else held
    m = size if what == "observation components" else m
    batch = size if what == "batch size" else BATCH
    replay = started.enter_context(Ours(runner, m, n, capacity=held, batch=batch))
    replay.fill(held)
    return Entry(str(size), replay.sample)


def measure(sizes: Mapping[str, Sequence[int]], *, turns: int, seconds: float, held: int) -> Iterator[Figure]:
    """All points, the ones that are compared with each other in turns."""
    with asyncio.Runner() as runner:
        for what, grown in sizes.items():
            with ExitStack() as started:
                entries = [entry(started, runner, what, size, held) for size in grown]
                yield from take_turns(entries, subject=what, what=WHAT, turns=turns, seconds=seconds)


# --- the tables ---------------------------------------------------------------------------------------------


def tables(figures: Sequence[Figure]) -> str:
    """A table for each quantity that grows, as Markdown."""
    grown = dict.fromkeys(figure.subject for figure in figures)
    return "\n\n".join(
        (conditions(figures), *(table(figures, what) for what in grown), line_through(figures))
    )


def table(figures: Sequence[Figure], what: str) -> str:
    """Batches a second and processor time by what grows."""
    rows = []
    for who in dict.fromkeys(figure.who for figure in values(figures, subject=what)):
        found = values(figures, subject=what, who=who)
        rates = [figure.value for figure in found]
        rows.append(
            (
                f"{int(who):,}",
                f"{median(found):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
                f"{median(found, 'client_us'):,.0f}",
                f"{median(found, 'server_us'):,.0f}",
            )
        )
    return markdown((what, WHAT, "client CPU µs a batch", "server CPU µs a batch"), rows)


def line_through(figures: Sequence[Figure]) -> str:
    """The server's processor time of a batch as a line over the bytes of a row, by least squares."""
    _, n = TASKS["narrow"]
    found = values(figures, subject="observation components")
    sizes = [4 * (2 * int(figure.who) + n + 4) * BATCH for figure in found]
    times = [figure.server_us for figure in found]
    # relative errors are alike, so each point is weighed by what was measured
    slope, start = np.polyfit(sizes, times, 1, w=[1 / max(time, 1e-9) for time in times])
    fitted = np.polyval([slope, start], sizes)
    worst = max(abs(np.log(np.maximum(times, 1e-9) / fitted)))
    return (
        f"Over the bytes of a batch, the server's processor time is {start:.0f} µs + "
        f"{slope * 2**20:.0f} µs per MiB; the point farthest from this line is {np.expm1(worst):.0%} off."
    )


# --- command line -------------------------------------------------------------------------------------------


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a round")
    parser.add_argument("--quick", action="store_true", help="one turn of short rounds, few points")
    answer(parser, measured, tables)


def measured(given: argparse.Namespace) -> list[Figure]:
    """All figures."""
    keep_freed_memory()  # as every node does
    if given.quick:
        return list(measure(QUICK, turns=1, seconds=0.1, held=1_000))
    return list(measure(FULL, turns=given.turns, seconds=given.seconds, held=HELD))


if __name__ == "__main__":
    main()
