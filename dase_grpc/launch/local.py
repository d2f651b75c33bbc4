"""A whole run on one machine: one replay, K learners and their actors as processes, watched from here."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from types import TracebackType
from typing import Self

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import DaseError, NodeFailedError, UnreachableError
from dase_grpc.launch.console import pasted
from dase_grpc.launch.display import Display, Snapshot
from dase_grpc.launch.forks import ForkServer
from dase_grpc.launch.processes import (
    ANY_PORT,
    PROGRAM,
    Node,
    end_nodes,
    kill_nodes,
    listening_address,
    node_arguments,
    start_node,
)
from dase_grpc.launch.room import keeps_on_disk
from dase_grpc.launch.supervision import USUAL, Silence, Supervisor, Timing, is_lasting, silent_nodes
from dase_grpc.process.lifecycle import is_orphaned
from dase_grpc.process.tasks import first_cause, unless
from dase_grpc.replay.client.cluster import ClusterClient, open_channel
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.messages import progress_from_proto
from dase_grpc.replay.wire.v1.cluster_pb2 import StatusResponse
from dase_grpc.runs.directory import RUN_FILE, RunDirectory

Actor = tuple[int, int]
"""Whose it is, and which of that agent's actors."""


@dataclass(eq=False)
class LocalCluster:
    """The processes of one run, for the time of an `async with` block; none outlives it.

    Nor does any outlive this process, however it dies: a node whose leash closes drains and ends by
    itself; in a `hurry` it has `timing.hurry_s` for it. Learners take `gpus`, by index, in turn; without any
    the CPU. `program` is the command that is `dase`; where that is `PROGRAM`, all that start with the run but
    the replay are made by `forks`, which end then. With `resume` learners go on from their checkpoints.

    A node that fails, or lives and is silent, is started again, the replay at the same address, a learner
    from its last checkpoint, an actor as a new one, while the others go on (supervision.py). Not so one that
    would end the same way again.
    """

    config: RunConfig
    directory: RunDirectory
    supervisor: Supervisor
    gpus: Sequence[int] = ()
    program: Sequence[str] = PROGRAM
    forks: ForkServer | None = None
    resume: bool = False
    timing: Timing = USUAL
    hurry: bool = field(default=False, init=False)
    replay: Node | None = field(default=None, init=False)
    learners: list[Node] = field(default_factory=list, init=False)
    actors: dict[Actor, Node] = field(default_factory=dict, init=False)
    _silence: Silence = field(default_factory=Silence, init=False)
    _stopping: bool = field(default=False, init=False)
    _address: Address = field(default=ANY_PORT, init=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> Address:
        """Starts the replay node and, once it answers, learners and actors, which join by themselves."""
        self._address = await self._first_replay()
        for agent_id in range(self.config.train.agents):
            self.learners.append(await self._start_learner(agent_id, resume=self.resume))
        for actor in product(range(self.config.train.agents), range(self.config.train.actors)):
            self.actors[actor] = await self._start_actor(actor)
        if self.forks is not None:
            self.forks.close()
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
                    await asyncio.wait(actors, timeout=self.timing.actors_end_s)
                for task in (replay, *actors):
                    task.cancel()
        self.supervisor.require_all()

    def heard(self, status: StatusResponse | None) -> None:
        """Takes note of what the replay has answered, None for nothing; kills a node silent for too long.

        What becomes of it then is decided where it is waited for.
        """
        now = asyncio.get_running_loop().time()
        silent = silent_nodes(
            status,
            self.replay,
            self.learners,
            silent_s=self.timing.silent_s,
            env_timeout_s=self.config.env.timeout_s,
            now=now,
        )
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
        await end_nodes(nodes, within_s=self.timing.hurry_s if self.hurry else self.timing.stop_s)

    async def _first_replay(self) -> Address:
        """The address of the first replay that answers."""
        again = False
        while True:
            node = await self._start_replay(again=again)
            try:
                return await self._answer(node)
            except NodeFailedError:
                if is_lasting(await node.ended(), at_restart=again) or not await self.supervisor.rest(node):
                    raise
                self.supervisor.started(node)
                again = True

    async def _start_replay(self, *, again: bool) -> Node:
        self.replay = await self._start(
            "replay",
            node_arguments(
                "replay",
                listen=self._address,
                capacity=self.config.replay.capacity,
                min_size=self.config.replay.min_size,
                seed=self.config.train.seed,
                run_id=self.directory.name,
                metrics_port=self.config.metrics.port,
                data_dir=self.directory.replay if keeps_on_disk(self.config) else None,
            ),
            read_stdout=True,
            again=again,
        )
        return self.replay

    async def _answer(self, node: Node) -> Address:
        """The address of a replay that was started; one that gives none is killed."""
        try:
            address = await listening_address(node, within_s=self.timing.ready_s)
        except NodeFailedError:
            node.kill("it did not answer")
            await node.ended()
            raise
        node.heard = True
        return address

    async def _start_learner(self, agent_id: int, *, resume: bool, again: bool = False) -> Node:
        arguments = node_arguments(
            "learner",
            replay=self._address,
            agent=agent_id,
            config=self.directory.path / RUN_FILE,
            run_dir=self.directory.path,
            metrics_port=self._metrics_port(1 + agent_id),
            gpu=self.gpus[agent_id % len(self.gpus)] if self.gpus else None,
            resume=resume,
        )
        return await self._start(f"learner-{agent_id}", arguments, again=again)

    async def _start_actor(self, actor: Actor, *, again: bool = False) -> Node:
        (agent_id, index), train = actor, self.config.train
        arguments = node_arguments(
            "actor",
            replay=self._address,
            agent=agent_id,
            config=self.directory.path / RUN_FILE,
            metrics_port=self._metrics_port(1 + train.agents + agent_id * train.actors + index),
        )
        return await self._start(f"actor-{agent_id}-{index}", arguments, again=again)

    def _metrics_port(self, nth: int) -> int:
        """Of the node that is the nth after the replay; 0 where metrics are off."""
        return self.config.metrics.port and self.config.metrics.port + nth

    async def _start(
        self, name: str, arguments: Sequence[str], *, read_stdout: bool = False, again: bool = False
    ) -> Node:
        return await start_node(
            name,
            (*self.program, *arguments),
            log=self.directory.logs / f"{name}.log",
            threads=self.config.train.threads,
            read_stdout=read_stdout,
            again=again,
            forks=None if read_stdout or again else self.forks,
        )

    async def _rest(self, node: Node, code: int, *, what: str = "ended", agent_id: int | None = None) -> bool:
        """Returns when a node that has failed is due again; False if it is given up."""
        if self._stopping or is_lasting(code, at_restart=node.is_restarting):
            raise node.failure(what)
        return await self.supervisor.rest(node, agent_id=agent_id)

    async def _keep_learner(self, agent_id: int) -> None:
        """Returns when the learner has ended well, was told to end, or is given up."""
        while True:
            node = self.learners[agent_id]
            code = await node.ended()
            done = code == 0 and (self._stopping or self.supervisor.has_last_step(agent_id))
            if done or self.supervisor.has_given_up(node):
                return
            if self._stopping and (code == -signal.SIGTERM or node.name in self.supervisor.resting):
                return  # told before it could handle the signal, or while it was not there
            if not await self._rest(node, code, agent_id=agent_id):
                return
            self.learners[agent_id] = await self._start_learner(agent_id, resume=True, again=True)
            self.supervisor.started(node)

    async def _keep_actor(self, actor: Actor) -> None:
        """Returns when the actor has ended because its agent has, was told to end, or is given up."""
        while True:
            node = self.actors[actor]
            code = await node.ended()
            done = code == 0 and self.supervisor.has_last_step(actor[0])
            if done or self._stopping or self.supervisor.has_given_up(node):
                return
            if not await self._rest(node, code):
                return
            self.actors[actor] = await self._start_actor(actor, again=True)
            self.supervisor.started(node)

    async def _keep_replay(self) -> None:
        """Runs until cancelled."""
        while (node := self.replay) is not None:
            code = await node.ended()
            if self._stopping and node.name in self.supervisor.resting:
                return  # a learner that has transitions for it says so by its exit code
            if not await self._rest(node, code, what="ended while learners were training"):
                raise self.supervisor.failure(node)
            self.supervisor.started(node)
            with suppress(NodeFailedError):  # it has ended, which the next round finds
                await self._answer(await self._start_replay(again=True))


async def run_cluster(
    cluster: LocalCluster,
    *,
    stop: asyncio.Event,
    display: Display,
    say: Callable[[str], None],
    on_start: Callable[[Address], None] = lambda address: None,
) -> None:
    """Runs a local cluster to its end, or until `stop`; no process is left when it returns or raises.

    `say` gets a sentence when `stop` was set; the display has ended by then. `on_start` gets the replay's
    address once all are started.

    Raises:
        NodeFailedError: a node ended before its time and was not, or could not be, started again.
    """
    with first_cause():
        async with cluster:
            address = await unless(stop, cluster.start())
            if address is not None:
                on_start(address)
                if cluster.config.eval.by == "evaluator":
                    say(_how_to_evaluate(address, cluster.directory))
                with display:
                    await unless(stop, _train(cluster, address, display))
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


async def _train(cluster: LocalCluster, address: Address, display: Display) -> None:
    """Shows the run until all learners have ended well."""
    async with open_channel(address) as channel:
        client = ClusterClient(channel, str(address))
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch(cluster, client, display))
            await cluster.wait()
            watching.cancel()
        with suppress(DaseError):
            display.show(_snapshot(await client.status(timeout_s=cluster.timing.status_s), cluster.config))


async def _watch(cluster: LocalCluster, client: ClusterClient, display: Display) -> None:
    """Shows the run's status, and lets the cluster know of it, until cancelled."""
    while True:
        try:
            status = await client.status(timeout_s=cluster.timing.status_s)
        except UnreachableError:
            cluster.heard(None)
        except DaseError:
            pass  # a refusal is an answer too
        else:
            cluster.heard(status)
            display.show(_snapshot(status, cluster.config))
        await asyncio.sleep(cluster.timing.poll_s)


def _snapshot(status: StatusResponse, config: RunConfig) -> Snapshot:
    """What a replay says of a run, with a place for each of its agents."""
    known = {agent.agent_id: progress_from_proto(agent.progress) for agent in status.agents}
    return Snapshot(
        agents=[known.get(agent_id) for agent_id in range(config.train.agents)],
        buffer_size=status.buffer.size,
        buffer_capacity=status.buffer.capacity,
        actors=[node.attendance.env_steps_per_second for node in status.nodes if node.role == "actor"],
    )
