"""The processes of scale.py: replays on disk whose processor time is looked at, and clients told by lines."""

import asyncio
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from measuring import cpu_s, resident_bytes
from storm import Lost, read_files

from dase_grpc.process.lifecycle import READY_PREFIX
from dase_grpc.replay.wire.addresses import Address, ReplayPlace
from dase_grpc.schema import Array

CLIENTS: Final = Path(__file__).with_name("scale_clients.py")
LOOK_S: Final = 0.25
PEAK_S: Final = 1.0
"""A peak of processor time is that of the busiest stretch of so many seconds."""

LISTENING: Final = (10_000, 30_000)
"""Ports below those that Linux gives to connections."""

LONGEST_LINE: Final = 2**24

Acknowledged = Counter[tuple[int, int, int]]
"""How many rows of each agent, light node of it (0 is the learner) and generation were acknowledged."""


@dataclass
class Shard:
    """One replay process, its address, its metrics and its data; started again in the same place."""

    address: Address
    metrics_port: int
    data_dir: Path
    arguments: tuple[str, ...]
    process: asyncio.subprocess.Process | None = None
    seen: list[tuple[float, float]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Of the process."""
        if self.process is None:
            raise Lost("the replay does not run")
        return self.process.pid

    async def start(self) -> None:
        """Returns once it answers."""
        log = self.data_dir.with_suffix(".log")
        with log.open("ab") as said:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "dase_grpc", "node", "--role=replay", f"--listen={self.address}"),
                *(f"--data-dir={self.data_dir}", f"--metrics-port={self.metrics_port}", *self.arguments),
                stdout=asyncio.subprocess.PIPE,
                stderr=said,
            )
        line = await self.process.stdout.readline() if self.process.stdout else b""
        if not line.decode().startswith(READY_PREFIX):
            why = log.read_text(encoding="utf-8").strip().rpartition("\n")[2]
            raise Lost(f"the replay at {self.address} did not come up: {why}")
        self.seen = [(time.monotonic(), cpu_s(self.pid))]

    async def end(self, *, kill: bool) -> None:
        """SIGKILL, or an end in order."""
        if self.process is not None and self.process.returncode is None:
            (self.process.kill if kill else self.process.terminate)()
            await self.process.wait()

    def look(self) -> None:
        """Notes how much processor time it has had."""
        if self.process is not None and self.process.returncode is None:
            with suppress(OSError):
                self.seen.append((time.monotonic(), cpu_s(self.pid)))

    def cores(self, since: float, *, within_s: float | None = None) -> float:
        """Cores that it took since then (monotonic seconds), or in the busiest stretch of that length."""
        seen = [each for each in self.seen if each[0] >= since - LOOK_S]
        if within_s is None:
            (began, first), (ended, last) = seen[0], seen[-1]
            return (last - first) / max(ended - began, LOOK_S)
        return max(
            (cpu - before) / (at - then)
            for then, before in seen
            for at, cpu in seen
            if at - then >= min(within_s, seen[-1][0] - seen[0][0]) > 0
        )


@dataclass
class Replays:
    """All shards of one replay."""

    shards: Sequence[Shard]

    @classmethod
    def in_folder(cls, folder: Path, count: int, capacity: int) -> "Replays":
        """Not started yet."""
        shards = []
        for index in range(count):
            arguments = ["--run-id=scale", f"--capacity={capacity // count}"]
            arguments += [f"--shard={index}/{count}"] if count > 1 else []
            address = Address("127.0.0.1", _free_port())
            shards.append(Shard(address, _free_port(), folder / f"replay-{index}", tuple(arguments)))
        return cls(shards)

    @property
    def place(self) -> ReplayPlace:
        """Where they are."""
        return ReplayPlace(tuple(each.address for each in self.shards))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs and looks at them within the block; then ends them in order."""
        looking = asyncio.ensure_future(self._look())
        try:
            await asyncio.gather(*(each.start() for each in self.shards))
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking])
            await asyncio.gather(*(each.end(kill=False) for each in self.shards))

    async def kill_and_start(self) -> float:
        """Kills all at once and starts them again; when they were there."""
        await asyncio.gather(*(each.end(kill=True) for each in self.shards))
        await asyncio.gather(*(each.start() for each in self.shards))
        return time.monotonic()

    def cores(self, since: float, *, within_s: float | None = None) -> float:
        """Of the busiest shard; see Shard."""
        for each in self.shards:
            each.look()
        return max(each.cores(since, within_s=within_s) for each in self.shards)

    def resident(self) -> int:
        """Bytes of the largest shard."""
        return max(resident_bytes(each.pid) for each in self.shards)

    def require_once(self, acknowledged: Acknowledged) -> None:
        """Raises Lost unless their files hold each acknowledged row once, and nothing else."""
        found: Counter[tuple[int, int, int, int]] = Counter()
        for shard in self.shards:
            found.update(_keys(read_files(shard.data_dir).rows))
        held: Acknowledged = Counter(key[:3] for key in found)
        twice = len(found) - sum(found.values())
        if twice or held != acknowledged:
            raise Lost(
                f"{sum(found.values())} rows are stored, {len(found)} of them different ones, and "
                f"{acknowledged.total()} were acknowledged"
            )

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for each in self.shards:
                each.look()


_taken: Final[set[int]] = set()


def _free_port() -> int:
    """A port that no connection of these crowds is given before a replay listens, or while it is away."""
    while True:
        port = random.randrange(*LISTENING)
        if port in _taken:
            continue
        _taken.add(port)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _keys(rows: Array) -> list[tuple[int, int, int, int]]:
    """Agent, node, generation and number of each row."""
    agents = rows.view("int32")[:, -2].tolist()
    who, seq, generation = rows[:, :3].astype(int).T.tolist()
    return list(zip(agents, who, generation, seq, strict=True))


class Clients:
    """Processes of light nodes that are told the same at the same time."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    @classmethod
    async def start(
        cls, place: ReplayPlace, *, agents: int, actors: int, processes: int, generation: int
    ) -> "Clients":
        """Shares the agents out over processes; none has joined yet."""
        shares = [range(agents)[index::processes] for index in range(min(processes, agents))]
        first, started = 0, []
        for share in shares:
            numbers = (first, len(share), agents, actors, generation)
            started.append(
                await asyncio.create_subprocess_exec(
                    *(sys.executable, str(CLIENTS), str(place), *map(str, numbers)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=LONGEST_LINE,
                )
            )
            first += len(share)
        return cls(started)

    async def tell(self, *command: Any) -> dict[str, Any]:
        """What all answer: lists one behind the other, numbers added up."""
        answers = await asyncio.gather(*(_told(process, command) for process in self._processes))
        return {name: sum((each[name] for each in answers[1:]), answers[0][name]) for name in answers[0]}

    async def acknowledged(self, *command: Any) -> Acknowledged:
        """The same of a command that is answered with what was acknowledged. Lost if the replay lost rows."""
        told = await self.tell(*command)
        if told.get("losses"):
            raise Lost(f"the replay has lost acknowledged rows, as {told['losses']} connections saw")
        return Counter(
            {(agent, who, generation): count for agent, who, generation, count in told["acknowledged"]}
        )

    async def end(self, *, kill: bool = False) -> None:
        """Kills them, or lets them end; returns when they have."""
        for process in self._processes:
            if process.returncode is None:
                if kill:
                    process.kill()
                elif process.stdin is not None:
                    process.stdin.close()
        await asyncio.gather(*(process.wait() for process in self._processes))


async def _told(process: asyncio.subprocess.Process, command: Sequence[Any]) -> dict[str, Any]:
    if process.stdin is None or process.stdout is None:
        raise Lost("a process of clients has no pipes")
    process.stdin.write(f"{json.dumps(command)}\n".encode())
    line = await process.stdout.readline()
    if not line:
        raise Lost(f"a process of clients ended over {command[0]}; see what it has written above")
    answer: dict[str, Any] = json.loads(line)
    return answer
