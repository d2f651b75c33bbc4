"""Throughput of the replay service: a replay node in one process, this client in another, over gRPC.

Prints, for a narrow (17 observation and 6 action components) and a wide (348 and 17) task, sampled
batches of 256 transitions per second, and inserted transitions per second by chunk size. Each figure
is the median of several rounds, with the range beside it; CPU seconds of both processes are given
because they depend less on what else the machine does.

Usage: python benchmarks/replay.py [--seconds 2] [--rounds 3] [--fill 100000]
"""

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from dase_grpc.nodes.lifecycle import READY_PREFIX
from dase_grpc.nodes.memory import keep_freed_memory
from dase_grpc.schema import Array, TransitionSchema
from dase_grpc.wire.cluster import ClusterClient
from dase_grpc.wire.replay_client import Inserter, Sampler, StreamTarget
from dase_grpc.wire.transport import Address, open_channel, parse_address

TASKS = {"narrow": (17, 6), "wide": (348, 17)}
CHUNKS = (16, 64, 256)
BATCH = 256
CREDITS = 8


@dataclass(frozen=True)
class Rate:
    """Events per second over the rounds, and CPU microseconds per event of client and server."""

    name: str
    unit: str
    per_second: list[float]
    client_us: float
    server_us: float


@contextmanager
def replay_process(capacity: int) -> Iterator[tuple[Address, psutil.Process]]:
    """A replay node as a process of its own; ends with the block."""
    command = [sys.executable, "-m", "dase_grpc", "node", "--role=replay", "--listen=127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, f"--capacity={capacity}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith(READY_PREFIX):
            raise SystemExit(f"the replay node did not come up: {line!r}")
        yield parse_address(line.removeprefix(READY_PREFIX).strip()), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=10)


class Meter:
    """Measures a repeated event over rounds of a fixed length."""

    def __init__(self, server: psutil.Process, *, rounds: int, seconds: float) -> None:
        self._server = server
        self._client = psutil.Process(os.getpid())
        self._rounds = rounds
        self._seconds = seconds

    async def rate(self, name: str, unit: str, events: int, once: Callable[[], Awaitable[None]]) -> Rate:
        """How often `once`, which stands for `events` events, can be done a second."""
        per_second, total = [], 0
        before = _cpu_s(self._client), _cpu_s(self._server)
        for _ in range(self._rounds):
            done, started = 0, time.perf_counter()
            while time.perf_counter() - started < self._seconds:
                await once()
                done += events
            per_second.append(done / (time.perf_counter() - started))
            total += done
        client, server = _cpu_s(self._client) - before[0], _cpu_s(self._server) - before[1]
        return Rate(name, unit, per_second, 1e6 * client / total, 1e6 * server / total)


async def measure(address: Address, meter: Meter, schema: TransitionSchema, fill: int) -> list[Rate]:
    """All rates of one task."""
    rates = []
    async with open_channel(address) as channel:
        member = await ClusterClient(channel, str(address)).join(
            node_name="benchmark", schema=schema, agent_id=None
        )
        target = StreamTarget(channel, str(address), member, schema)
        for chunk in CHUNKS:
            rows = random_rows(schema, chunk, member.agent_id)
            async with asyncio.TaskGroup() as tasks:
                inserter = await Inserter(target, writer_id=f"chunks-of-{chunk}").open()
                tasks.create_task(inserter.receive())
                rate = await meter.rate(
                    f"insert, chunks of {chunk}",
                    "transitions/s",
                    chunk,
                    partial(inserter.append, rows),
                )
                if chunk == CHUNKS[-1]:
                    for _ in range(fill // chunk + 1):
                        await inserter.append(rows)
                await inserter.finish()
            rates.append(rate)
        sampler = await Sampler(target, batch_size=BATCH).open(credits=CREDITS)

        async def one_batch() -> None:
            await sampler.next()
            await sampler.grant(1)

        rates.append(await meter.rate(f"sample, batches of {BATCH}", "batches/s", 1, one_batch))
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
    options = parser.parse_args()
    console = Console(width=130)
    keep_freed_memory()  # as every node does
    console.print(
        f"{_machine()}; median of {options.rounds} rounds of {options.seconds:g} s (minimum to maximum)"
    )
    table = Table("task", "what", "median", "range", "unit", "client CPU µs", "server CPU µs", box=None)
    for task, (m, n) in TASKS.items():
        schema = TransitionSchema(task, m, n, (-1.0,) * n, (1.0,) * n)
        with replay_process(options.fill) as (address, server):
            meter = Meter(server, rounds=options.rounds, seconds=options.seconds)
            for rate in asyncio.run(measure(address, meter, schema, options.fill)):
                low, high = min(rate.per_second), max(rate.per_second)
                table.add_row(
                    f"{task} ({m}, {n})",
                    rate.name,
                    f"{statistics.median(rate.per_second):,.0f}",
                    f"{low:,.0f} to {high:,.0f}",
                    rate.unit,
                    f"{rate.client_us:.1f}",
                    f"{rate.server_us:.1f}",
                )
    console.print(table)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return (
        f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
