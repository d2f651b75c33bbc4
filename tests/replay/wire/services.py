"""A replay service in the test's own event loop, and what tests say to it."""

import asyncio
import gc
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
from patience import PATIENCE_S

from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.buffer.sharding import WHOLE, Shard
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.service.cluster import ClusterServicer
from dase_grpc.replay.service.policies import PolicyServicer
from dase_grpc.replay.service.server import ReplayServicer, add_replay, bind, make_server
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.v1 import cluster_pb2_grpc, policy_pb2_grpc, replay_pb2, replay_pb2_grpc
from dase_grpc.schema import Array, TransitionSchema

SCHEMA = TransitionSchema("worlds:Small", 2, 1, (-1.0,), (1.0,))
WIDE = TransitionSchema("worlds:Wide", 4_096, 2, (-1.0, -1.0), (1.0, 1.0))
LOOPBACK = Address("127.0.0.1", 0)


def free_port() -> int:
    """One that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@dataclass
class Clock:
    """A clock that stands still until a test moves it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Service:
    """The parts of a running service, and a channel to it."""

    run: SharedRun
    replay: ReplayServicer
    cluster: ClusterServicer
    policies: PolicyServicer
    server: grpc.aio.Server
    address: Address
    channel: grpc.aio.Channel
    clock: Clock
    events: list[str] = field(default_factory=list)

    @property
    def client(self) -> ClusterClient:
        return ClusterClient(self.channel, str(self.address))

    @property
    def stub(self) -> replay_pb2_grpc.ReplayServiceStub:
        return replay_pb2_grpc.ReplayServiceStub(self.channel)

    async def join(self, agent_id: int | None = 0, *, schema: TransitionSchema = SCHEMA) -> Membership:
        return await self.client.join(node_name=f"node-{agent_id}", schema=schema, agent_id=agent_id)

    async def target(self, agent_id: int = 0, *, schema: TransitionSchema = SCHEMA) -> StreamTarget:
        """Joins; what the new member's streams connect to."""
        return StreamTarget(self.channel, str(self.address), await self.join(agent_id, schema=schema), schema)

    def stored(self, *, agent_id: int | None = None) -> list[int]:
        """The serial numbers of all rows present, oldest first."""
        rows = self.run.store.ring.ordered()
        if agent_id is not None:
            rows = rows[self.run.store.schema.agent_ids(rows) == agent_id]
        return serials_of(rows, self.run.store.schema)

    def fill(self, count: int, *, agent_id: int = 0) -> None:
        """Stores rows 1..count past the wire."""
        store = self.run.store
        store.append("past the wire", 1, rows_of(1, count, agent_id, store.schema), agent_id=agent_id)

    async def round_trips(self, count: int = 5) -> None:
        """Gives the service's event loop ample time to do whatever it would do."""
        for _ in range(count):
            await self.client.status()


@asynccontextmanager
async def serving(
    *,
    capacity: int | str = 1_000,
    min_size: int = 1,
    seed: int = 7,
    ttl_s: float = 10.0,
    shard: Shard = WHOLE,
) -> AsyncIterator[Service]:
    """A service on a free port of loopback."""
    run = SharedRun("the-run", capacity=capacity, min_size=min_size, seed=seed, ttl_s=ttl_s, shard=shard)
    clock, events = Clock(), list[str]()
    replay, policies = ReplayServicer(run), PolicyServicer(run)
    cluster = ClusterServicer(run, clock=clock, on_event=events.append)
    async with listening(replay, cluster, policies) as (server, address), open_channel(address) as channel:
        yield Service(run, replay, cluster, policies, server, address, channel, clock, events)
        replay.streams.drain()
        policies.streams.drain()


@asynccontextmanager
async def listening(
    replay: replay_pb2_grpc.ReplayServiceServicer,
    cluster: cluster_pb2_grpc.ClusterServiceServicer | None = None,
    policies: policy_pb2_grpc.PolicyServiceServicer | None = None,
    *,
    server: grpc.aio.Server | None = None,
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[tuple[grpc.aio.Server, Address]]:
    """A server with these servicers."""
    server = server or make_server()
    add = (
        add_replay
        if isinstance(replay, ReplayServicer)
        else replay_pb2_grpc.add_ReplayServiceServicer_to_server
    )
    add(replay, server)
    if cluster is not None:
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(cluster, server)
    if policies is not None:
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(policies, server)
    address = bind(server, LOOPBACK, credentials)
    await server.start()
    try:
        yield server, address
    finally:
        await server.stop(None)


def rows_of(first: int, last: int, agent_id: int = 0, schema: TransitionSchema = SCHEMA) -> Array:
    """Rows first..last; each holds its serial number in every float column and as policy version."""
    serials = np.arange(first, last + 1)
    rows = schema.empty(len(serials))
    rows[:, : schema.float_width] = serials[:, np.newaxis]
    schema.agent_ids(rows)[:] = agent_id
    rows.view(np.uint32)[:, -1] = serials
    return rows


def serials_of(rows: Array, schema: TransitionSchema = SCHEMA) -> list[int]:
    """The rows' serial numbers, each checked against all float columns."""
    serials = np.ascontiguousarray(rows).view(np.uint32)[:, -1]
    assert (rows[:, : schema.float_width] == serials[:, np.newaxis]).all()
    return [int(serial) for serial in serials]


def insert_header(target: StreamTarget, writer_id: str = "w", **changes: Any) -> replay_pb2.InsertRequest:
    """The first message of an Insert stream, with some fields of its StreamHeader changed."""
    stream = target.header()
    for name, value in changes.items():
        setattr(stream, name, value)
    return replay_pb2.InsertRequest(header=replay_pb2.InsertHeader(stream=stream, writer_id=writer_id))


def sample_header(
    target: StreamTarget, *, batch_size: int = 4, credits: int = 0, **changes: Any
) -> replay_pb2.SampleRequest:
    """The first message of a Sample stream, with some fields of its StreamHeader changed."""
    stream = target.header()
    for name, value in changes.items():
        setattr(stream, name, value)
    header = replay_pb2.SampleHeader(stream=stream, batch_size=batch_size)
    return replay_pb2.SampleRequest(header=header, credits=credits)


def chunk(first_seq: int, rows: Array | bytes) -> replay_pb2.InsertRequest:
    data = rows if isinstance(rows, bytes) else rows.tobytes()
    return replay_pb2.InsertRequest(chunk=replay_pb2.InsertChunk(first_seq=first_seq, rows=data))


END = replay_pb2.InsertRequest(end=replay_pb2.InsertEnd())


async def insert(inserter: Inserter, *chunks: Array) -> Inserter:
    """Opens a stream, sends chunks and finishes it."""
    async with asyncio.TaskGroup() as tasks:
        await inserter.open()
        tasks.create_task(inserter.receive())
        for rows in chunks:
            await inserter.append(rows)
        await inserter.finish()
    return inserter


async def acknowledged(call: Any, seq: int) -> replay_pb2.InsertResponse:
    """Reads acknowledgements until everything up to `seq` is committed; checks that they only grow."""
    answer = await call.read()
    while answer.committed_seq < seq:
        following = await call.read()
        assert following is not grpc.aio.EOF
        assert following.committed_seq >= answer.committed_seq
        answer = following
    assert answer.committed_seq == seq
    return answer


async def answers(call: Any) -> list[Any]:
    """Everything a stream still sends."""
    seen = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        seen.append(answer)
    return seen


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Reads a stream to its bad end: the status code and the sentence."""
    try:
        await answers(call)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("the stream ended well")


async def eventually(holds: Callable[[], bool]) -> None:
    """Returns as soon as a state is reached."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - a state of plain objects, which tell nobody
            await asyncio.sleep(0.002)


async def promptly(awaited: Awaitable[Any]) -> Any:
    """What is awaited, which must not hang."""
    async with asyncio.timeout(PATIENCE_S):
        return await awaited


@contextmanager
def grown() -> Iterator[Callable[[], int]]:
    """How many bytes of Python objects there are more than at the beginning of the block."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()

        def bytes_grown() -> int:
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before

        yield bytes_grown
    finally:
        tracemalloc.stop()


async def sent(call: Any, *messages: Any) -> Any:
    """A stream on which these messages were sent."""
    for message in messages:
        await call.write(message)
    return call


def another_epoch(target: StreamTarget, epoch: int) -> StreamTarget:
    return replace(target, member=replace(target.member, epoch=epoch))
