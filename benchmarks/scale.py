"""Hundreds of agents on one replay or its shards: joins, heartbeats, status, scrapes, a kill, departures.

python benchmarks/scale.py [--agents 2 16 64 256 1000] [--results FILE.csv] [--also FILE.csv ...]
python benchmarks/scale.py --agents 256 --actors 4
python benchmarks/scale.py --agents 256 --shards 4
python benchmarks/scale.py --quick
python benchmarks/scale.py --show FILE.csv

Every number of agents has a durable replay of its own, and light nodes in --processes processes
(scale_clients.py): all of a node but torch and the environment, each on a connection of its own. Learners
tell a similarity of every agent. They join at once; stand by; work at --rate steps a second in all, with a
batch for each step of a learner; meet a replay that is killed while they work and started again at once; are
killed and started again under the same agent ids; and leave at once. In the end the files of the replay have
to hold each acknowledged transition once, and nothing else. --also takes in figures of earlier results.
"""

import argparse
import asyncio
import io
import os
import re
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from measuring import Figure, answer, conditions, machine, markdown, read_figures, values
from rich.console import Console, Group
from scale_processes import PEAK_S, Acknowledged, Clients, Replays

from dase_grpc.observe.once import Told, page
from dase_grpc.observe.top import Screen
from dase_grpc.observe.view import Target, observing
from dase_grpc.replay.client.cluster import ClusterClient, open_channel

AGENTS: Final = (2, 16, 64, 256, 1_000)
CAPACITY: Final = 400_000
LOOKS: Final = 5
PATIENCE_S: Final = 60.0
WIDTH, HEIGHT = 160, 50
KIB, MIB = 2**10, 2**20

MEASURED: Final = {
    "all joined, s": "{:.1f}",
    "cores of the replay while they join": "{:.2f}",
    "resident memory of the replay before, MiB": "{:,.0f}",
    "KiB of it for a light node": "{:,.0f}",
    "cores, standing by": "{:.2f}",
    "cores, at work": "{:.2f}",
    "steps/s, at work": "{:,.0f}",
    "Status, KiB": "{:,.0f}",
    "Status, ms": "{:,.1f}",
    "a frame of dase top, ms of a processor": "{:,.1f}",
    "the page of dase status, ms of a processor": "{:,.1f}",
    "a scrape, KiB": "{:,.0f}",
    "a scrape, ms": "{:,.1f}",
    "replay back after the kill, s": "{:.1f}",
    "half of the nodes back after it, s": "{:.1f}",
    "all nodes back after it, s": "{:.1f}",
    "cores from its start until then": "{:.2f}",
    "cores in the busiest second of that": "{:.2f}",
    "calls refused until then": "{:,.0f}",
    "all replaced by others, s": "{:.1f}",
    "cores meanwhile": "{:.2f}",
    "all left, s": "{:.1f}",
    "transitions, each stored once": "{:,.0f}",
}
"""What is measured, in the order of the table, and how it is written there."""


@dataclass
class Crowd:
    """One number of agents, each with a learner and so many actors, on a replay in so many shards."""

    agents: int
    actors: int
    shards: int
    figures: list[Figure] = field(default_factory=list)

    @property
    def subject(self) -> str:
        """The name of its column."""
        actors = f" x (1 + {self.actors})" if self.actors else ""
        return f"{self.agents:,}{actors}{f', {self.shards} shards' if self.shards > 1 else ''}"

    @property
    def nodes(self) -> int:
        """Learners and actors."""
        return self.agents * (1 + self.actors)

    def note(self, what: str, value: float) -> None:
        """Keeps a figure."""
        print(f"{self.subject}: {what} {MEASURED[what].format(value)}", flush=True)
        load = os.getloadavg()[0]
        self.figures.append(Figure(machine(), load, self.subject, what, "DASE", 0, value))


@dataclass
class Scene:
    """What happens to a crowd, one thing after the other."""

    crowd: Crowd
    replays: Replays
    options: argparse.Namespace
    stored: Acknowledged = field(default_factory=Counter)
    refused: float = 0.0

    async def play(self) -> None:
        """All of it."""
        crowd, note = self.crowd, self.crowd.note
        async with self.replays.running():
            before = self.replays.resident()
            note("resident memory of the replay before, MiB", before / MIB)
            clients = await self._clients(0)
            try:
                await clients.tell("mark")  # they have started
                began = time.monotonic()
                note("all joined, s", max((await clients.tell("join"))["at"]) - began)
                note("cores of the replay while they join", self.replays.cores(began))
                await asyncio.sleep(self.options.seconds)  # until all streams are open
                note("cores, standing by", await self._busy())
                note("KiB of it for a light node", (self.replays.resident() - before) / KIB / crowd.nodes)
                await self._watched()
                await self._work(clients)
                await self._killed(clients)
                self.stored += await clients.acknowledged("work", 0)
                note("calls refused until then", self.refused + _refused(self._metrics_ports))
            finally:
                await clients.end(kill=True)
            await self._replaced()
        self.replays.require_once(self.stored)
        note("transitions, each stored once", self.stored.total())

    @property
    def _metrics_ports(self) -> list[int]:
        return [each.metrics_port for each in self.replays.shards]

    async def _clients(self, generation: int) -> Clients:
        return await Clients.start(
            self.replays.place,
            agents=self.crowd.agents,
            actors=self.crowd.actors,
            processes=self.options.processes,
            generation=generation,
        )

    async def _busy(self) -> float:
        """Cores of the busiest shard over the next seconds."""
        began = time.monotonic()
        await asyncio.sleep(self.options.seconds)
        return self.replays.cores(began)

    async def _watched(self) -> None:
        """Looks as an operator does, at the first shard where there are several."""
        note = self.crowd.note
        size, status_ms = await self._status()
        note("Status, KiB", size / KIB)
        note("Status, ms", status_ms)
        async with observing(Target(self.replays.place)) as observer:
            looks = await observer.first_look(), await observer.first_look()
        note(
            "a frame of dase top, ms of a processor",
            _timed(lambda: Screen("replay", looks, looks[-1].at, looks[-1])),
        )
        note(
            "the page of dase status, ms of a processor",
            _timed(lambda: Group(*page(Told(*looks, "replay"), width=WIDTH))),
        )
        began = time.perf_counter()
        sizes = [len(await asyncio.to_thread(_scraped, self._metrics_ports[0])) for _ in range(LOOKS)]
        note("a scrape, KiB", sizes[-1] / KIB)
        note("a scrape, ms", (time.perf_counter() - began) * 1e3 / LOOKS)

    async def _status(self) -> tuple[int, float]:
        """Bytes of Status, and how long it takes."""
        address = self.replays.place.addresses[0]
        took_ms = []
        async with open_channel(address) as channel:
            client = ClusterClient(channel, str(address))
            for _ in range(1 + LOOKS):
                began = time.perf_counter()
                status = await client.status()
                took_ms.append((time.perf_counter() - began) * 1e3)
        return status.ByteSize(), statistics.median(took_ms[1:])

    async def _work(self, clients: Clients) -> None:
        inserted = _inserted(self._metrics_ports)
        began = time.monotonic()
        await clients.tell("work", self.options.rate / self.crowd.nodes)
        self.crowd.note("cores, at work", await self._busy())
        done = _inserted(self._metrics_ports) - inserted
        self.crowd.note("steps/s, at work", done / (time.monotonic() - began))

    async def _killed(self, clients: Clients) -> None:
        """Kills the replay while all work; they work on until all is acknowledged."""
        note = self.crowd.note
        await clients.tell("mark")
        self.refused += _refused(self._metrics_ports)
        killed = time.monotonic()
        back = await self.replays.kill_and_start()
        told = await clients.tell("back")
        at = sorted(told["at"])
        note("replay back after the kill, s", back - killed)
        note("half of the nodes back after it, s", at[len(at) // 2] - back)
        note("all nodes back after it, s", at[-1] - back)
        note("cores from its start until then", self.replays.cores(back))
        note("cores in the busiest second of that", self.replays.cores(back, within_s=PEAK_S))

    async def _replaced(self) -> None:
        """Others take the places of nodes that were killed, as soon as their leases end; then all leave."""
        clients = await self._clients(1)
        try:
            await clients.tell("mark")
            began = time.monotonic()
            at = (await clients.tell("join"))["at"]
            self.crowd.note("all replaced by others, s", max(at) - began)
            self.crowd.note("cores meanwhile", self.replays.cores(began))
            await clients.tell("work", self.options.rate / self.crowd.nodes)
            await asyncio.sleep(self.options.seconds)
            await clients.acknowledged("work", 0)
            await clients.tell("leave", 0)
            began = time.monotonic()
            self.stored += await clients.acknowledged("leave", 1)
            self.crowd.note("all left, s", time.monotonic() - began)
            await clients.end()
        finally:
            await clients.end(kill=True)


def _timed(shown: Any) -> float:
    """Milliseconds of the processor that drawing takes, the median of some."""
    took_ms = []
    for _ in range(LOOKS):
        console = Console(file=io.StringIO(), width=WIDTH, height=HEIGHT, force_terminal=True)
        began = time.process_time()
        console.print(shown())
        took_ms.append((time.process_time() - began) * 1e3)
    return statistics.median(took_ms)


def _scraped(port: int) -> str:
    """What a replay exports."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
    return text


def _total(text: str, series: str) -> float:
    """The sum over a metric's series whose labels match."""
    return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(series, line))


def _inserted(ports: Sequence[int]) -> float:
    return sum(_total(_scraped(port), r"dase_replay_inserted_transitions_total\b") for port in ports)


def _refused(ports: Sequence[int]) -> float:
    """Calls that ended neither well nor cut off by their client."""
    fine = "OK|CANCELLED"
    return sum(_total(_scraped(port), rf'grpc_server_handled_total{{.*code="(?!{fine})') for port in ports)


# --- the table ----------------------------------------------------------------------------------------------


def tables(figures: Sequence[Figure]) -> str:
    """A column for each crowd, as Markdown."""
    crowds = list(dict.fromkeys(figure.subject for figure in figures))
    rows = [
        [what, *(_cell(values(figures, subject=crowd, what=what), text) for crowd in crowds)]
        for what, text in MEASURED.items()
    ]
    return f"{conditions(figures)}\n\n{markdown(['', *crowds], rows)}"


def _cell(found: Sequence[Figure], text: str) -> str:
    return text.format(found[0].value) if found else ""


# --- command line -------------------------------------------------------------------------------------------


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=AGENTS)
    parser.add_argument("--actors", type=int, default=0, help="of each agent")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--processes", type=int, default=4, help="of light nodes")
    parser.add_argument("--rate", type=float, default=200.0, help="steps a second of all light nodes")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long they stand by, and work")
    parser.add_argument("--also", type=Path, nargs="*", default=(), metavar="FILE.csv")
    parser.add_argument("--quick", action="store_true", help="few agents, a second each")
    answer(parser, measured, tables)


def measured(given: argparse.Namespace) -> list[Figure]:
    """All figures."""
    if given.quick:
        given.agents, given.seconds, given.rate = (3,), 1.0, 60.0
    figures = [figure for path in given.also for figure in read_figures(path)]
    for agents in given.agents:
        crowd = Crowd(agents, given.actors, given.shards)
        with tempfile.TemporaryDirectory() as folder:
            replays = Replays.in_folder(Path(folder), given.shards, CAPACITY)
            asyncio.run(Scene(crowd, replays, given).play())
        figures += crowd.figures
    return figures


if __name__ == "__main__":
    main()
