"""Publishers and subscribers that break off, vanish or are slow."""

import asyncio
import gc

import grpc
import pytest
from logged import errors_in
from replay.wire.policy_streams import BIG, half_way, header, piece, stub_of, subscribed, subscriber_of
from replay.wire.services import SCHEMA, eventually, grown, promptly, sent, serving

from dase_grpc.errors import DrainingError, StalePolicyError, UnreachableError
from dase_grpc.replay.buffer.policies import PolicyBytes
from dase_grpc.replay.client.cluster import open_channel
from dase_grpc.replay.client.policies import PolicyPublisher, PolicySubscriber
from dase_grpc.replay.wire.status import REFUSAL_KEY
from dase_grpc.replay.wire.v1 import policy_pb2, policy_pb2_grpc


# Streams that break
async def test_a_publisher_that_breaks_off_half_way_changes_nothing_and_leaves_nothing(service, caplog):
    target = await service.target()
    await PolicyPublisher(target).publish(1, b"before")
    before = len(asyncio.all_tasks())
    async with open_channel(service.address) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        await sent(stub.Publish(), header(target, BIG, version=2), piece(BIG[:1_000]))
        await eventually(lambda: service.run.policies.incoming_bytes == 1_000)
    await eventually(lambda: service.run.policies.incoming_bytes == 0)
    assert service.run.policies.latest(0).payload == b"before"
    await eventually(lambda: len(asyncio.all_tasks()) <= before)
    assert await PolicyPublisher(target).publish(2, b"again") == 2
    assert errors_in(caplog) == []


async def test_publishing_that_is_cancelled_ends_its_stream(service):
    target = await service.target()
    publishing = asyncio.ensure_future(PolicyPublisher(target).publish(1, BIG * 8))
    await eventually(lambda: service.run.policies.incoming_bytes > 0)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    await eventually(lambda: service.run.policies.incoming_bytes == 0)
    assert service.run.policies.agents() == []


async def test_publishing_that_is_cancelled_before_it_is_connected_leaves_nothing_behind():
    async with serving() as service:
        target = await service.target()
        await service.server.stop(None)
        before = asyncio.all_tasks()
        publishing = asyncio.ensure_future(PolicyPublisher(target).publish(1, b"policy"))
        await eventually(lambda: len(asyncio.all_tasks() - before) > 1)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        await eventually(lambda: asyncio.all_tasks() <= before)


async def test_a_publisher_that_comes_back_does_not_wait_for_its_broken_stream(service):
    target = await service.target()
    stuck = await half_way(service, target)
    assert await promptly(PolicyPublisher(target).publish(1, b"policy")) == 1
    assert service.run.policies.incoming_bytes == 0
    with pytest.raises(grpc.aio.AioRpcError, match="another Publish stream"):
        await promptly(stuck)


async def test_a_service_that_does_not_come_or_does_not_answer_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.client.policies.UNARY_TIMEOUT_S", 0.2)
    async with serving() as service:
        target = await service.target()
        await service.server.stop(None)
        with pytest.raises(UnreachableError, match="DEADLINE_EXCEEDED"):
            await PolicyPublisher(target).publish(1, b"policy", timeout_s=0.2)
        with pytest.raises(UnreachableError, match=r"within 0.2 s"):
            await subscriber_of(service).open()


async def test_draining_ends_every_open_stream_and_every_one_to_come():
    async with serving() as service:
        target = await service.target()
        waiting = await subscriber_of(service).open()
        publishing = stub_of(service).Publish()
        await publishing.write(header(target, b"policy"))
        coming = asyncio.ensure_future(waiting.next())
        await service.round_trips()
        service.policies.streams.drain()
        with pytest.raises(DrainingError, match="shutting down"):
            await promptly(coming)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await promptly(publishing)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(DrainingError):
            await promptly(PolicyPublisher(target).publish(1, b"policy"))
        with pytest.raises(DrainingError):
            await subscriber_of(service).open()


async def test_a_subscriber_that_is_cancelled_or_vanishes_leaves_nothing_behind(service, caplog):
    await PolicyPublisher(await service.target()).publish(1, BIG)
    before = len(asyncio.all_tasks())
    for rounds in range(40):
        call = stub_of(service).Subscribe(
            policy_pb2.SubscribeRequest(run_id="the-run", schema_fingerprint=SCHEMA.fingerprint)
        )
        for _ in range(rounds % 8):
            await asyncio.sleep(0)
        if rounds % 3 == 0:
            await call.read()
        call.cancel()
    async with open_channel(service.address) as channel:
        gone = PolicySubscriber(channel, "x", run_id="the-run", schema_fingerprint=SCHEMA.fingerprint)
        await (await gone.open()).next()
    await eventually(lambda: len(asyncio.all_tasks()) <= before)
    gc.collect()
    # gRPC says so itself where a call ends while it is being answered
    errors = [
        each.message for each in caplog.records if each.levelname == "ERROR" and each.name[:4] != "grpc"
    ]
    assert errors == []


async def test_cancelling_wakes_who_waits_for_a_policy(service):
    await service.join()
    subscriber = await subscriber_of(service).open()
    coming = asyncio.ensure_future(subscriber.next())
    await service.round_trips(1)
    subscriber.cancel()
    with pytest.raises(UnreachableError, match="was cancelled"):
        await promptly(coming)


# Slow readers
@pytest.mark.slow
async def test_a_slow_reader_of_200_policies_costs_no_memory_and_ends_with_the_latest(service):
    """The service keeps the latest policy and the one it is sending, whatever the reader does."""
    publisher, payload = PolicyPublisher(await service.target()), bytes(2**19)
    async with subscribed(service) as slow:  # reads nothing yet: the transport fills up
        for version in range(200):
            await publisher.publish(version, payload)
        held = [each for each in gc.get_objects() if type(each) is PolicyBytes and each.payload == payload]
        assert len(held) <= 2
        assert service.run.policies.incoming_bytes == 0
        seen = [(await promptly(slow.next())).version]
        while seen[-1] < 199:
            seen.append((await promptly(slow.next())).version)
    assert seen == sorted(set(seen))
    assert len(seen) < 50


async def test_a_slow_reader_does_not_hold_up_a_fast_one(service):
    publisher, payload = PolicyPublisher(await service.target()), bytes(2**20)
    async with subscribed(service) as slow, subscribed(service) as fast:
        for version in range(50):
            await publisher.publish(version, payload)
            assert (await promptly(fast.next())).version == version
        behind = [(await promptly(slow.next())).version]
        while behind[-1] < 49:
            behind.append((await promptly(slow.next())).version)
    assert len(behind) < 50


async def test_an_agent_that_publishes_all_the_time_does_not_starve_the_others(service):
    busy, quiet = [PolicyPublisher(await service.target(agent_id)) for agent_id in (0, 1)]
    async with subscribed(service) as subscriber:

        async def publish_forever():
            version = 0
            while True:
                await busy.publish(version, BIG)
                version += 1

        publishing = asyncio.ensure_future(publish_forever())
        assert (await promptly(subscriber.next())).agent_id == 0
        await quiet.publish(1, b"quiet")
        following = [(await promptly(subscriber.next())).agent_id for _ in range(4)]
        assert 1 in following
        publishing.cancel()


# Streams that idle
async def refused(call) -> tuple[grpc.StatusCode, str]:
    """How a Publish stream ends, its client's side being open: the status and the refusal's name."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await promptly(call)
    return caught.value.code(), dict(caught.value.trailing_metadata()).get(REFUSAL_KEY)


async def test_a_new_publish_stream_ends_the_unfinished_one_that_sends_nothing_more(service):
    target = await service.target()
    idle = await half_way(service, target)
    newer = stub_of(service).Publish()
    await newer.write(header(target, b"newer", version=2))
    assert await refused(idle) == (grpc.StatusCode.FAILED_PRECONDITION, "StalePolicyError")
    await eventually(lambda: service.policies.streams.open_streams["Publish"] == 1)
    await newer.write(piece(b"newer"))
    await newer.done_writing()
    assert (await promptly(newer)).latest_version == 2


async def test_a_publish_stream_that_is_refused_ends_no_other(service):
    target = await service.target()
    await PolicyPublisher(target).publish(5, b"latest")
    going_on = await half_way(service, target, version=6)
    with pytest.raises(StalePolicyError):
        await PolicyPublisher(target).publish(4, b"older")
    await going_on.write(piece(b"icy"))
    await going_on.done_writing()
    assert (await promptly(going_on)).latest_version == 6


@pytest.mark.slow
async def test_policies_that_never_arrive_whole_take_the_memory_of_one(service):
    target, data = await service.target(), BIG[: 2**20]
    calls = []
    with grown() as bytes_grown:
        for version in range(20):
            calls.append(
                await sent(stub_of(service).Publish(), header(target, BIG, version=version), piece(data))
            )
            await eventually(lambda: service.run.policies.incoming_bytes == len(data))
            await eventually(lambda: service.policies.streams.open_streams["Publish"] == 1)
        assert bytes_grown() < 4 * 2**20
    calls[-1].cancel()


async def test_a_publisher_that_stops_half_way_is_given_up(service):
    service.policies.idle_s = 0.1
    target = await service.target()
    idle = await half_way(service, target)
    with pytest.raises(
        grpc.aio.AioRpcError, match=r"has 3 of 6 bytes, and no more came within 0\.1 s"
    ) as caught:
        await promptly(idle)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await eventually(lambda: service.run.policies.incoming_bytes == 0)


async def test_a_publish_stream_that_idles_ends_once_its_lease_is_another_nodes(service):
    target = await service.target()
    idle = await half_way(service, target)
    service.policies.streams.look()
    await service.round_trips()
    assert not idle.done()
    service.clock.now += 60
    await service.join()
    service.policies.streams.look()
    assert await refused(idle) == (grpc.StatusCode.ABORTED, "StaleLeaseError")
    await eventually(lambda: service.run.policies.incoming_bytes == 0)
