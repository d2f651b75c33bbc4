"""A local cluster to break: a durable replay, K learners each behind a proxy, and what is known of them."""

import asyncio
import os
import shutil
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import tomli_w
from prometheus_client.parser import text_string_to_metric_families

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import DaseError, NodeFailedError, UnreachableError
from dase_grpc.launch.drill.evidence import Life
from dase_grpc.launch.drill.proxy import Proxy, proxied
from dase_grpc.launch.local import PROGRAM
from dase_grpc.launch.processes import Node, end_nodes, listening_address, start_node
from dase_grpc.replay.client.channels import open_channel
from dase_grpc.replay.client.cluster import ClusterClient
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
ANY_PORT: Final = Address("127.0.0.1", 0)
ACKNOWLEDGED: Final = "dase_explorer_acknowledged_transitions_total"


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
        if self.node.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.node.process.pid, number)
                self.frozen = number == signal.SIGSTOP or (self.frozen and number != signal.SIGCONT)

    @property
    def life(self) -> Life:
        """What is known of it."""
        process = self.node.process
        return Life(self.agent_id, process.pid, self.acknowledged, process.returncode == 0)


def require_code(learner: DrillLearner, code: int, *, says: str) -> None:
    """Checks how a learner has ended.

    Raises:
        NodeFailedError: with another exit code, or without a sentence in its log.
    """
    if learner.node.process.returncode != code or says not in learner.node.log.read_text(errors="replace"):
        raise NodeFailedError(str(learner.node.failure(f"did not end with exit code {code} and {says!r}")))


def _copy_agent(run_dir: Path, to: Path, agent_id: int) -> None:
    """Copies what a learner resumes from; the folders of other agents may be changing."""
    own = Path("agents") / str(agent_id)
    shutil.copytree(run_dir / own, to / own)
    shutil.copy(run_dir / RUN_FILE, to / RUN_FILE)


def read_metrics(port: int) -> dict[str, float]:
    """What a node exports on this machine: each metric, summed over its labels; nothing if it is silent."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=STATUS_S) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return {}
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def _acknowledged(port: int) -> int:
    """What a learner knows to be committed; 0 where it does not tell."""
    return int(read_metrics(port).get(ACKNOWLEDGED, 0))


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


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
        """Starts the replay, on the port it had before; returns once it answers.

        Raises:
            NodeFailedError: it did not come up.
        """
        replay, train = self.config.replay, self.config.train
        self.replay_metrics_port = free_port()
        self.replay = node = await self._start(
            "replay",
            "--role=replay",
            f"--listen={self.address}",
            f"--data-dir={self.data_dir}",
            f"--capacity={replay.capacity}",
            f"--min-size={replay.min_size}",
            f"--seed={train.seed}",
            "--run-id=drill",
            f"--metrics-port={self.replay_metrics_port}",
            read_stdout=True,
        )
        self.address = await listening_address(node, within_s=READY_S)

    async def start_learner(self, agent_id: int, *, elsewhere: bool = False) -> DrillLearner:
        """Starts an agent's next learner, which goes on from the checkpoint of the one before.

        elsewhere: in a copy of its run directory, as on another machine, for the one before still holds it.
        """
        before = self.learners.get(agent_id)
        run_dir = before.run_dir if before else self.path / "run"
        if before and elsewhere:
            run_dir = self.path / f"run-{self._started}"
            await asyncio.to_thread(_copy_agent, before.run_dir, run_dir, agent_id)
        port = free_port()
        node = await self._start(
            f"learner-{agent_id}",
            "--role=learner",
            f"--replay={self._ways[agent_id]}",
            f"--agent={agent_id}",
            f"--config={self.path / CONFIG}",
            f"--run-dir={run_dir}",
            f"--metrics-port={port}",
            *(["--resume"] if before else []),
        )
        if before:
            self.gone.append(before)
        self.learners[agent_id] = learner = DrillLearner(agent_id, node, run_dir, port)
        return learner

    async def note_acknowledged(self, agent_ids: Iterable[int]) -> None:
        """Asks learners how many of their transitions they know to be committed."""
        for learner in (self.learners[agent_id] for agent_id in agent_ids):
            if not learner.frozen and learner.node.process.returncode is None:
                learner.acknowledged = max(
                    learner.acknowledged, await asyncio.to_thread(_acknowledged, learner.metrics_port)
                )

    async def status(self) -> dict[int, cluster_pb2.AgentStatus]:
        """The agents as the replay, asked past the proxies, knows them.

        Raises:
            RefusalError: it does not answer.
        """
        async with open_channel(self.address) as channel:
            answer = await ClusterClient(channel, str(self.address)).status(timeout_s=STATUS_S)
        return {agent.agent_id: agent for agent in answer.agents}

    async def epochs(self) -> dict[int, int]:
        """Each agent's lease epoch."""
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
                    self._require_running(missing)
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
        """Lets the learners drain and leave, then the replay.

        Raises:
            NodeFailedError: one did not end well.
        """
        await self.note_acknowledged(self.agents)
        nodes = [learner.node for learner in self.learners.values()]
        await end_nodes(nodes)
        if self.replay is not None:
            await end_nodes([self.replay])
            nodes.append(self.replay)
        for node in nodes:
            if node.process.returncode != 0:
                raise node.failure("did not end well when it was told to")

    async def kill(self, node: Node) -> None:
        """SIGKILL; returns when the process has ended, and kills what it has left behind."""
        if node.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(node.process.pid, signal.SIGKILL)
        await node.ended()

    async def close(self) -> None:
        """Kills whatever still runs, frozen or not."""
        nodes = [learner.node for learner in (*self.gone, *self.learners.values())]
        await end_nodes([*nodes, *([self.replay] if self.replay else [])], within_s=0.0)

    def _require_running(self, agent_ids: Collection[int]) -> None:
        for agent_id in agent_ids:
            node = self.learners[agent_id].node
            if node.process.returncode is not None:
                raise node.failure("ended")

    async def _answered(self) -> dict[int, cluster_pb2.AgentStatus]:
        """The status, or nothing while the replay does not answer."""
        try:
            return await self.status()
        except DaseError:
            if self.replay is not None and self.replay.process.returncode is not None:
                raise self.replay.failure("ended") from None
            return {}

    async def _start(self, name: str, *arguments: str, read_stdout: bool = False) -> Node:
        self._started += 1
        return await start_node(
            name,
            (*self.program, "node", "--stdin-is-leash", *arguments),
            log=self.path / "logs" / f"{self._started:03d}-{name}.log",
            threads=self.config.train.threads,
            read_stdout=read_stdout,
        )


@asynccontextmanager
async def open_cluster(
    config: RunConfig, path: Path, *, program: Sequence[str] = PROGRAM
) -> AsyncIterator[DrillCluster]:
    """Starts a drill's cluster in the folder `path`; all agents train when the block begins.

    Raises:
        NodeFailedError: a node could not start.
        UnreachableError: an agent did not come to train.
    """
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
