"""Who competes in against_reverb.py: this project's replay, Reverb, and a bare TCP socket.

Each is a server in a process of its own and a client, and does rounds of inserting or sampling when told to.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import psutil
from measuring import Round, cpu_s
from replay import random_rows, replay_process

from dase_grpc.errors import DaseError
from dase_grpc.replay.buffer.sampling import UNIFORM, Sampling
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.wire.packed import ROWS_BYTES
from dase_grpc.schema import Array, TransitionSchema

BATCH: Final = 256
AHEAD: Final = 16
"""Batches that are asked for ahead of their use; Reverb's pipeline holds about as many."""

TOGETHER: Final = 8
"""Batches that are asked for at once, and may come in one message."""

CHUNK_S: Final = 0.05
"""How old the first transition of a chunk may be when the chunk is sent."""

BLOCK: Final = 256
"""Rows of a message that only fills the buffer."""

FILL_WINDOW: Final = 1024
"""Rows of these that may be under way."""

KINDS_OF_ROWS: Final = 1024
ROWS_A_LOOK: Final = 64

REVERB: Final = Path(__file__).with_name("reverb_process.py")
TCP: Final = Path(__file__).with_name("tcp_gather.py")


class Ours:
    """A replay node, and a client on an event loop that runs during rounds only.

    Args:
        runner: the process's event loop; gRPC wants one for all.
        m: observation components.
        n: action components.
        capacity: transitions that the buffer holds.
        batch: transitions of a batch.
    """

    def __init__(self, runner: asyncio.Runner, m: int, n: int, *, capacity: int, batch: int = BATCH) -> None:
        self._batch = batch
        self.schema = TransitionSchema("benchmark", m, n, (-1.0,) * n, (1.0,) * n)
        self._process = replay_process(capacity, None)
        self._runner = runner
        self._inserts = 0

    def __enter__(self) -> Self:
        self.address, server = self._process.__enter__()
        self.server_pid = server.pid
        self._runner.run(self._connect())
        return self

    def __exit__(self, *error: Any) -> None:
        self._runner.run(self._disconnect())
        self._process.__exit__(None, None, None)

    def fill(self, count: int) -> None:
        """Stores rows."""
        self._runner.run(self._fill(count))

    def insert_named(self, seconds: float) -> Round:
        """Packs the columns of one transition after the other, and sends chunks."""
        return self._insert_for(seconds, self._named())

    def insert_packed(self, seconds: float) -> Round:
        """Copies one row after the other, and sends chunks."""
        return self._insert_for(seconds, self._packed())

    def sample(self, seconds: float) -> Round:
        """Takes batches."""
        return self._timed(self._sample(time.perf_counter() + seconds))

    def sample_by(self, sampling: Sampling, seconds: float) -> Round:
        """Takes batches that are drawn like that; with priorities it gives each row a TD error."""
        return self._timed(self._sample_by(sampling, time.perf_counter() + seconds))

    async def _connect(self) -> None:
        self._channel = open_channel(self.address)
        member = await ClusterClient(self._channel, str(self.address)).join(
            node_name="benchmark", schema=self.schema, agent_id=None
        )
        self._target = StreamTarget(self._channel, str(self.address), member, self.schema)
        self._samplers: dict[Sampling, Sampler] = {}

    async def _disconnect(self) -> None:
        for sampler in self._samplers.values():
            sampler.cancel()
        await self._channel.close()

    async def _fill(self, count: int) -> None:
        rows = random_rows(self.schema, BLOCK, self._target.member.agent_id)
        inserter = await Inserter(self._target, writer_id=f"fill-{count}", window=FILL_WINDOW).open()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(inserter.receive())
            for start in range(0, count, BLOCK):
                await inserter.append(rows[: count - start])
            await inserter.finish()

    def _insert_for(self, seconds: float, write: Callable[[Array, int], None]) -> Round:
        until = time.perf_counter() + seconds
        return self._timed(self._insert(lambda done: time.perf_counter() < until, write))

    async def _insert(self, going_on: Callable[[int], bool], write: Callable[[Array, int], None]) -> int:
        """Collects rows one by one and sends them once the oldest is CHUNK_S old or a message is full.

        Returns how many, once all are acknowledged.
        """
        self._inserts += 1
        inserter = await Inserter(self._target, writer_id=f"round-{self._inserts}").open()
        chunk = self.schema.empty(ROWS_BYTES // self.schema.row_bytes // ROWS_A_LOOK * ROWS_A_LOOK)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(inserter.receive())
            filled, done, began = 0, 0, time.perf_counter()
            while going_on(done):
                for _ in range(ROWS_A_LOOK):
                    write(chunk[filled], done)
                    filled += 1
                    done += 1
                if filled == len(chunk) or time.perf_counter() - began > CHUNK_S:
                    await inserter.append(chunk[:filled])
                    filled, began = 0, time.perf_counter()
            await inserter.append(chunk[:filled])
            await inserter.finish()
        return done

    def _packed(self) -> Callable[[Array, int], None]:
        rows = list(random_rows(self.schema, KINDS_OF_ROWS, self._target.member.agent_id))

        def write(row: Array, index: int) -> None:
            row[:] = rows[index % KINDS_OF_ROWS]

        return write

    def _named(self) -> Callable[[Array, int], None]:
        rows = random_rows(self.schema, KINDS_OF_ROWS, self._target.member.agent_id)
        columns = [[row[part].copy() for part in self.schema.columns.values()] for row in rows]

        def write(row: Array, index: int) -> None:
            np.concatenate(columns[index % KINDS_OF_ROWS], out=row)

        return write

    async def _stream(self, sampling: Sampling) -> Sampler:
        if sampling not in self._samplers:
            made = Sampler(
                self._target, batch_size=self._batch, sampling=sampling, batches_per_frame=TOGETHER
            )
            self._samplers[sampling] = await made.open(credits=AHEAD)
        return self._samplers[sampling]

    async def _sample(self, until: float) -> int:
        return await taken_from(await self._stream(UNIFORM), until)

    async def _sample_by(self, sampling: Sampling, until: float) -> int:
        sampler, done = await self._stream(sampling), 0
        errors = np.random.default_rng(0).exponential(size=self._batch).astype(np.float32)
        while time.perf_counter() < until:
            drawings = [(await sampler.next()).drawing for _ in range(TOGETHER)]
            await sampler.tell(deque(each.message(errors) for each in drawings if each is not None))
            await sampler.grant(TOGETHER)
            done += TOGETHER
        return done

    def _timed(self, work: Coroutine[Any, Any, int]) -> Round:
        return timed(lambda: self._runner.run(work), os.getpid(), self.server_pid)


async def taken_from(sampler: Sampler, until: float) -> int:
    """Takes batches until then, and at least as many as are granted together; how many."""
    done = 0
    while not done or time.perf_counter() < until:
        for _ in range(TOGETHER):
            await sampler.next()
        await sampler.grant(TOGETHER)
        done += TOGETHER
    return done


class Tcp:
    """The server of tcp_gather.py, and a client that reads into a buffer that it uses again."""

    def __init__(self, m: int, n: int, rows: int) -> None:
        self._width = TransitionSchema("benchmark", m, n, (-1.0,) * n, (1.0,) * n).width
        self._rows = rows

    def __enter__(self) -> Self:
        command = [sys.executable, str(TCP), str(self._rows), str(self._width), str(BATCH)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._socket = socket.create_connection(("127.0.0.1", int(first_line(self._process))))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(bytes(AHEAD))
        self._batch = np.empty((BATCH, self._width), np.float32).data.cast("B")
        return self

    def __exit__(self, *error: Any) -> None:
        self._socket.close()
        end(self._process)

    def sample(self, seconds: float) -> Round:
        """Takes batches."""
        until = time.perf_counter() + seconds
        return timed(lambda: self._sample(until), os.getpid(), self._process.pid)

    def _sample(self, until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            missing = self._batch
            while missing:
                missing = missing[self._socket.recv_into(missing) :]
            self._socket.sendall(b"\0")
            done += 1
        return done


class Reverb:
    """A Reverb server and client, processes of its own virtual environment.

    form: `named` columns, as everybody uses it, or `packed` into one vector by the user.
    sampling: `uniform`, or `prioritised`.
    """

    def __init__(self, python: Path, m: int, n: int, form: str, sampling: str = "uniform") -> None:
        self._command = [str(python), str(REVERB)]
        self._task = [str(m), str(n), form]
        self._sampling = sampling

    def __enter__(self) -> Self:
        self._server = self._start("server", *self._task, self._sampling)
        self.server_pid = self._server.pid
        port = first_line(self._server)
        self._client = self._start("client", *self._task, port, str(self.server_pid))
        first_line(self._client)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end(self._client)
        end(self._server)

    def fill(self, count: int) -> None:
        """Stores rows."""
        self._tell("fill", str(count))

    def insert(self, method: str, seconds: float) -> Round:
        """Stores rows in an empty table."""
        self._tell("empty")
        return Round(**self._tell("insert", method, str(seconds)))

    def sample(self, method: str, seconds: float) -> Round:
        """Takes batches."""
        return Round(**self._tell("sample", method, str(seconds)))

    def learn(self, method: str, seconds: float) -> Round:
        """Takes batches, and gives their transitions new priorities."""
        return Round(**self._tell("learn", method, str(seconds)))

    def _start(self, *given: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*self._command, *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _tell(self, *words: str) -> dict[str, Any]:
        assert self._client.stdin is not None
        self._client.stdin.write(" ".join(words) + "\n")
        self._client.stdin.flush()
        answer: dict[str, Any] = json.loads(first_line(self._client))
        return answer


def first_line(process: "subprocess.Popen[str]") -> str:
    """The next line of what a process prints.

    Raises:
        DaseError: it has ended.
    """
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        words = process.args if isinstance(process.args, list) else [process.args]
        raise DaseError(f"{' '.join(map(str, words))} ended before its time, with exit code {process.wait()}")
    return line.strip()


def end(process: "subprocess.Popen[str]") -> None:
    """Kills a process and what it has started: a waiting Reverb server ignores everything milder."""
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.communicate()


def timed(work: Callable[[], int], client: int, server: int) -> Round:
    """Does a round, and measures it."""
    before, started = (cpu_s(client), cpu_s(server)), time.perf_counter()
    events = work()
    seconds = time.perf_counter() - started
    return Round(events, seconds, cpu_s(client) - before[0], cpu_s(server) - before[1])
