"""Errors: each refusal arrives as what it is, with its sentence; a bug stays a bug on both sides."""

import grpc
import pytest
from replay.wire.services import SCHEMA, listening, serving

from dase_grpc.errors import DaseError, RefusalError, UnreachableError
from dase_grpc.progress import Progress
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.policies import PolicyPublisher, PolicySubscriber
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.service.cluster import ClusterServicer
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.status import REFUSAL_KEY, STATUS
from dase_grpc.replay.wire.v1 import cluster_pb2_grpc, policy_pb2_grpc, replay_pb2_grpc

MEMBER = Membership("the-run", 0, 1, ttl_s=10, capacity=0, min_size=0)
SENTENCE = "nothing of the sort was possible (ä, 7 of 9); try again"


class Raising(
    cluster_pb2_grpc.ClusterServiceServicer,
    policy_pb2_grpc.PolicyServiceServicer,
    replay_pb2_grpc.ReplayServiceServicer,
):
    """Answers every call by raising one error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def _raise(self, request, context):
        raise self._error

    Heartbeat = Insert = Sample = Publish = Subscribe = _raise


async def heartbeat(channel, address):
    await ClusterClient(channel, address).heartbeat(MEMBER, Progress())


async def insert(channel, address):
    await Inserter(StreamTarget(channel, address, MEMBER, SCHEMA), writer_id="w").open()


async def sample(channel, address):
    sampler = await Sampler(StreamTarget(channel, address, MEMBER, SCHEMA), batch_size=1).open(credits=1)
    await sampler.next()


async def publish(channel, address):
    await PolicyPublisher(StreamTarget(channel, address, MEMBER, SCHEMA)).publish(1, b"policy")


async def subscribe(channel, address):
    subscriber = PolicySubscriber(channel, address, run_id="the-run", schema_fingerprint="")
    await (await subscriber.open()).next()


CALLS = [heartbeat, insert, sample, publish, subscribe]


async def fails(error, call):
    """The error that a client's call ends with when the servicer raises `error`."""
    servicer = Raising(error)
    async with listening(servicer, servicer, servicer) as (_, address), open_channel(address) as channel:
        with pytest.raises(DaseError) as caught:
            await call(channel, str(address))
    return caught.value


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("refusal", list(STATUS), ids=lambda refusal: refusal.__name__)
async def test_a_refusal_arrives_as_what_it_is_with_its_sentence(refusal, call):
    arrived = await fails(refusal(SENTENCE), call)
    assert type(arrived) is refusal
    assert str(arrived) == SENTENCE


@pytest.mark.parametrize("refusal", list(STATUS), ids=lambda refusal: refusal.__name__)
async def test_a_refusal_has_the_status_of_the_table_and_its_name_in_the_trailer(refusal):
    servicer = Raising(refusal(SENTENCE))
    async with listening(servicer, servicer) as (_, address), open_channel(address) as channel:
        call = replay_pb2_grpc.ReplayServiceStub(channel).Insert()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is STATUS[refusal]
    assert dict(caught.value.trailing_metadata())[REFUSAL_KEY] == refusal.__name__


@pytest.mark.parametrize("call", CALLS)
async def test_a_bug_of_the_service_is_no_refusal_and_stands_in_its_log(call, caplog):
    arrived = await fails(RuntimeError("the index is off by one"), call)
    assert not isinstance(arrived, RefusalError)
    assert "failed (UNKNOWN" in str(arrived)
    assert "see its log" in str(arrived)
    assert "RuntimeError: the index is off by one" in caplog.text


async def test_a_bug_in_the_middle_of_a_stream_stands_in_the_log(service, monkeypatch, caplog):
    sampler = await Sampler(await service.target(), batch_size=4).open(credits=0)
    service.fill(3)
    monkeypatch.setattr(service.run.store.ring, "sample", lambda count, rng, out: 1 / 0)
    await sampler.grant(1)
    with pytest.raises(DaseError, match="failed \\(UNKNOWN"):
        await sampler.next()
    assert "ZeroDivisionError" in caplog.text


async def test_a_method_that_the_service_does_not_have_is_named():
    class Nothing(replay_pb2_grpc.ReplayServiceServicer):
        pass

    async with listening(Nothing()) as (_, address), open_channel(address) as channel:
        with pytest.raises(DaseError, match="UNIMPLEMENTED"):
            await heartbeat(channel, str(address))


async def test_a_bug_in_an_event_handler_does_not_pass_for_success(caplog):
    async with serving() as service:

        def broken(event: str) -> None:
            raise RuntimeError(event)

        servicer = ClusterServicer(service.run, clock=lambda: 0.0, on_event=broken)
        async with listening(service.replay, servicer) as (_, address), open_channel(address) as channel:
            client = ClusterClient(channel, str(address))
            with pytest.raises(DaseError, match="UNKNOWN"):
                await client.join(node_name="n", schema=SCHEMA, agent_id=0)
    assert "joined as agent 0" in caplog.text


async def test_a_service_that_goes_away_is_unreachable_for_open_streams():
    async with serving() as service:
        target = await service.target()
        inserter = await Inserter(target, writer_id="w").open()
        sampler = await Sampler(target, batch_size=4).open(credits=0)
        await service.round_trips(1)
        await service.server.stop(None)
        with pytest.raises(UnreachableError):
            await inserter.receive()
        with pytest.raises(UnreachableError):
            await sampler.next()
