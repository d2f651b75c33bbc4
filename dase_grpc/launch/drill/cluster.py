"""A local cluster to break: a durable replay, and K learners, each behind a proxy that breaks its network."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import tomli_w
from prometheus_client.parser import text_string_to_metric_families

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import DaseError, UnreachableError
from dase_grpc.launch.drill.evidence import Life
from dase_grpc.launch.processes import (
    ANY_PORT,
    PROGRAM,
    Node,
    end_nodes,
    listening_address,
    node_arguments,
    start_node,
)
from dase_grpc.replay.client.cluster import ClusterClient, open_channel
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.v1 import cluster_pb2
from dase_grpc.runs.directory import RUN_FILE

READY_S: Final = 60.0
TRAINED_S: Final = 120.0
MORE_UPDATES: Final = 20
"""Updates that only a learner that trains anew can make: more than there are batches drawn ahead."""

CONFIG: Final = "drill.toml"
LOOK_S: Final = 0.1
STATUS_S: Final = 2.0
PIECE: Final = 65_536
ACKNOWLEDGED: Final = "dase_explorer_acknowledged_transitions_total"


class Proxy:
    """A TCP proxy that forwards connections to `target`, each piece `delay_s` late, as long as it is told to.

    After `heal` those that lost bytes stay dead, as after a real partition that outlived its retransmissions.
    """

    def __init__(self, target: Address) -> None:
        self._target = target
        self._mode = "open"
        self._hung: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self.delay_s = 0.0
        self.connections = 0

    def cut(self) -> None:
        """Resets every connection, and each new one."""
        self._mode = "cut"
        for writer in tuple(self._open):
            writer.transport.abort()

    def hang(self) -> None:
        """Lets every byte vanish, both ways; connections stay open, new ones too."""
        self._mode = "hang"
        self._hung |= self._open

    def heal(self) -> None:
        """Lets new connections through."""
        self._mode = "open"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client."""
        self.connections += 1
        if self._mode == "cut":
            writer.transport.abort()
            return
        self._open.add(writer)
        if self._mode == "hang":
            self._hung.add(writer)
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await asyncio.open_connection(self._target.host, self._target.port)
            self._open.add(far)
            if writer in self._hung:
                self._hung.add(far)
            await asyncio.gather(
                self._pump(reader, far, near=writer), self._pump(far_reader, writer, near=writer)
            )
        except OSError:
            pass  # one side has gone, and so goes the other
        finally:
            for each in (writer, far):
                if each is not None:
                    self._open.discard(each)
                    self._hung.discard(each)
                    each.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, near: asyncio.StreamWriter
    ) -> None:
        while piece := await reader.read(PIECE):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if near not in self._hung:
                writer.write(piece)
                await writer.drain()
        if near in self._hung:
            await self._closing.wait()  # the end of a connection does not get through either
        raise ConnectionResetError

    async def close(self) -> None:
        """Ends every connection."""
        self._mode = "cut"
        self._closing.set()
        for writer in tuple(self._open):
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxied(target: Address) -> AsyncIterator[tuple[Proxy, Address]]:
    """A proxy to a service, and its address."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    try:
        yield proxy, Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
        await proxy.close()


@dataclass
class DrillLearner:
    """A learner process; `acknowledged` is what it was last seen to know of as committed."""

    agent_id: int
    node: Node
    run_dir: Path
    metrics_port: int
    acknowledged: int = 0
    frozen: bool = False

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process, if it still runs."""
        if self.node.runs:
            with suppress(ProcessLookupError):
                os.kill(self.node.process.pid, number)
                self.frozen = number == signal.SIGSTOP or (self.frozen and number != signal.SIGCONT)

    @property
    def life(self) -> Life:
        """See `Life`."""
        process = self.node.process
        return Life(self.agent_id, process.pid, self.acknowledged, process.returncode == 0)


def read_metrics(port: int) -> Mapping[str, float]:
    """What a node exports on this machine: each metric, summed over its labels; nothing if it is silent."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=STATUS_S) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return {}
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return found


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of loopback that a process may listen on, and that nobody else is given while the block runs.

    Linux lets a listener bind where a socket that does not listen is bound, if both allow it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port


@dataclass
class DrillCluster:
    """The processes and proxies of a drill, for the time of an `open_cluster` block; none outlives it.

    `learners` holds the latest process of each agent, `gone` those before, in their order.
    """

    config: RunConfig
    path: Path
    program: Sequence[str] = PROGRAM
    address: Address = ANY_PORT
    replay: Node | None = None
    replay_metrics_port: int = 0
    learners: dict[int, DrillLearner] = field(default_factory=dict)
    gone: list[DrillLearner] = field(default_factory=list)
    proxies: dict[int, Proxy] = field(default_factory=dict)
    _ways: dict[int, Address] = field(default_factory=dict)
    _started: int = 0
    _reserved: ExitStack = field(default_factory=ExitStack)

    @property
    def data_dir(self) -> Path:
        """Where the replay keeps its buffer."""
        return self.path / "data"

    @property
    def agents(self) -> list[int]:
        """All agent ids."""
        return list(range(self.config.train.agents))

    @property
    def lives(self) -> list[Life]:
        """What is known of all learner processes, each agent's in the order in which they came."""
        return [learner.life for learner in (*self.gone, *self.learners.values())]

    def write_config(self) -> None:
        """Writes the settings of all learners to a file."""
        self.path.mkdir(parents=True, exist_ok=True)
        settings = tomli_w.dumps(self.config.model_dump(mode="json"))
        (self.path / CONFIG).write_text(settings, encoding="utf-8")

    async def start_replay(self) -> None:
        """Starts the replay, on the port it had before; returns once it answers."""
        self.replay_metrics_port = self._reserved.enter_context(reserved_port())
        arguments = node_arguments(
            "replay",
            listen=self.address,
            data_dir=self.data_dir,
            capacity=self.config.replay.capacity,
            min_size=self.config.replay.min_size,
            seed=self.config.train.seed,
            run_id="drill",
            metrics_port=self.replay_metrics_port,
        )
        self.replay = await self._start("replay", arguments, read_stdout=True)
        self.address = await listening_address(self.replay, within_s=READY_S)

    async def start_learner(self, agent_id: int, *, elsewhere: bool = False) -> DrillLearner:
        """Starts an agent's next learner, which goes on from the checkpoint of the one before.

        `elsewhere` it does so in a copy of its run directory, as on another machine.
        """
        before = self.learners.get(agent_id)
        run_dir = before.run_dir if before else self.path / "run"
        if before and elsewhere:
            run_dir = self.path / f"run-{self._started}"
            own = f"agents/{agent_id}"  # the folders of other agents may be changing
            await asyncio.to_thread(shutil.copytree, before.run_dir / own, run_dir / own)
            shutil.copy(before.run_dir / RUN_FILE, run_dir / RUN_FILE)
        port = self._reserved.enter_context(reserved_port())
        arguments = node_arguments(
            "learner",
            replay=self._ways[agent_id],
            agent=agent_id,
            config=self.path / CONFIG,
            run_dir=run_dir,
            metrics_port=port,
            resume=before is not None,
        )
        node = await self._start(f"learner-{agent_id}", arguments)
        if before:
            self.gone.append(before)
        self.learners[agent_id] = learner = DrillLearner(agent_id, node, run_dir, port)
        return learner

    async def note_acknowledged(self, agent_ids: Iterable[int]) -> None:
        """Asks learners how many of their transitions they know to be committed."""
        for learner in (self.learners[agent_id] for agent_id in agent_ids):
            if not learner.frozen and learner.node.runs:
                told = await asyncio.to_thread(read_metrics, learner.metrics_port)
                learner.acknowledged = max(learner.acknowledged, int(told.get(ACKNOWLEDGED, 0)))

    async def status(self) -> dict[int, cluster_pb2.AgentStatus]:
        """The agents as the replay, asked past the proxies, knows them; it may refuse or not answer."""
        async with open_channel(self.address) as channel:
            answer = await ClusterClient(channel, str(self.address)).status(timeout_s=STATUS_S)
        return {agent.agent_id: agent for agent in answer.agents}

    async def epochs(self) -> dict[int, int]:
        """The agents' lease epochs."""
        return {agent_id: agent.epoch for agent_id, agent in (await self.status()).items()}

    async def until_training(
        self, agent_ids: Collection[int], *, epochs: dict[int, int] | None = None, since: float | None = None
    ) -> float:
        """Waits until agents have made updates anew, in at least these epochs; the seconds `since` then.

        What an agent reported before this was called does not count.

        Raises:
            UnreachableError: that did not happen in time.
            NodeFailedError: one of their learners has ended.
        """
        looked_from = time.monotonic()
        began = looked_from if since is None else since
        least, first, missing = epochs or {}, dict[int, int](), set(agent_ids)
        try:
            async with asyncio.timeout(TRAINED_S):
                while missing:
                    for node in (self.learners[agent_id].node for agent_id in missing):
                        if not node.runs:
                            raise node.failure("ended")
                    for agent_id, agent in (await self._answered()).items():
                        heard_of = agent.seconds_since_heartbeat < time.monotonic() - looked_from
                        if heard_of and agent.epoch >= least.get(agent_id, 1):
                            updates = agent.progress.updates
                            if updates >= first.setdefault(agent_id, updates) + MORE_UPDATES:
                                missing.discard(agent_id)
                    if missing:
                        await asyncio.sleep(LOOK_S)
        except TimeoutError:
            names = ", ".join(map(str, sorted(missing)))
            raise UnreachableError(
                f"agents {names} made no update within {TRAINED_S:g} s; see the logs in {self.path / 'logs'}"
            ) from None
        return time.monotonic() - began

    async def stop(self) -> None:
        """Lets the learners drain and leave, then the replay; raises NodeFailedError if one ends badly."""
        await self.note_acknowledged(self.agents)
        nodes = [learner.node for learner in self.learners.values()]
        await end_nodes(nodes)
        if self.replay is not None:
            await end_nodes([self.replay])
            nodes.append(self.replay)
        for node in nodes:
            if node.process.returncode != 0:
                raise node.failure("did not end well when it was told to")

    async def close(self) -> None:
        """Kills whatever still runs, frozen or not."""
        nodes = [learner.node for learner in (*self.gone, *self.learners.values())]
        with self._reserved:
            await end_nodes([*nodes, *([self.replay] if self.replay else [])], within_s=0.0)

    async def _answered(self) -> dict[int, cluster_pb2.AgentStatus]:
        """The status, or nothing while the replay does not answer."""
        try:
            return await self.status()
        except DaseError:
            if self.replay is not None and not self.replay.runs:
                raise self.replay.failure("ended") from None
            return {}

    async def _start(self, name: str, arguments: Sequence[str], *, read_stdout: bool = False) -> Node:
        self._started += 1
        return await start_node(
            name,
            (*self.program, *arguments),
            log=self.path / "logs" / f"{self._started:03d}-{name}.log",
            threads=self.config.train.threads,
            read_stdout=read_stdout,
        )


@asynccontextmanager
async def open_cluster(
    config: RunConfig, path: Path, *, program: Sequence[str] = PROGRAM
) -> AsyncIterator[DrillCluster]:
    """Starts a drill's cluster in the folder `path`; all agents train when the block begins."""
    cluster = DrillCluster(config, path, program)
    cluster.write_config()
    async with AsyncExitStack() as opened:
        opened.push_async_callback(cluster.close)
        await cluster.start_replay()
        for agent_id in cluster.agents:
            proxy, way = await opened.enter_async_context(proxied(cluster.address))
            cluster.proxies[agent_id], cluster._ways[agent_id] = proxy, way
            await cluster.start_learner(agent_id)
        await cluster.until_training(cluster.agents)
        yield cluster
