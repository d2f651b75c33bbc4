"""A client hears that its stream is served only once that is so, and understands older services."""

import asyncio

import grpc
import pytest
from replay.wire.policy_streams import subscriber_of
from replay.wire.services import (
    SCHEMA,
    eventually,
    insert_header,
    promptly,
    refusal,
    sample_header,
    sent,
)

from dase_grpc.errors import DrainingError, OverloadedError
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.service import interceptors, streams
from dase_grpc.replay.service.streams import Streams
from dase_grpc.replay.wire.status import ADMITTED_KEY, REFUSAL_KEY
from dase_grpc.replay.wire.v1 import policy_pb2, policy_pb2_grpc

of_each_kind = pytest.mark.parametrize("kind", ["Insert", "Sample", "Subscribe"])


def streams_of(service, kind) -> Streams:
    return (service.policies if kind == "Subscribe" else service.replay).streams


async def opened(service, target, kind):
    """A stream whose first message is sent."""
    if kind == "Subscribe":
        said = {"run_id": target.member.run_id, "schema_fingerprint": SCHEMA.fingerprint}
        stub = policy_pb2_grpc.PolicyServiceStub(service.channel)
        return stub.Subscribe(policy_pb2.SubscribeRequest(**said))
    header = insert_header(target) if kind == "Insert" else sample_header(target)
    return await sent(getattr(service.stub, kind)(), header)


@of_each_kind
async def test_a_client_that_waits_for_any_metadata_and_reads_then_learns_either(service, kind):
    """As older clients do."""
    target = await service.target()
    call = await opened(service, target, kind)
    assert ADMITTED_KEY in dict(await promptly(call.initial_metadata()))
    call.cancel()
    streams_of(service, kind)._draining = True
    call = await opened(service, target, kind)
    assert ADMITTED_KEY not in dict(await promptly(call.initial_metadata()))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await promptly(call.read())
    assert dict(refused.value.trailing_metadata())[REFUSAL_KEY] == "DrainingError"


@of_each_kind
@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_a_stream_that_ends_while_its_client_is_told_has_its_status(service, monkeypatch, kind, turns):
    target, its, admitted = await service.target(), streams_of(service, kind), Streams.admitted

    async def draining(self, context):
        asyncio.get_running_loop().call_soon(drain, turns)
        await admitted(self, context)

    def drain(turns):
        if turns:
            asyncio.get_running_loop().call_soon(drain, turns - 1)
        else:
            its.drain()

    monkeypatch.setattr(Streams, "admitted", draining)
    for _ in range(10):
        call = await opened(service, target, kind)
        said = (grpc.StatusCode.UNAVAILABLE, "the replay service is shutting down")
        assert await promptly(refusal(call)) == said
        its._draining = False
        await eventually(lambda: its.open_streams[kind] == 0)


def drained(service, monkeypatch):
    for kind in ("Sample", "Subscribe"):
        streams_of(service, kind).drain()
    return DrainingError


def full(service, monkeypatch):
    monkeypatch.setattr(interceptors, "MAX_CALLS", 0)
    return OverloadedError


@pytest.mark.parametrize("refuse", [drained, full])
async def test_what_is_refused_is_refused_where_it_is_opened(service, monkeypatch, refuse):
    target = await service.target()
    error = refuse(service, monkeypatch)
    for begun in (Sampler(target, batch_size=4).open(credits=0), subscriber_of(service).open()):
        with pytest.raises(error):
            await promptly(begun)


async def test_a_service_that_takes_each_call_at_first_is_understood(service, monkeypatch):
    """As older services do."""
    serve = Streams.serve

    async def taking(self, context, body, *, rpc):
        await context.send_initial_metadata(())
        return await serve(self, context, body, rpc=rpc)

    async def silent(self, context):
        """It has been said already."""

    monkeypatch.setattr(Streams, "serve", taking)
    monkeypatch.setattr(Streams, "admitted", silent)
    target = await service.target()
    service.fill(10)
    sampler = await Sampler(target, batch_size=4).open(credits=1)
    assert len((await promptly(sampler.next())).rows) == 4
    sampler.cancel()
    monkeypatch.setattr(streams, "MAX_HELD_BYTES", 0)
    with pytest.raises(OverloadedError):
        await promptly((await Sampler(target, batch_size=4).open(credits=1)).next())
