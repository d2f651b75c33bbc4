"""Throughput of a replay in one piece and in shards, each shard a process, all driven by the same clients.

Prints, and with --csv writes, for a narrow (17 observation and 6 action components) and a wide (348 and 17)
task, batches of 256 transitions a second that the clients took together, and transitions a second that they
stored. Rounds alternate between the numbers of shards, so that whatever else the machine does meets all of
them. The clients are learners' links in this process: they share one interpreter, so where that is what is
short, shards cannot show.
"""

import argparse
import asyncio
import csv
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from dase_grpc.process.lifecycle import READY_PREFIX
from dase_grpc.progress import Progress
from dase_grpc.replay.client.admission import join_all
from dase_grpc.replay.client.cluster import Lines
from dase_grpc.replay.client.link import ReplayLink
from dase_grpc.replay.client.membership import LearnerConnection
from dase_grpc.replay.client.patience import Wanted
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.security.dialler import NO_CREDENTIALS
from dase_grpc.replay.wire.addresses import ReplayPlace, parse_address
from dase_grpc.schema import Array, TransitionSchema

TASKS = {"narrow": (17, 6), "wide": (348, 17)}
BATCH = 256
HELD = 16_000


@dataclass
class Rates:
    """What was measured of one task on one number of shards, events a second for each round."""

    task: str
    what: str
    shards: int
    per_second: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    shard_ms: list[float] = field(default_factory=list)

    def row(self) -> dict[str, object]:
        """A line of the file."""
        return {
            "task": self.task,
            "what": self.what,
            "shards": self.shards,
            "median": round(statistics.median(self.per_second), 1),
            "low": round(min(self.per_second), 1),
            "high": round(max(self.per_second), 1),
            "rounds": len(self.per_second),
            "busiest_shard_cpu_ms_per_1000": round(statistics.median(self.shard_ms), 2),
            "load": round(statistics.mean(self.load), 1),
        }


@contextmanager
def replay_of(shards: int) -> Iterator[tuple[ReplayPlace, list[psutil.Process]]]:
    """Where a replay is, and its processes."""
    with ExitStack() as stack:
        addresses, processes = [], []
        for index in range(shards):
            command = [sys.executable, "-m", "dase_grpc", "node", "--role=replay", "--listen=127.0.0.1:0"]
            command += [f"--shard={index}/{shards}", "--run-id=bench", f"--capacity={4 * HELD // shards}"]
            process = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            )
            stack.callback(process.terminate)
            line = process.stdout.readline() if process.stdout else ""
            if not line.startswith(READY_PREFIX):
                raise SystemExit(f"the replay node did not come up: {line!r}")
            addresses.append(parse_address(line.removeprefix(READY_PREFIX).strip()))
            processes.append(psutil.Process(process.pid))
        yield ReplayPlace(tuple(addresses)), processes


@asynccontextmanager
async def client_of(place: ReplayPlace, schema: TransitionSchema, agent_id: int) -> AsyncIterator[ReplayLink]:
    """One learner's link, whose streams run until the end of the block."""
    wanted = Wanted(place.addresses[0], agent_id, "", node_id=f"bench-{agent_id}", timeout_s=30, away_s=30)
    async with Lines(place, NO_CREDENTIALS) as lines:
        joined = await join_all(lines, wanted, schema)
        shards = Shards(joined.connected(lines, LearnerConnection, timeout_s=30))
        link = ReplayLink(shards, batch_size=BATCH, prefetch=2, writer_id="bench")
        async with asyncio.TaskGroup() as tasks:
            jobs = [
                tasks.create_task(link.insert_rows()),
                tasks.create_task(link.fetch_batches()),
                tasks.create_task(shards.heartbeats(Progress)),
            ]
            try:
                yield link
            finally:
                link.close()
                for job in jobs:
                    job.cancel()


def rows_of(schema: TransitionSchema, agent_id: int, count: int) -> Array:
    """Rows to store."""
    rows = schema.empty(count)
    rows[:, : schema.float_width] = np.random.default_rng(0).standard_normal((count, schema.float_width))
    schema.agent_ids(rows)[:] = agent_id
    return rows


def take(link: ReplayLink, until: float) -> int:
    """Takes batches until a time; how many."""
    taken = 0
    while time.perf_counter() < until:
        taken += link.next() is not None
    return taken


def put(link: ReplayLink, rows: Array, until: float) -> int:
    """Stores rows until a time; how many."""
    stored = 0
    while time.perf_counter() < until:
        for row in rows:
            link.store(row)
        stored += len(rows)
    return stored


async def round_of(
    rates: Rates,
    calls: list[Callable[[float], int]],
    links: list[ReplayLink],
    servers: list[psutil.Process],
    s: float,
) -> None:
    """One round of all clients at once; stored transitions count once they are acknowledged."""
    before = [_cpu_s(server) for server in servers]
    began = time.perf_counter()
    done = sum(await asyncio.gather(*(asyncio.to_thread(call, began + s) for call in calls)))
    while any(link.unacknowledged for link in links):  # noqa: ASYNC110 - counted by other threads
        await asyncio.sleep(0.001)
    rates.per_second.append(done / (time.perf_counter() - began))
    busiest = max(_cpu_s(server) - then for server, then in zip(servers, before, strict=True))
    rates.shard_ms.append(busiest * 1e6 / done)
    rates.load.append(os.getloadavg()[0])


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(task: str, arguments: argparse.Namespace) -> list[Rates]:
    """All numbers of shards side by side."""
    schema = TransitionSchema(
        f"bench:{task}", TASKS[task][0], TASKS[task][1], (-1.0,) * TASKS[task][1], (1.0,) * TASKS[task][1]
    )
    async with AsyncExitStack() as stack:
        clients: dict[int, list[ReplayLink]] = {}
        servers: dict[int, list[psutil.Process]] = {}
        for shards in arguments.shards:
            place, servers[shards] = stack.enter_context(replay_of(shards))
            clients[shards] = [
                await stack.enter_async_context(client_of(place, schema, agent_id))
                for agent_id in range(arguments.clients)
            ]
        rows = [rows_of(schema, agent_id, 256) for agent_id in range(arguments.clients)]
        inserts = [Rates(task, "stored transitions", shards) for shards in arguments.shards]
        samples = [Rates(task, "sampled batches", shards) for shards in arguments.shards]
        for number in range(-1, arguments.rounds):  # the first round fills the buffers
            for kept in (inserts, samples):
                for rates in kept[:: -1 if number % 2 else 1]:
                    links = clients[rates.shards]
                    calls: list[Callable[[float], int]] = [partial(take, link) for link in links]
                    if kept is inserts:
                        calls = [partial(put, link, own) for link, own in zip(links, rows, strict=True)]
                    await round_of(rates, calls, links, servers[rates.shards], arguments.seconds)
            if number < 0:
                for rates in (*inserts, *samples):
                    rates.per_second.clear()
                    rates.load.clear()
                    rates.shard_ms.clear()
        return [*samples, *inserts]


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows = [rates.row() for task in TASKS for rates in asyncio.run(measure(task, arguments))]
    for row in rows:
        print(*row.values(), sep="\t", flush=True)
    if arguments.csv is not None:
        with arguments.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
