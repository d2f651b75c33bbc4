"""Kills a durable replay again and again under writers at full speed, and checks that nothing is lost.

One replay process with --data-dir, several writers over gRPC. The replay is killed (SIGKILL) at random
moments and started again on the same directory and port; the writers connect anew and go on from the
number that the service states. Every column of a row is a function of its agent and its sequence number.
After the last kill the files are read with the reader below, which shares no code with the service: they
have to hold exactly the last committed transitions, each once, whole and in its writer's order, and no
acknowledged one may be missing.

Usage: python benchmarks/storm.py [--kills 200] [--writers 4] [--capacity 50000] [--every 0.5]
"""

import argparse
import asyncio
import json
import signal
import socket
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dase_grpc.errors import DaseError
from dase_grpc.process.lifecycle import READY_PREFIX
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.schema import Array, TransitionSchema

SCHEMA = TransitionSchema("storm", 17, 6, (-1.0,) * 6, (1.0,) * 6)
EXACT = 2**24
"""float32 holds every whole number below."""


class Lost(Exception):
    """The buffer is not what it has to be."""


@dataclass
class Writer:
    """One agent: how far it has sent, and how far the service has ever acknowledged."""

    agent_id: int
    member: Membership
    sent: int = 0
    acknowledged: int = 0
    connections: int = 0


@dataclass
class Storm:
    """What happened."""

    address: Address
    data_dir: Path
    capacity: int
    writers: list[Writer] = field(default_factory=list)
    restart_s: list[float] = field(default_factory=list)
    process: asyncio.subprocess.Process | None = None
    up: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        """Starts the replay; returns once it answers."""
        started = time.perf_counter()
        arguments = (f"--listen={self.address}", f"--data-dir={self.data_dir}", f"--capacity={self.capacity}")
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dase_grpc", "node", "--role=replay", "--sync-every=0.5", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        line = await self.process.stdout.readline() if self.process.stdout else b""
        if not line.decode().startswith(READY_PREFIX):
            raise Lost(f"the replay did not come up on {self.data_dir}")
        self.restart_s.append(time.perf_counter() - started)
        self.up.set()

    async def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None and self.process.returncode is None:
            self.up.clear()
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()

    async def join(self, writers: int) -> None:
        """Leases an agent id for every writer; the leases outlive the kills."""
        async with open_channel(self.address) as channel:
            client = ClusterClient(channel, str(self.address))
            for agent_id in range(writers):
                member = await client.join(node_name="storm", schema=SCHEMA, agent_id=agent_id)
                self.writers.append(Writer(agent_id, member))

    async def write(self, writer: Writer, rng: np.random.Generator) -> None:
        """Writes through every kill until it is over; returns once all is acknowledged."""
        while True:
            await self.up.wait()
            try:
                await self._write_once(writer, rng)
            except DaseError:  # killed
                continue
            return

    async def _write_once(self, writer: Writer, rng: np.random.Generator) -> None:
        async with open_channel(self.address) as channel:
            target = StreamTarget(channel, str(self.address), writer.member, SCHEMA)
            inserter = await Inserter(target, writer_id="storm").open()
            require_between(writer, inserter.sent_seq)
            receiving = asyncio.ensure_future(inserter.receive())
            try:
                while not self.over.is_set():
                    first = inserter.sent_seq + 1
                    writer.sent = first + int(rng.integers(1, 257)) - 1
                    await inserter.append(rows_of(writer.agent_id, np.arange(first, writer.sent + 1)))
                writer.sent = inserter.sent_seq
                await inserter.finish()
            finally:
                writer.acknowledged = max(writer.acknowledged, inserter.acknowledged_seq)
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)


def require_between(writer: Writer, committed: int) -> None:
    """What the service states after a kill: all that was acknowledged, nothing that was not sent."""
    if not writer.acknowledged <= committed <= writer.sent:
        raise Lost(
            f"writer {writer.agent_id} was acknowledged {writer.acknowledged} and had sent {writer.sent}, "
            f"but the service has committed {committed}"
        )
    writer.connections += 1


def rows_of(agent_id: int, seqs: npt.NDArray[np.int64]) -> Array:
    """Rows of which every column follows from the agent and the sequence number."""
    rows = SCHEMA.empty(len(seqs))
    column = np.arange(SCHEMA.float_width)
    rows[:, : SCHEMA.float_width] = (
        seqs[:, np.newaxis] * (2 * column + 1) + 7_919 * agent_id + column
    ) % EXACT
    SCHEMA.agent_ids(rows)[:] = agent_id
    rows.view(np.uint32)[:, -1] = seqs % 2**32
    return rows


@dataclass(frozen=True)
class Files:
    """What the files of a data directory say, read without the service's code."""

    total: int
    rows: Array
    sequences: dict[tuple[int, str], int]


def read_files(data_dir: Path) -> Files:
    """Reads buffer.json, the newest whole commit record, the names of the writers, and the rows."""
    buffer = json.loads((data_dir / "buffer.json").read_text())
    commits = (data_dir / "commits").read_bytes()
    page, writers = 4_096, buffer["max_writers"]
    slot = -(-(16 + 8 + 24 + 8 * (3 * 1_024 + writers)) // page) * page
    _, payload = max(_records(commits, 2 * page, slot))
    total, size, agents, known = struct.unpack_from("<qqII", payload)
    numbers = np.frombuffer(payload, np.int64, offset=24)[3 * agents :][:known].tolist()
    sequences = {}
    for index, number in enumerate(numbers):
        if number < 0:  # a writer that has ended for good
            continue
        offset = 2 * page + 4 * slot + index * (8 + 512)
        _, agent_id, length = struct.unpack_from("<IHH", commits, offset)
        sequences[agent_id, commits[offset + 8 :][:length].decode()] = number
    slots = buffer["capacity"] + buffer["spare"]
    stored = np.memmap(data_dir / "rows", np.float32, mode="r").reshape(slots, -1)
    return Files(total, stored[np.arange(total - size, total) % slots], sequences)


def _records(data: bytes, offset: int, slot: int) -> Iterator[tuple[int, bytes]]:
    for start in (offset, offset + slot):
        number, check_sum, size = struct.unpack_from("<QII", data, start)
        payload = data[start + 16 :][:size]
        if number and zlib.crc32(payload, zlib.crc32(struct.pack("<QI", number, size))) == check_sum:
            yield number, payload


def check(files: Files, writers: dict[int, tuple[int, int]], capacity: int) -> None:
    """Raises Lost unless the files hold exactly the latest transitions.

    writers: for each agent id, the last number that was acknowledged and the last that was sent.
    """
    last = {agent_id: files.sequences.get((agent_id, "storm"), 0) for agent_id in writers}
    for agent_id, (acknowledged, sent) in writers.items():
        if not acknowledged <= last[agent_id] <= sent:
            raise Lost(f"writer {agent_id}: {acknowledged} acknowledged, {sent} sent, {last[agent_id]} kept")
    if files.total != sum(last.values()):
        raise Lost(f"{files.total} transitions were stored, but the writers committed {sum(last.values())}")
    if len(files.rows) != min(files.total, capacity):
        raise Lost(f"{len(files.rows)} transitions are there, not {min(files.total, capacity)}")
    agent_ids = SCHEMA.agent_ids(files.rows)
    if not set(agent_ids.tolist()) <= set(writers):
        raise Lost(f"there are transitions of agents {sorted(set(agent_ids.tolist()) - set(writers))}")
    for agent_id in writers:
        rows = files.rows[agent_ids == agent_id]
        expected = rows_of(agent_id, np.arange(last[agent_id] - len(rows) + 1, last[agent_id] + 1))
        wrong = (rows.view(np.uint32) != expected.view(np.uint32)).any(axis=1)
        if wrong.any():
            raise Lost(
                f"{wrong.sum()} of {len(rows)} transitions of agent {agent_id} are not what they should be"
            )


async def run_storm(storm: Storm, *, kills: int, writers: int, every_s: float, seed: int) -> None:
    """Kills the replay `kills` times, the last time when all is acknowledged; then checks its files."""
    rng = np.random.default_rng(seed)
    try:
        await storm.start()
        await storm.join(writers)
        async with asyncio.TaskGroup() as tasks:
            for writer in storm.writers:
                tasks.create_task(storm.write(writer, np.random.default_rng((seed, writer.agent_id))))
            for _ in range(kills - 1):
                await asyncio.sleep(every_s * rng.uniform(0.2, 1.8))
                await storm.kill()
                await storm.start()
            storm.over.set()
    finally:
        await storm.kill()
    for writer in storm.writers:
        if writer.acknowledged != writer.sent:
            raise Lost(f"writer {writer.agent_id} ended with {writer.acknowledged} of {writer.sent}")
    told = {writer.agent_id: (writer.acknowledged, writer.sent) for writer in storm.writers}
    check(read_files(storm.data_dir), told, storm.capacity)


def free_address() -> Address:
    """An address of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: Any = probe.getsockname()[1]
    return Address("127.0.0.1", port)


def main() -> None:
    """Runs a storm and says what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=50_000)
    parser.add_argument("--every", type=float, default=0.5, help="mean seconds between a start and a kill")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        storm = Storm(free_address(), Path(directory) / "data", options.capacity)
        asyncio.run(
            run_storm(
                storm,
                kills=options.kills,
                writers=options.writers,
                every_s=options.every,
                seed=options.seed,
            )
        )
    sent = sum(writer.sent for writer in storm.writers)
    connections = sum(writer.connections for writer in storm.writers)
    print(
        f"{options.kills} kills in {time.perf_counter() - started:.0f} s: {sent:,} transitions acknowledged "
        f"to {len(storm.writers)} writers over {connections} connections, none lost, doubled or torn; "
        f"the replay answered {np.median(storm.restart_s):.2f} s (median) after its start, "
        f"{max(storm.restart_s):.2f} s at most"
    )


if __name__ == "__main__":
    main()
