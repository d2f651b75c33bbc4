"""A whole run on one machine: one replay and K learner processes, watched from here."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from dase_grpc.config import RunConfig
from dase_grpc.errors import NodeFailedError, RefusalError
from dase_grpc.launch.display import Display, Snapshot
from dase_grpc.nodes.lifecycle import READY_PREFIX
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.wire.cluster import ClusterClient
from dase_grpc.wire.messages import progress_from_proto
from dase_grpc.wire.transport import Address, open_channel, parse_address

READY_S: Final = 30.0
POLL_S: Final = 0.5
STOP_S: Final = 45.0
SHOWN_LOG_LINES: Final = 60


@dataclass(frozen=True)
class Node:
    """A child process with a name and a log file."""

    name: str
    process: Process
    log: Path


@dataclass
class LocalCluster:
    """The processes of one run. None outlives `close`, or this process however it dies.

    Each child holds the read end of a pipe whose write end only this process has: a child whose
    pipe closes drains and ends by itself.
    """

    config: RunConfig
    directory: RunDirectory
    gpu: int | None = None
    replay: Node | None = None
    learners: list[Node] = field(default_factory=list)

    async def start_replay(self) -> Address:
        """Starts the replay node and waits until it answers.

        Raises:
            NodeFailedError: it ended or stayed silent instead.
        """
        replay, metrics = self.config.replay, self.config.metrics.port
        self.replay = await self._spawn(
            "replay",
            "--role=replay",
            "--listen=127.0.0.1:0",
            f"--capacity={replay.capacity}",
            f"--min-size={replay.min_size}",
            f"--seed={self.config.train.seed}",
            f"--run-id={self.directory.name}",
            f"--metrics-port={metrics}",
        )
        output = self.replay.process.stdout
        if output is None:
            raise TypeError("the replay's stdout is not a pipe")
        line = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                line = (await output.readline()).decode()
        if not line.startswith(READY_PREFIX):
            raise await self._failure(self.replay, f"did not come up within {READY_S:g} s")
        return parse_address(line.removeprefix(READY_PREFIX).strip())

    async def start_learners(self, address: Address) -> None:
        """Starts all learners; they join by themselves."""
        for agent_id in range(self.config.train.agents):
            port = self.config.metrics.port and self.config.metrics.port + 1 + agent_id
            gpu = () if self.gpu is None else (f"--gpu={self.gpu}",)
            self.learners.append(
                await self._spawn(
                    f"learner-{agent_id}",
                    "--role=learner",
                    f"--replay={address}",
                    f"--agent={agent_id}",
                    f"--config={self.directory.path / 'run.toml'}",
                    f"--run-dir={self.directory.path}",
                    f"--metrics-port={port}",
                    *gpu,
                )
            )

    async def wait(self) -> None:
        """Returns when all learners have ended well.

        Raises:
            NodeFailedError: a node ended before its time; carries the end of its log.
        """
        if self.replay is None:
            raise TypeError("the replay has not been started")
        async with asyncio.TaskGroup() as tasks:
            replay = tasks.create_task(self._replay_until_cancelled(self.replay))
            learners = [tasks.create_task(self._learner_to_its_end(node)) for node in self.learners]
            await asyncio.wait(learners)
            replay.cancel()

    async def close(self) -> None:
        """Ends every process: the learners first, so that they can drain, then the replay."""
        await _end([node.process for node in self.learners])
        await _end([self.replay.process] if self.replay else [])

    async def _learner_to_its_end(self, node: Node) -> None:
        if await node.process.wait() != 0:
            raise await self._failure(node, "ended")

    async def _replay_until_cancelled(self, node: Node) -> None:
        await node.process.wait()
        raise await self._failure(node, "ended while learners were training")

    async def _failure(self, node: Node, what: str) -> NodeFailedError:
        code = node.process.returncode
        how = "" if code is None else f" ({exit_text(code)})"
        tail = "\n".join(node.log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:])
        return NodeFailedError(f"{node.name} {what}{how}; the end of {node.log}:\n{tail or '(empty)'}")

    async def _spawn(self, name: str, *arguments: str) -> Node:
        self.directory.logs.mkdir(parents=True, exist_ok=True)
        path = self.directory.logs / f"{name}.log"
        with path.open("wb") as log:
            process = await _spawn(("node", "--stdin-is-leash", *arguments), log, self.config.train.threads)
        return Node(name, process, path)


async def run_cluster(
    config: RunConfig, directory: RunDirectory, *, gpu: int | None, stop: asyncio.Event, display: Display
) -> None:
    """Runs a local cluster to its end, or until `stop`; no process is left when it returns or raises.

    Raises:
        NodeFailedError: a node ended before its time; the others were stopped.
    """
    cluster = LocalCluster(config, directory, gpu)
    try:
        address = await cluster.start_replay()
        await cluster.start_learners(address)
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(open_channel(address))
            stack.enter_context(display)
            client = ClusterClient(channel, str(address))
            watching = asyncio.ensure_future(_watch(client, config, display))
            finished = asyncio.ensure_future(cluster.wait())
            stopped = asyncio.ensure_future(stop.wait())
            try:
                await asyncio.wait({finished, stopped, watching}, return_when=asyncio.FIRST_COMPLETED)
                if not finished.done() and not stopped.done():
                    watching.result()
                if stopped.done() and not finished.done():
                    await _end([node.process for node in cluster.learners])
                    await asyncio.wait({finished})
                finished.result()
            finally:
                for task in (watching, finished, stopped):
                    task.cancel()
                await asyncio.gather(watching, finished, stopped, return_exceptions=True)
                with suppress(RefusalError):
                    display.show(await _snapshot(client, config))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        await cluster.close()


async def _watch(client: ClusterClient, config: RunConfig, display: Display) -> None:
    """Shows the run's status until cancelled; a replay that does not answer is the cluster's to report."""
    while True:
        with suppress(RefusalError):
            display.show(await _snapshot(client, config))
        await asyncio.sleep(POLL_S)


async def _snapshot(client: ClusterClient, config: RunConfig) -> Snapshot:
    status = await client.status(timeout_s=2.0)
    known = {agent.agent_id: progress_from_proto(agent.progress) for agent in status.agents}
    return Snapshot(
        agents=[known.get(agent_id) for agent_id in range(config.train.agents)],
        buffer_size=status.buffer.size,
        buffer_capacity=status.buffer.capacity,
    )


async def _spawn(arguments: Sequence[str], log: IO[bytes], threads: int) -> Process:
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dase_grpc",
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
        stderr=log,
        env={**os.environ, **limits},
        start_new_session=True,
    )


async def _end(processes: Sequence[Process]) -> None:
    """Asks processes to end, waits, and kills those that do not."""
    for process in processes:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            await asyncio.gather(*(process.wait() for process in processes))
    for process in processes:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def exit_text(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
