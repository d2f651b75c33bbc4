"""Light learners and actors in one process, told what to do by scale.py over stdin, a JSON line each.

A light node is a node without its compute thread: the project's own client, on a connection of its own, with
every stream, heartbeat and pause of a real one. Its rows say by whom they are and are numbered.

Usage: python benchmarks/scale_clients.py HOST:PORT,... FIRST COUNT AGENTS ACTORS GENERATION
"""

import asyncio
import json
import random
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final

from dase_grpc.errors import RefusalError
from dase_grpc.process.ends import keep_freed_memory, put_right
from dase_grpc.process.lifecycle import HangAlarm
from dase_grpc.progress import Attendance, Attendant, Progress
from dase_grpc.replay.client.admission import attend, enter_all, join_all, leases
from dase_grpc.replay.client.cluster import Lines
from dase_grpc.replay.client.compute import Compute, LearnerStreams
from dase_grpc.replay.client.connection import Connection
from dase_grpc.replay.client.link import ReplayLink, RowLink
from dase_grpc.replay.client.membership import ActorConnection, LearnerConnection
from dase_grpc.replay.client.patience import Wanted
from dase_grpc.replay.client.policies import PolicyExchange, follow
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.security.dialler import NO_CREDENTIALS
from dase_grpc.replay.wire.addresses import ReplayPlace
from dase_grpc.schema import Array, TransitionSchema

SCHEMA: Final = TransitionSchema("scale", 17, 6, (-1.0,) * 6, (1.0,) * 6)
BATCH: Final = 256
PREFETCH: Final = 2
PATIENCE_S: Final = 120.0
LOOK_S: Final = 0.02
MOST_KEPT: Final = 1_000
"""Rows that a light node keeps for a replay that is away; it does not go on exploring then."""

PUBLISH_EVERY: Final = 50
POLICY: Final = bytes(20_000)
FIRST_BATCHES_AT_ONCE: Final = 64


class Light(ABC):
    """What light nodes of both kinds have in common."""

    def __init__(self, place: ReplayPlace, agent: int, who: int, generation: int) -> None:
        self.agent, self.who, self.generation = agent, who, generation
        self._place = place
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.joined_at = 0.0
        self.connections: list[Connection] = []
        self.link: RowLink
        self._row: Array = SCHEMA.empty(1)[0]
        self._row[:] = 0.0
        self._row[0], self._row[2] = who, generation
        SCHEMA.agent_ids(self._row[None])[:] = agent

    def end(self) -> None:
        """Says that it is `over`, again if need be; so does what ends it when it fails."""
        if not self.over.done():
            self.over.set_result(None)

    @abstractmethod
    async def live(self) -> None:
        """Joins, keeps its streams until it is `over`, and leaves once all is acknowledged."""

    def step(self) -> None:
        """One environment step; what a compute thread would do after it."""
        if self.link.unacknowledged < MOST_KEPT:
            self._row[1] = self.link.stored + 1
            self.link.store(self._row.copy())

    @property
    def incarnations(self) -> tuple[str, ...]:
        """Of all shards, as it was last heard."""
        return tuple(each.incarnation for each in self.connections)

    @property
    def serves(self) -> bool:
        """Whether every stream to every shard is up."""
        return all(each.outage is None for each in self.connections)

    def _wanted(self) -> Wanted:
        first = self._place.addresses[0]
        node_id = secrets.token_hex(8)
        return Wanted(first, self.agent, "", node_id=node_id, timeout_s=PATIENCE_S, away_s=PATIENCE_S)


class LightLearner(Light):
    """A learner; it tells a similarity of each of `agents`."""

    def __init__(self, *named: Any, agents: int, followed: bool) -> None:
        super().__init__(*named)
        self.followed = followed
        self._similarity = {source: 1 / (2 + source) for source in range(agents) if source != self.agent}
        self.link: ReplayLink

    async def live(self) -> None:
        """See Light."""
        async with Lines(self._place, NO_CREDENTIALS) as lines:
            joined = await join_all(lines, self._wanted(), SCHEMA)
            self.joined_at = time.monotonic()
            async with leases(joined.targets) as farewell:
                connect = partial(LearnerConnection, timeout_s=PATIENCE_S)
                self.connections = list(joined.connected(lines, connect))
                shards = Shards(self.connections)
                self.link = ReplayLink(
                    shards,
                    batch_size=BATCH,
                    prefetch=PREFETCH,
                    writer_id=f"learner-{self.agent}",
                    explores_first=True,
                )
                self.exchange = PolicyExchange[bytes, bytes](
                    shards.first, follow=(), pack=lambda policy: policy, unpack=lambda policy: policy.payload
                )
                streams = LearnerStreams(shards, self.link, self.exchange, lines)
                loop, stop = asyncio.get_running_loop(), asyncio.Event()
                await streams.run(
                    self.over, stop, halt=self.end, progress=self._progress, alarm=HangAlarm(loop)
                )
                farewell.reason = "finished"
                farewell.targets = [each.target for each in self.connections]

    def step(self) -> None:
        """See Light: a batch is used if one is there, and now and then a policy is published."""
        super().step()
        if self.link.prefetched:
            self.link.next()
        stored = self.link.stored
        if self.followed and stored % PUBLISH_EVERY == self.agent % PUBLISH_EVERY:
            self.exchange.publish(stored, POLICY)

    def _progress(self) -> Progress:
        stored = self.link.stored
        return Progress(
            step=stored, total_steps=10**6, updates=stored, similarity=self._similarity, state="training"
        )


class LightActor(Light):
    """An actor; it takes its agent's policies."""

    async def live(self) -> None:
        """See Light."""
        node = Attendant(secrets.token_hex(8), "light", "actor", self.agent)
        async with Lines(self._place, NO_CREDENTIALS) as lines:
            enter = partial(attend, node=node)
            joined = await enter_all(lines, self._wanted(), SCHEMA, enter=enter, entered=[])
            self.joined_at = time.monotonic()
            connections = joined.connected(lines, partial(ActorConnection, node=node, timeout_s=PATIENCE_S))
            self.connections = list(connections)
            shards = Shards(self.connections)
            self.link = RowLink(shards, writer_id=node.writer_id)
            loop, stop = asyncio.get_running_loop(), asyncio.Event()
            compute = Compute(self.over, self.end, stop, HangAlarm(loop), shards)
            jobs = [
                shards.heartbeats(self._attendance),
                follow(shards.first, {self.agent}, lambda policy: None),
            ]
            await compute.run(jobs, link=self.link)
            for each in connections:
                with suppress(RefusalError):  # as real ones: who is not heard is missed soon
                    await each.leave()

    def _attendance(self) -> Attendance:
        return Attendance(envs=1, env_steps=self.link.stored, state="exploring")


class LightNodes:
    """All light nodes of this process."""

    def __init__(self, nodes: Collection[Light], tasks: asyncio.TaskGroup) -> None:
        self._nodes, self._tasks = nodes, tasks
        self._lives: dict[Light, asyncio.Task[None]] = {}
        self._working: list[asyncio.Task[None]] = []
        self._known: dict[Light, tuple[str, ...]] = {}

    async def join(self) -> dict[str, Any]:
        """All at once; when each had joined."""
        for node in self._nodes:
            self._lives[node] = self._tasks.create_task(node.live())
        await self._until(lambda node: bool(node.connections))
        return {"at": [node.joined_at for node in self._nodes]}

    async def work(self, rate: float) -> dict[str, Any]:
        """Each makes so many steps a second from now on; with none, returns when all is acknowledged."""
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        self._working = []
        if not rate:
            await self._until(lambda node: not node.link.unacknowledged)
            return self._sums()
        learners = [node for node in self._nodes if isinstance(node, LightLearner)]
        self._working = [self._tasks.create_task(_step(node, rate)) for node in self._nodes]
        await asyncio.gather(*(asyncio.to_thread(node.link.next) for node in learners))
        return {}

    async def mark(self) -> dict[str, Any]:
        """Remembers which start of the replay each knows."""
        self._known = {node: node.incarnations for node in self._nodes}
        return {}

    async def back(self) -> dict[str, Any]:
        """When every stream of each was up again at a replay that is another one than at `mark`."""
        at: dict[Light, float] = {}
        while len(at) < len(self._nodes):
            for node in self._nodes:
                news = all(map(str.__ne__, node.incarnations, self._known[node]))
                if node not in at and news and node.serves:
                    at[node] = time.monotonic()
            await asyncio.sleep(LOOK_S)
        return {"at": list(at.values()), "losses": sum(_losses(self._nodes))}

    async def leave(self, learners: int) -> dict[str, Any]:
        """Learners, or actors, leave in order, all at once."""
        leaving = [node for node in self._nodes if isinstance(node, LightLearner) == bool(learners)]
        for node in leaving:
            node.end()
        await asyncio.gather(*(self._lives[node] for node in leaving))
        return {"losses": sum(_losses(leaving)), **self._sums()}

    def _sums(self) -> dict[str, Any]:
        return {
            "acknowledged": [
                (node.agent, node.who, node.generation, node.link.acknowledged) for node in self._nodes
            ]
        }

    async def _until(self, condition: Callable[[Light], bool]) -> None:
        while not all(map(condition, self._nodes)):  # noqa: ASYNC110 - changed by many
            await asyncio.sleep(LOOK_S)


def _losses(nodes: Collection[Light]) -> Iterator[int]:
    return (each.losses for node in nodes for each in node.connections)


async def _step(node: Light, rate: float) -> None:
    rng = random.Random()
    while True:
        await asyncio.sleep(rng.uniform(0.5, 1.5) / rate)
        node.step()


async def serve(nodes: Callable[[], Collection[Light]]) -> None:
    """Does what scale.py says until its end of the pipe is closed."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(FIRST_BATCHES_AT_ONCE))
    async with asyncio.TaskGroup() as tasks:
        light = LightNodes(nodes(), tasks)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command, *arguments = json.loads(line)
            do: Coroutine[Any, Any, dict[str, Any]] = getattr(light, command)(*arguments)
            print(json.dumps(await do), flush=True)


def light_nodes(replay: str, first: int, count: int, agents: int, *more: int) -> list[Light]:
    """A learner of each agent, and its actors."""
    actors, generation = more
    place = ReplayPlace.parse(replay)
    named = [
        (place, agent, who, generation) for agent in range(first, first + count) for who in range(1 + actors)
    ]
    return [
        LightActor(*each) if each[2] else LightLearner(*each, agents=agents, followed=bool(actors))
        for each in named
    ]


def main() -> None:
    """Serves."""
    put_right()
    keep_freed_memory()
    replay, *numbers = sys.argv[1:]
    asyncio.run(serve(partial(light_nodes, replay, *map(int, numbers))))


if __name__ == "__main__":
    main()
