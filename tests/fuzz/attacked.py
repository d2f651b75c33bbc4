"""A replay process under attack, and a learner that behaves and must not notice."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import psutil
from nodes.processes import NodeProcess, replay_process
from patience import PATIENCE_S
from replay.wire.services import SCHEMA, rows_of, serials_of

from dase_grpc.process.ends import boot_id
from dase_grpc.progress import Progress
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.wire.addresses import parse_address

MIB = 2**20
EXAMPLES = int(os.environ.get("DASE_FUZZ_EXAMPLES", "0"))
"""Examples of each property; 0 for the few that every test run tries, always the same."""

CAPACITY = 1_000_000
BATCH = 64
PACE_S = 0.005
"""What a step of a learner takes otherwise."""


class GoodLearner:
    """Agent 0: inserts numbered rows and samples, one step after the other, and looks at all it gets."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.batches = 0
        self.rows = 0

    async def run(self, stop: asyncio.Event) -> None:
        async with open_channel(parse_address(self._address)) as channel, asyncio.TaskGroup() as tasks:
            cluster = ClusterClient(channel, self._address)
            member = await cluster.join(node_name="good", schema=SCHEMA, agent_id=0, timeout_s=PATIENCE_S)
            target = StreamTarget(channel, self._address, member, SCHEMA)
            inserter = await Inserter(target, writer_id="good").open()
            tasks.create_task(inserter.receive())
            await inserter.append(rows_of(1, BATCH))
            sampler = await Sampler(target, batch_size=BATCH).open(credits=2)
            while not stop.is_set():
                first = inserter.sent_seq + 1
                await inserter.append(rows_of(first, first + 7))
                batch = await sampler.next()
                own = batch.rows[SCHEMA.agent_ids(batch.rows) == 0]
                assert all(1 <= serial <= inserter.sent_seq for serial in serials_of(own))
                await sampler.grant(1)
                await cluster.heartbeat(member, Progress(), timeout_s=PATIENCE_S)
                self.batches += 1
                await asyncio.sleep(PACE_S)
            await inserter.finish()
            sampler.cancel()
            self.rows = inserter.acknowledged_seq


class Attacked:
    """The replay, what it takes in memory, and the learner that must not notice."""

    def __init__(self, node: NodeProcess, address: str, learner: GoodLearner) -> None:
        self.address = address
        self.host, port = address.rsplit(":", 1)
        self.port = int(port)
        self.process = psutil.Process(node.popen.pid)
        self._learner = learner

    @property
    def private_bytes(self) -> int:
        """Resident memory without that of mapped files, which the kernel may take back."""
        memory = self.process.memory_info()
        return int(memory.rss - memory.shared)

    @property
    def connections(self) -> int:
        return sum(each.status == psutil.CONN_ESTABLISHED for each in self.process.net_connections("tcp"))

    async def goes_on(self, *, batches: int = 3) -> None:
        """Returns once the learner has had some more batches."""
        wanted = self._learner.batches + batches
        async with asyncio.timeout(PATIENCE_S):
            while self._learner.batches < wanted:  # noqa: ASYNC110 - a number, which tells nobody
                await asyncio.sleep(0.01)

    def channel(self, *options: tuple[str, Any]) -> grpc.aio.Channel:
        """A connection of its own, without any of our clients' limits."""
        own = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1), *options]
        return grpc.aio.insecure_channel(self.address, options=own)

    async def target(self, channel: grpc.aio.Channel, agent_id: int = 1) -> StreamTarget:
        """Joins as another agent."""
        member = await ClusterClient(channel, self.address).join(
            node_name="bad", schema=SCHEMA, agent_id=agent_id, timeout_s=PATIENCE_S
        )
        return StreamTarget(channel, self.address, member, SCHEMA)


@asynccontextmanager
async def attacked(data_dir: Path, *, grows_at_most: int) -> AsyncIterator[Attacked]:
    """A replay on disk with a learner that behaves, for the block to attack.

    Afterwards the learner has gone on without an error, each of its rows is stored once and whole, in
    order, the replay has taken at most `grows_at_most` bytes more, its log shows no traceback, and it
    stops with exit code 0.
    """
    storage = (f"--data-dir={data_dir}", f"--capacity={CAPACITY}", "--run-id=the-run")
    with replay_process(*storage) as (node, address):
        learner, stop = GoodLearner(address), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(learner.run(stop))
            target = Attacked(node, address, learner)
            await target.goes_on(batches=20)
            before, most = target.private_bytes, 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, target.private_bytes)
                    await asyncio.sleep(0.05)

            watching = tasks.create_task(watch())
            yield target
            await target.goes_on()
            watching.cancel()
            stop.set()
        node.popen.terminate()
        assert node.exit_code() == 0, node.log
        assert "Traceback" not in node.log, node.log
        assert "Error" not in node.log, node.log
    grown = max(most - before, 0)
    assert grown <= grows_at_most, f"{grown / MIB:.0f} MiB more than before"
    assert stored_of(data_dir, agent_id=0) == list(range(1, learner.rows + 1))


def stored_of(data_dir: Path, *, agent_id: int) -> list[int]:
    """The serial numbers of an agent's rows in the files of a replay that has ended."""
    run = SharedRun("the-run", capacity=CAPACITY, min_size=1, seed=0, ttl_s=10.0)
    with closing(run.keep_in(data_dir, boot_id=boot_id(), now=0.0)):
        rows = run.store.ring.ordered()
        return serials_of(rows[SCHEMA.agent_ids(rows) == agent_id])
