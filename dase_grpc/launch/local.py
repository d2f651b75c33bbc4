"""A whole run on one machine: one replay, K learners and their actors as processes, watched from here."""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from types import TracebackType
from typing import Final, Self

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import DaseError, NodeFailedError, UnreachableError
from dase_grpc.launch.display import Display, Snapshot, pasted
from dase_grpc.launch.processes import Node, end_nodes, kill_nodes, listening_address, start_node
from dase_grpc.launch.storage import keeps_on_disk
from dase_grpc.launch.supervision import (
    MAX_RESTARTS,
    Silence,
    Supervision,
    Supervisor,
    is_lasting,
    silent_nodes,
)
from dase_grpc.process.lifecycle import is_orphaned
from dase_grpc.process.tasks import first_cause, unless
from dase_grpc.replay.client.channels import open_channel
from dase_grpc.replay.client.cluster import ClusterClient
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.messages import progress_from_proto
from dase_grpc.replay.wire.v1.cluster_pb2 import StatusResponse
from dase_grpc.runs.directory import RUN_FILE, RunDirectory

PROGRAM: Final = (sys.executable, "-m", "dase_grpc")
READY_S: Final = 30.0
POLL_S: Final = 0.5
STATUS_S: Final = 2.0
ACTORS_END_S: Final = 15.0
"""How long actors may take to notice that their agents have finished."""

HURRY_S: Final = 3.0
"""How long learners, and then the replay, may drain where this process's own launcher is gone."""

Actor = tuple[int, int]
"""Whose it is, and which of that agent's actors."""

ANY_PORT: Final = Address("127.0.0.1", 0)


class LocalCluster:
    """The processes of one run, for the time of an `async with` block; none outlives it.

    Nor does any outlive this process, however it dies: a node whose leash closes drains and ends by
    itself. `program` is the command that is `dase`. With `resume` learners go on from their checkpoints.

    A node that fails is started again, the replay at the same address, a learner from its last checkpoint,
    an actor as a new one, while the others go on (supervision.py). Not so one that would end the same way
    again. One that lives and is silent (supervision.py) has failed too.

    Attributes:
        hurry: nodes that are to end get `HURRY_S` for it, not `STOP_S`.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        *,
        gpu: int | None = None,
        program: Sequence[str] = PROGRAM,
        resume: bool = False,
        supervision: Supervision | None = None,
    ) -> None:
        self.hurry = False
        self.replay: Node | None = None
        self.learners: list[Node] = []
        self.actors: dict[Actor, Node] = {}
        self._resume = resume
        self._config = config
        self._directory = directory
        self._gpu = gpu
        self._program = program
        self._supervisor = Supervisor(directory, supervision or Supervision(say=lambda text: None))
        self._silence = Silence()
        self._stopping = False
        self._address = ANY_PORT

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> Address:
        """Starts the replay node and, once it answers, learners and actors, which join by themselves.

        Raises:
            NodeFailedError: the replay ended or stayed silent instead, and no restart would mend that.
        """
        self._address = await self._first_replay()
        for agent_id in range(self._config.train.agents):
            self.learners.append(await self._start_learner(agent_id, resume=self._resume))
        for actor in product(range(self._config.train.agents), range(self._config.train.actors)):
            self.actors[actor] = await self._start_actor(actor)
        return self._address

    async def wait(self) -> None:
        """Returns when all learners have ended well and then their actors; may be cancelled and called again.

        Where a learner is given up, the others train to their end first; without a replay all end.

        Raises:
            NodeFailedError: a node was given up, or no restart would mend it; carries the end of its log.
        """
        with first_cause():
            async with asyncio.TaskGroup() as tasks:
                replay = tasks.create_task(self._keep_replay())
                learners = [tasks.create_task(self._keep_learner(each)) for each in range(len(self.learners))]
                actors = [tasks.create_task(self._keep_actor(each)) for each in self.actors]
                await asyncio.wait(learners)
                if actors:
                    await asyncio.wait(actors, timeout=ACTORS_END_S)
                for task in (replay, *actors):
                    task.cancel()
        self._supervisor.require_all()

    def heard(self, status: StatusResponse | None) -> None:
        """Takes note of what the replay has answered, None for nothing; kills a node silent for too long.

        What becomes of it then is decided where it is waited for.
        """
        now = asyncio.get_running_loop().time()
        env_timeout_s = self._config.env.timeout_s
        silent = silent_nodes(status, self.replay, self.learners, env_timeout_s=env_timeout_s, now=now)
        for node in self._silence.over(silent, now=now):
            node.kill(f"it was not heard of for {silent[node]:g} s")

    async def stop_learners(self) -> None:
        """Lets the actors drain, then the learners, which keep checkpoints and leave; or they are killed."""
        self._stopping = True
        try:
            await self._end([*self.actors.values()])
        finally:
            await self._end(self.learners)

    async def close(self) -> None:
        """Ends every process: actors and learners first, so that they can drain, then the replay."""
        try:
            await self.stop_learners()
        finally:
            await self._end([self.replay] if self.replay else [])

    def kill(self) -> None:
        """Kills every process at once; may be called from a signal handler."""
        kill_nodes([*self.actors.values(), *self.learners, *([self.replay] if self.replay else [])])

    async def _end(self, nodes: Sequence[Node]) -> None:
        if self.hurry:
            await end_nodes(nodes, within_s=HURRY_S)
        else:
            await end_nodes(nodes)

    async def _first_replay(self) -> Address:
        """The address of the first replay that answers."""
        again = False
        while True:
            try:
                return await self._start_replay(again=again)
            except NodeFailedError:
                node = self._running_replay()
                if is_lasting(await node.ended(), at_restart=again) or not await self._supervisor.rest(node):
                    raise
                self._supervisor.started(node)
                again = True

    def _running_replay(self) -> Node:
        if self.replay is None:
            raise TypeError("no replay was started")
        return self.replay

    async def _start_replay(self, *, again: bool = False) -> Address:
        replay, metrics = self._config.replay, self._config.metrics.port
        data_dir = (f"--data-dir={self._directory.replay}",) if keeps_on_disk(self._config) else ()
        self.replay = node = await self._start(
            "replay",
            "--role=replay",
            f"--listen={self._address}",
            f"--capacity={replay.capacity}",
            f"--min-size={replay.min_size}",
            f"--seed={self._config.train.seed}",
            f"--run-id={self._directory.name}",
            f"--metrics-port={metrics}",
            *data_dir,
            read_stdout=True,
            again=again,
        )
        try:
            address = await listening_address(node, within_s=READY_S)
        except NodeFailedError:
            node.kill("it did not answer")
            await node.ended()
            raise
        node.heard = True
        return address

    async def _start_learner(self, agent_id: int, *, resume: bool, again: bool = False) -> Node:
        port = self._config.metrics.port and self._config.metrics.port + 1 + agent_id
        gpu = () if self._gpu is None else (f"--gpu={self._gpu}",)
        return await self._start(
            f"learner-{agent_id}",
            "--role=learner",
            f"--replay={self._address}",
            f"--agent={agent_id}",
            f"--config={self._directory.path / 'run.toml'}",
            f"--run-dir={self._directory.path}",
            f"--metrics-port={port}",
            *gpu,
            *(["--resume"] if resume else []),
            again=again,
        )

    async def _start_actor(self, actor: Actor, *, again: bool = False) -> Node:
        (agent_id, index), train, port = actor, self._config.train, self._config.metrics.port
        nth = 1 + train.agents + agent_id * train.actors + index
        return await self._start(
            f"actor-{agent_id}-{index}",
            "--role=actor",
            f"--replay={self._address}",
            f"--agent={agent_id}",
            f"--config={self._directory.path / 'run.toml'}",
            f"--metrics-port={port and port + nth}",
            again=again,
        )

    async def _start(
        self, name: str, *arguments: str, read_stdout: bool = False, again: bool = False
    ) -> Node:
        return await start_node(
            name,
            (*self._program, "node", "--stdin-is-leash", *arguments),
            log=self._directory.logs / f"{name}.log",
            threads=self._config.train.threads,
            read_stdout=read_stdout,
            again=again,
        )

    async def _keep_learner(self, agent_id: int) -> None:
        """Returns when the learner has ended well, was told to end, or is given up."""
        while True:
            node = self.learners[agent_id]
            code = await node.ended()
            done = code == 0 and (self._stopping or self._supervisor.has_last_step(agent_id))
            if done or self._supervisor.has_given_up(node):
                return
            if self._stopping and (code == -signal.SIGTERM or node.name in self._supervisor.resting):
                return  # told before it could handle the signal, or while it was not there
            if self._stopping or is_lasting(code, at_restart=node.is_restarting):
                raise node.failure("ended")
            if not await self._supervisor.rest(node, agent_id=agent_id):
                return
            self.learners[agent_id] = await self._start_learner(agent_id, resume=True, again=True)
            self._supervisor.started(node)

    async def _keep_actor(self, actor: Actor) -> None:
        """Returns when the actor has ended because its agent has, was told to end, or is given up."""
        while True:
            node = self.actors[actor]
            code = await node.ended()
            done = code == 0 and self._supervisor.has_last_step(actor[0])
            if done or self._stopping or self._supervisor.has_given_up(node):
                return
            if is_lasting(code, at_restart=node.is_restarting):
                raise node.failure("ended")
            if not await self._supervisor.rest(node):
                return
            self.actors[actor] = await self._start_actor(actor, again=True)
            self._supervisor.started(node)

    async def _keep_replay(self) -> None:
        """Runs until cancelled.

        Raises:
            NodeFailedError: it is given up, or no restart would mend it.
        """
        while self.replay is not None:
            node = self.replay
            code = await node.ended()
            if self._stopping and node.name in self._supervisor.resting:
                return  # a learner that has transitions for it says so by its exit code
            if self._stopping or is_lasting(code, at_restart=node.is_restarting):
                raise node.failure("ended while learners were training")
            if not await self._supervisor.rest(node):
                raise self._supervisor.failure(node)
            self._supervisor.started(node)
            with suppress(NodeFailedError):  # it has ended, which the next round finds
                await self._start_replay(again=True)


async def run_cluster(
    config: RunConfig,
    directory: RunDirectory,
    *,
    gpu: int | None,
    stop: asyncio.Event,
    display: Display,
    say: Callable[[str], None],
    program: Sequence[str] = PROGRAM,
    resume: bool = False,
    max_restarts: int = MAX_RESTARTS,
    on_open: Callable[[LocalCluster], None] = lambda cluster: None,
    on_start: Callable[[Address], None] = lambda address: None,
) -> None:
    """Runs a local cluster to its end, or until `stop`; no process is left when it returns or raises.

    `say` gets a sentence when a node fails, and when `stop` was set; the display has ended by then.
    `on_open` gets the cluster before anything is started, `on_start` the replay's address once all are.

    Raises:
        NodeFailedError: a node ended before its time and was not, or could not be, started again.
    """
    supervision = Supervision(say, max_restarts)
    cluster = LocalCluster(
        config, directory, gpu=gpu, program=program, resume=resume, supervision=supervision
    )
    on_open(cluster)
    with first_cause():
        async with cluster:
            address = await unless(stop, cluster.start())
            if address is not None:
                on_start(address)
                if config.eval.by == "evaluator":
                    say(_how_to_evaluate(address, directory))
                with display:
                    await unless(stop, _train(cluster, address, config, display))
            cluster.hurry = is_orphaned(stop)
            if stop.is_set():
                say("stopping: the learners send what is left and keep their checkpoints (Ctrl-C kills)")
            if stop.is_set() and address is not None:
                await cluster.stop_learners()
                await cluster.wait()


def _how_to_evaluate(address: Address, directory: RunDirectory) -> str:
    """What to start where eval.by leaves evaluation to a node that somebody else starts."""
    path = pasted(directory.path)
    return (
        f"eval.by = evaluator, so start one: dase node --role evaluator --replay {address} "
        f"--config {path}/{RUN_FILE} --run-dir {path}"
    )


async def _train(cluster: LocalCluster, address: Address, config: RunConfig, display: Display) -> None:
    """Shows the run until all learners have ended well."""
    async with open_channel(address) as channel:
        client = ClusterClient(channel, str(address))
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch(cluster, client, config, display))
            await cluster.wait()
            watching.cancel()
        with suppress(DaseError):
            _show(await client.status(timeout_s=STATUS_S), config, display)


async def _watch(cluster: LocalCluster, client: ClusterClient, config: RunConfig, display: Display) -> None:
    """Shows the run's status, and lets the cluster know of it, until cancelled."""
    while True:
        try:
            status = await client.status(timeout_s=STATUS_S)
        except UnreachableError:
            cluster.heard(None)
        except DaseError:
            pass  # a refusal is an answer too
        else:
            cluster.heard(status)
            _show(status, config, display)
        await asyncio.sleep(POLL_S)


def _show(status: StatusResponse, config: RunConfig, display: Display) -> None:
    known = {agent.agent_id: progress_from_proto(agent.progress) for agent in status.agents}
    display.show(
        Snapshot(
            agents=[known.get(agent_id) for agent_id in range(config.train.agents)],
            buffer_size=status.buffer.size,
            buffer_capacity=status.buffer.capacity,
            actors=[node.attendance.env_steps_per_second for node in status.nodes if node.role == "actor"],
        )
    )
