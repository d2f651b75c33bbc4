"""Throughput of the replay service: a replay node in one process, this client in another, over gRPC.

Prints, for a narrow (17 observation and 6 action components) and a wide (348 and 17) task, sampled
batches of 256 transitions per second, and inserted transitions per second by chunk size. Each figure
is the median of several rounds, with the range beside it; CPU seconds of both processes are given
because they depend less on what else the machine does.

With --data-dir the replay keeps its buffer there. With --compare-durable a replay in memory and one on
disk run side by side and their rounds alternate; a round of inserts ends when the last one is acknowledged,
so none is paid for in the other's round. The last two columns compare: the rate on disk over that in memory,
as the geometric mean over pairs of rounds with its 95 % interval, and the server's CPU time in memory over
that on disk. The last lines do so over all kinds of inserts and of samples. Many short rounds compare best.

Usage: python benchmarks/replay.py [--seconds 2] [--rounds 3] [--fill 100000]
                                   [--data-dir DIR] [--compare-durable]
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from measuring import TASKS, cpu_s, machine, mean_ratio
from rich.console import Console
from rich.table import Table

from dase_grpc.process.ends import keep_freed_memory
from dase_grpc.process.lifecycle import READY_PREFIX
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.wire.addresses import Address, parse_address
from dase_grpc.schema import Array, TransitionSchema

CHUNKS = (16, 64, 256)
BATCH = 256
CREDITS = 8


@dataclass
class Rate:
    """Events per second over the rounds, and CPU seconds of client and server, of one kind of replay."""

    kind: str
    name: str
    unit: str
    per_second: list[float] = field(default_factory=list)
    events: int = 0
    client_s: float = 0.0
    server_s: float = 0.0

    def ratios_to(self, other: "Rate") -> list[float]:
        """This rate over another, by pairs of rounds."""
        return [mine / its for mine, its in zip(self.per_second, other.per_second, strict=True)]


@dataclass(frozen=True)
class Task:
    """What is measured: one event, which stands for `events`, and what waits until all of them are done."""

    once: Callable[[], Awaitable[None]]
    settle: Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Replay:
    """A replay process and what streams to it connect to."""

    kind: str
    server: psutil.Process
    target: StreamTarget


@contextmanager
def replay_process(capacity: int, data_dir: Path | None) -> Iterator[tuple[Address, psutil.Process]]:
    """A replay node as a process of its own; ends with the block."""
    command = [sys.executable, "-m", "dase_grpc", "node", "--role=replay", "--listen=127.0.0.1:0"]
    where = [f"--data-dir={data_dir}"] if data_dir is not None else []
    process = subprocess.Popen(
        [*command, f"--capacity={capacity}", *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith(READY_PREFIX):
            raise SystemExit(f"the replay node did not come up: {line!r}")
        yield parse_address(line.removeprefix(READY_PREFIX).strip()), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=60)


class Meter:
    """Measures a repeated event over rounds of a fixed length, which alternate between the replays."""

    def __init__(self, *, rounds: int, seconds: float) -> None:
        self._client = psutil.Process(os.getpid())
        self._rounds = rounds
        self._seconds = seconds

    async def rates(
        self,
        name: str,
        unit: str,
        events: int,
        each: Sequence[tuple[Replay, Task]],
    ) -> list[Rate]:
        """How many events a second each replay can do; the first round of each only warms up."""
        rates = [Rate(replay.kind, name, unit) for replay, _ in each]
        for number in range(-1, self._rounds):
            kept = rates if number >= 0 else [Rate(rate.kind, name, unit) for rate in rates]
            pairs = list(zip(kept, each, strict=True))
            for rate, (replay, task) in reversed(pairs) if number % 2 else pairs:
                await self._round(rate, events, replay, task)
        return rates

    async def _round(self, rate: Rate, events: int, replay: Replay, task: Task) -> None:
        before = cpu_s(self._client.pid), cpu_s(replay.server.pid)
        done, started = 0, time.perf_counter()
        while time.perf_counter() - started < self._seconds:
            await task.once()
            done += events
        await task.settle()
        rate.per_second.append(done / (time.perf_counter() - started))
        rate.events += done
        rate.client_s += cpu_s(self._client.pid) - before[0]
        rate.server_s += cpu_s(replay.server.pid) - before[1]


async def measure(
    processes: dict[str, tuple[Address, psutil.Process]], meter: Meter, schema: TransitionSchema, fill: int
) -> list[list[Rate]]:
    """All rates of one task, of each kind of replay side by side."""
    async with AsyncExitStack() as opened:
        replays = []
        for kind, (address, server) in processes.items():
            channel = await opened.enter_async_context(open_channel(address))
            member = await ClusterClient(channel, str(address)).join(
                node_name="benchmark", schema=schema, agent_id=None
            )
            replays.append(Replay(kind, server, StreamTarget(channel, str(address), member, schema)))
        rates = [await insert_rates(replays, meter, chunk, fill) for chunk in CHUNKS]
        return [*rates, await sample_rates(replays, meter)]


async def insert_rates(replays: Sequence[Replay], meter: Meter, chunk: int, fill: int) -> list[Rate]:
    """Inserted transitions; the largest chunks also fill the buffer."""
    async with asyncio.TaskGroup() as tasks:
        inserters, each = [], []
        for replay in replays:
            rows = random_rows(replay.target.schema, chunk, replay.target.member.agent_id)
            acknowledged = asyncio.Event()
            inserter = await Inserter(
                replay.target,
                writer_id=f"chunks-of-{chunk}",
                on_acknowledged=partial(_set, acknowledged),
            ).open()
            tasks.create_task(inserter.receive())
            inserters.append((inserter, rows))
            task = Task(partial(inserter.append, rows), partial(all_acknowledged, inserter, acknowledged))
            each.append((replay, task))
        rates = await meter.rates(f"insert, chunks of {chunk}", "transitions/s", chunk, each)
        for inserter, rows in inserters:
            for _ in range(fill // chunk + 1 if chunk == CHUNKS[-1] else 0):
                await inserter.append(rows)
            await inserter.finish()
    return rates


async def all_acknowledged(inserter: Inserter, acknowledged: asyncio.Event) -> None:
    """Waits until nothing that was sent is still to be stored."""
    while inserter.unacknowledged:
        acknowledged.clear()
        await acknowledged.wait()


async def sample_rates(replays: Sequence[Replay], meter: Meter) -> list[Rate]:
    """Sampled batches."""
    samplers = [await Sampler(each.target, batch_size=BATCH).open(credits=CREDITS) for each in replays]

    async def one_batch(sampler: Sampler) -> None:
        await sampler.next()
        await sampler.grant(1)

    async def nothing() -> None:
        """The few batches that are asked for all the time lie in the client by now."""

    each = [
        (replay, Task(partial(one_batch, sampler), nothing))
        for replay, sampler in zip(replays, samplers, strict=True)
    ]
    rates = await meter.rates(f"sample, batches of {BATCH}", "batches/s", 1, each)
    for sampler in samplers:
        sampler.cancel()
    return rates


def random_rows(schema: TransitionSchema, count: int, agent_id: int) -> Array:
    """Rows of Gaussian numbers that belong to one agent."""
    rows = np.random.default_rng(0).standard_normal((count, schema.width)).astype(np.float32)
    schema.agent_ids(rows)[:] = agent_id
    return rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per figure")
    parser.add_argument("--fill", type=int, default=100_000, help="transitions present while sampling")
    parser.add_argument("--data-dir", type=Path, help="keep the buffer in a new folder there")
    parser.add_argument("--compare-durable", action="store_true", help="in memory and on disk side by side")
    options = parser.parse_args()
    console = Console(width=170)
    keep_freed_memory()  # as every node does
    console.print(
        f"{machine()}, load {os.getloadavg()[0]:.1f}; median of {options.rounds} rounds of "
        f"{options.seconds:g} s (minimum to maximum)"
    )
    heads = (
        "task",
        "what",
        "buffer",
        "median",
        "range",
        "unit",
        "client CPU µs",
        "server CPU µs",
        "rate ratio",
        "CPU ratio",
    )
    table = Table(*heads, box=None)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for task, (m, n) in TASKS.items():
        schema = TransitionSchema(task, m, n, (-1.0,) * n, (1.0,) * n)
        with ExitStack() as started:
            data_dir = started.enter_context(tempfile.TemporaryDirectory(dir=options.data_dir))
            kinds = {"memory": None, "disk": Path(data_dir) / "data"}
            if not options.compare_durable:
                kinds.pop("memory" if options.data_dir else "disk")
            processes = {
                kind: started.enter_context(replay_process(options.fill, where))
                for kind, where in kinds.items()
            }
            meter = Meter(rounds=options.rounds, seconds=options.seconds)
            for rates in asyncio.run(measure(processes, meter, schema, options.fill)):
                add_rows(table, f"{task} ({m}, {n})", rates)
                ratios[rates[0].name.partition(",")[0]] += rates[-1].ratios_to(rates[0])
    console.print(table)
    for name, paired in ratios.items() if options.compare_durable else ():
        console.print(f"{name}, disk over memory: {mean_ratio(paired)} ({len(paired)} pairs of rounds)")


def add_rows(table: Table, task: str, rates: Sequence[Rate]) -> None:
    """One row for each kind of replay; the last compares it with the first."""
    first = rates[0]
    for rate in rates:
        ratios = (
            mean_ratio(rate.ratios_to(first)),
            f"{first.server_s / first.events / (rate.server_s / rate.events):.3f}",
        )
        table.add_row(
            task,
            rate.name,
            rate.kind,
            f"{statistics.median(rate.per_second):,.0f}",
            f"{min(rate.per_second):,.0f} to {max(rate.per_second):,.0f}",
            rate.unit,
            f"{1e6 * rate.client_s / rate.events:.1f}",
            f"{1e6 * rate.server_s / rate.events:.1f}",
            *("" if rate is first else ratio for ratio in ratios),
        )


def _set(event: asyncio.Event, _: int) -> None:
    event.set()


if __name__ == "__main__":
    main()
