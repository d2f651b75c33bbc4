"""What a server's calls have been is counted: how they ended, their bytes, and how long they took."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from patience import PATIENCE_S
from replay.wire.services import SCHEMA, insert, listening, rows_of

from dase_grpc.errors import RunMismatchError, StaleLeaseError
from dase_grpc.metrics.calls import Calls
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.service.cluster import ClusterServicer
from dase_grpc.replay.service.server import ReplayServicer, make_server
from dase_grpc.replay.wire.v1 import cluster_pb2, cluster_pb2_grpc


@asynccontextmanager
async def counted() -> AsyncIterator[tuple[Calls, ClusterClient, StreamTarget]]:
    """A service whose calls are counted, its client, and what a member's streams connect to."""
    run, calls = SharedRun("the-run", capacity=100, min_size=1, seed=7, ttl_s=10.0), Calls()
    replay, cluster = ReplayServicer(run, calls=calls), ClusterServicer(run, clock=float, on_event=str)
    async with listening(replay, cluster, server=make_server(calls)) as (_, address):
        async with open_channel(address) as channel:
            client = ClusterClient(channel, str(address))
            member = await client.join(node_name="node", schema=SCHEMA, agent_id=0)
            yield calls, client, StreamTarget(channel, str(address), member, SCHEMA)
        replay.streams.drain()


async def store(target: StreamTarget, rows: int) -> None:
    await insert(Inserter(target, writer_id="w"), rows_of(1, rows))


async def counts(calls: Calls, client: ClusterClient, *key: str) -> int:
    """How often that was counted; waits for the first time, for a client may see a status before that."""
    async with asyncio.timeout(PATIENCE_S):
        while not calls.handled[key]:
            await client.status()
    return calls.handled[key]


async def test_a_call_counts_by_method_kind_and_status():
    async with counted() as (calls, client, _):
        await client.status()
        with pytest.raises(RunMismatchError):
            await client.join(node_name="other", schema=SCHEMA, agent_id=1, run_id="another-run")
        assert calls.handled["Join", "unary", "OK"] == 1
        assert calls.handled["Status", "unary", "OK"] == 1
        assert await counts(calls, client, "Join", "unary", "FAILED_PRECONDITION") == 1


async def test_the_bytes_of_messages_are_those_of_protobuf():
    async with counted() as (calls, _, target):
        before = calls.sent_bytes["Status"]
        stub = cluster_pb2_grpc.ClusterServiceStub(target.channel)
        request = cluster_pb2.StatusRequest()
        answer = await stub.Status(request)
        assert calls.received_bytes["Status"] == request.ByteSize()
        assert calls.sent_bytes["Status"] - before == answer.ByteSize()


async def test_streams_count_once_they_end_and_time_each_chunk_and_batch():
    async with counted() as (calls, client, target):
        await store(target, 3)
        assert await counts(calls, client, "Insert", "bidi_stream", "OK") == 1
        assert sum(calls.requests("Insert").read()[0]) == 1
        assert calls.received_bytes["Insert"] > 3 * SCHEMA.row_bytes
        sampler = await Sampler(target, batch_size=4).open(credits=2)
        for _ in range(2):
            await sampler.next()
        await client.status()
        assert sum(calls.requests("Sample").read()[0]) == sum(calls.sample_wait.read()[0]) == 2
        assert calls.sent_bytes["Sample"] > 8 * SCHEMA.row_bytes
        assert not [key for key in calls.handled if key[0] == "Sample"]


async def test_a_stream_that_is_refused_and_one_that_is_cancelled_count_as_such():
    async with counted() as (calls, client, target):
        # owed a batch, for one that waits for nothing but requests may take the break for their end
        sampler = await Sampler(target, batch_size=4).open(credits=1)
        await client.status()
        sampler.cancel()
        assert await counts(calls, client, "Sample", "bidi_stream", "CANCELLED") == 1
        await client.leave(target.member, reason="done")
        with pytest.raises(StaleLeaseError):
            await Inserter(target, writer_id="w").open()
        assert await counts(calls, client, "Insert", "bidi_stream", "ABORTED") == 1


async def test_a_method_that_does_not_exist_is_not_counted():
    async with counted() as (calls, _, target):
        before = dict(calls.handled)
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await target.channel.unary_unary("/dase.v1.ReplayService/Nothing")(b"")
        assert dict(calls.handled) == before
