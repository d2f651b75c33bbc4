"""PolicyService: policies arrive whole or not at all, and subscribers get the latest, not the backlog."""

import asyncio
import gc
import hashlib
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from wire.services import (
    SCHEMA,
    WIDE,
    another_epoch,
    eventually,
    listening,
    promptly,
    serving,
)

from dase_grpc.errors import (
    DaseError,
    DrainingError,
    MalformedError,
    NotJoinedError,
    RunMismatchError,
    SchemaMismatchError,
    StaleLeaseError,
    StalePolicyError,
    UnreachableError,
)
from dase_grpc.store import Policy
from dase_grpc.store.policies import MAX_POLICY_BYTES
from dase_grpc.store.ring import MAX_AGENT_ID
from dase_grpc.wire.cluster import Membership
from dase_grpc.wire.policy import CHUNK_BYTES, MAX_CHUNK_BYTES, PolicyPublisher, PolicySubscriber
from dase_grpc.wire.replay_client import StreamTarget
from dase_grpc.wire.status import refusals
from dase_grpc.wire.transport import open_channel
from dase_grpc.wire.v1 import policy_pb2, policy_pb2_grpc, replay_pb2_grpc

BIG = bytes(range(256)) * (5 * 2**12) + b"5 MiB and one sentence"


def stub_of(service) -> policy_pb2_grpc.PolicyServiceStub:
    return policy_pb2_grpc.PolicyServiceStub(service.channel)


def subscriber_of(service, *agent_ids, **changes) -> PolicySubscriber:
    right = {"run_id": "the-run", "schema_fingerprint": SCHEMA.fingerprint}
    return PolicySubscriber(
        service.channel, str(service.address), **{**right, **changes}, agent_ids=agent_ids
    )


@asynccontextmanager
async def subscribed(service, *agent_ids):
    """An open subscriber, cancelled with the block."""
    subscriber = await subscriber_of(service, *agent_ids).open()
    try:
        yield subscriber
    finally:
        subscriber.cancel()


def header(target, payload, *, version=1, stream=None, **changes) -> policy_pb2.PublishRequest:
    """The first message of a Publish stream; `stream` changes fields of its StreamHeader."""
    said = target.header()
    for name, value in (stream or {}).items():
        setattr(said, name, value)
    right = {"size": len(payload), "sha256": hashlib.sha256(payload).digest(), "version": version}
    return policy_pb2.PublishRequest(header=policy_pb2.PublishHeader(stream=said, **{**right, **changes}))


def piece(data) -> policy_pb2.PublishRequest:
    return policy_pb2.PublishRequest(chunk=data)


async def publish_raw(service, *requests):
    """What a Publish stream of these requests is answered, or (code, sentence) of its refusal."""
    try:
        return await stub_of(service).Publish(iter(requests))
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()


async def test_what_is_published_is_what_a_subscriber_gets(service):
    target = await service.target(3)
    assert await PolicyPublisher(target).publish(7, b"the policy") == 7
    async with subscribed(service) as subscriber:
        got = await promptly(subscriber.next())
    assert got == Policy.of(b"the policy", agent_id=3, epoch=1, version=7)


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1, len(BIG)])
async def test_a_policy_of_any_size_comes_through_whole_and_in_messages_below_1_mib(service, size):
    payload = BIG[:size]
    await PolicyPublisher(await service.target()).publish(1, payload)
    call = stub_of(service).Subscribe(
        policy_pb2.SubscribeRequest(run_id="the-run", schema_fingerprint=SCHEMA.fingerprint)
    )
    first = await call.read()
    assert first.header == policy_pb2.PolicyHeader(
        agent_id=0, lease_epoch=1, version=1, size=size, sha256=hashlib.sha256(payload).digest()
    )
    arrived = b""
    while len(arrived) < size:
        answer = await promptly(call.read())
        assert 0 < answer.ByteSize() <= 2**20
        arrived += answer.chunk
    assert arrived == payload
    call.cancel()
    async with subscribed(service) as subscriber:
        assert (await promptly(subscriber.next())).payload == payload


async def test_who_subscribes_before_any_policy_gets_the_first(service):
    target = await service.target()
    async with subscribed(service) as subscriber:
        first = asyncio.ensure_future(subscriber.next())
        await service.round_trips()
        assert not first.done()
        await PolicyPublisher(target).publish(0, b"first")
        assert (await promptly(first)).payload == b"first"


async def test_the_latest_of_each_agent_comes_at_once_and_then_each_newer_one(service):
    publishers = [PolicyPublisher(await service.target(agent_id)) for agent_id in (0, 1)]
    for version in (1, 2):
        for publisher in publishers:
            await publisher.publish(version, b"policy %d" % version)
    async with subscribed(service) as subscriber:
        got = [await promptly(subscriber.next()) for _ in range(2)]
        assert [(policy.agent_id, policy.version) for policy in got] == [(0, 2), (1, 2)]
        for version in (3, 4):
            await publishers[1].publish(version, b"newer")
            policy = await promptly(subscriber.next())
            assert (policy.agent_id, policy.version, policy.payload) == (1, version, b"newer")


async def test_only_the_agents_asked_for_come_those_included_that_are_unknown_yet(service):
    publishers = [PolicyPublisher(await service.target(agent_id)) for agent_id in (0, 1)]
    await publishers[0].publish(1, b"not asked for")
    async with subscribed(service, 1, 9, MAX_AGENT_ID) as subscriber:
        coming = asyncio.ensure_future(subscriber.next())
        await publishers[0].publish(2, b"not asked for")
        await publishers[1].publish(1, b"asked for")
        assert (await promptly(coming)).agent_id == 1
        late = PolicyPublisher(await service.target(9))
        await late.publish(4, b"came late")
        assert (await promptly(subscriber.next())).agent_id == 9


async def test_an_agent_that_cannot_exist_is_refused(service):
    await service.join()
    with pytest.raises(MalformedError, match=f"outside 0..{MAX_AGENT_ID}"):
        await (await subscriber_of(service, MAX_AGENT_ID + 1).open()).next()


async def test_policies_of_an_agent_that_left_stay(service):
    target = await service.target()
    await PolicyPublisher(target).publish(9, b"last words")
    await service.client.leave(target.member, reason="finished")
    async with subscribed(service, 0) as subscriber:
        assert (await promptly(subscriber.next())).version == 9


async def test_status_says_which_version_is_the_latest(service):
    target = await service.target()
    (agent,) = (await service.client.status()).agents
    assert not agent.HasField("policy_version")
    await PolicyPublisher(target).publish(0, b"untrained")
    (agent,) = (await service.client.status()).agents
    assert (agent.HasField("policy_version"), agent.policy_version) == (True, 0)


# What is refused, and that it changes nothing


async def test_an_older_version_and_another_policy_of_the_same_are_refused(service):
    publisher = PolicyPublisher(await service.target())
    await publisher.publish(5, b"five")
    for version, payload in ((4, b"four"), (5, b"another five")):
        with pytest.raises(StalePolicyError, match=f"policy {version} of agent 0.*versions have to grow"):
            await publisher.publish(version, payload)
    assert service.run.policies.latest(0).payload == b"five"


async def test_the_same_policy_again_is_accepted_and_wakes_nobody(service):
    publisher = PolicyPublisher(await service.target())
    async with subscribed(service) as subscriber:
        for _ in range(2):
            assert await publisher.publish(5, b"five") == 5
        await promptly(subscriber.next())
        following = asyncio.ensure_future(subscriber.next())
        await service.round_trips()
        assert not following.done()
        await publisher.publish(6, b"six")
        assert (await promptly(following)).version == 6


async def test_a_new_holder_of_a_lease_may_begin_again_and_subscribers_follow(service):
    first = await service.target()
    await PolicyPublisher(first).publish(5_000, b"old")
    async with subscribed(service) as subscriber:
        await promptly(subscriber.next())
        service.clock.now = 11.0
        second = await service.target()
        await PolicyPublisher(second).publish(3, b"new")
        got = await promptly(subscriber.next())
        assert (got.epoch, got.version) == (2, 3)
    with pytest.raises(StaleLeaseError, match="epoch 1 is not valid"):
        await PolicyPublisher(first).publish(6_000, b"from the dead")
    assert service.run.policies.latest(0).payload == b"new"


async def test_a_stream_of_another_run_schema_epoch_or_agent_is_refused(service):
    target = await service.target()
    for other, error in (
        (replace(target, member=replace(target.member, run_id="another")), RunMismatchError),
        (replace(target, schema=WIDE), SchemaMismatchError),
        (another_epoch(target, 5), StaleLeaseError),
        (replace(target, member=replace(target.member, agent_id=8)), StaleLeaseError),
    ):
        with pytest.raises(error):
            await PolicyPublisher(other).publish(1, b"policy")
    for changes, error in (
        ({"run_id": "another"}, RunMismatchError),
        ({"run_id": ""}, RunMismatchError),
        ({"schema_fingerprint": WIDE.fingerprint}, SchemaMismatchError),
    ):
        with pytest.raises(error):
            await (await subscriber_of(service, **changes).open()).next()
    assert service.run.policies.agents() == []


async def test_before_anybody_joined_nothing_is_published_or_followed(service):
    member = Membership("the-run", 0, 1, ttl_s=10, capacity=0, min_size=0)
    with pytest.raises(NotJoinedError):
        await PolicyPublisher(StreamTarget(service.channel, "x", member, SCHEMA)).publish(1, b"policy")
    with pytest.raises(NotJoinedError):
        await (await subscriber_of(service).open()).next()


async def test_a_lease_that_is_lost_while_a_policy_arrives_fences_it_off(service):
    target = await service.target()
    call = stub_of(service).Publish()
    await call.write(header(target, b"policy"))
    await call.write(piece(b"pol"))
    await eventually(lambda: service.run.policies.incoming_bytes == 3)
    await service.client.leave(target.member, reason="test")
    await call.write(piece(b"icy"))
    await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert service.run.policies.agents() == []


@pytest.mark.parametrize("size", [0, MAX_POLICY_BYTES + 1, 2**63])
async def test_a_size_beyond_the_limit_is_refused_before_anything_is_taken(service, size):
    target = await service.target()
    call = stub_of(service).Publish()
    await call.write(header(target, b"policy", size=size))
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # although the client has sent nothing else
        await promptly(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"1 to {MAX_POLICY_BYTES} bytes, not {size}" in caught.value.details()


async def test_the_client_does_not_even_send_what_is_too_large(service, monkeypatch):
    monkeypatch.setattr("dase_grpc.store.policies.MAX_POLICY_BYTES", 10)
    publisher = PolicyPublisher(await service.target())
    before = service.run.policies.agents()
    for payload in (b"", b"x" * 11):
        with pytest.raises(MalformedError, match=f"1 to 10 bytes, not {len(payload)}"):
            await publisher.publish(1, payload)
    assert await publisher.publish(1, b"x" * 10) == 1
    assert before == []


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ([b"polic"], "ended after 5 of 6 bytes"),
        ([], "ended after 0 of 6 bytes"),
        ([b"policy", b"!"], "with 6 bytes got 1 more after 6"),
        ([b"policies"], "with 6 bytes got 8 more after 0"),
        ([b"pol", b""], "with 6 bytes got 0 more after 3"),
        ([b"Policy"], "do not have the SHA-256 digest"),
    ],
    ids=["short", "nothing", "long", "long at once", "empty chunk", "wrong digest"],
)
async def test_bytes_that_are_not_those_announced_are_refused_and_change_nothing(service, pieces, sentence):
    target = await service.target()
    await PolicyPublisher(target).publish(1, b"before")
    code, said = await publish_raw(
        service, header(target, b"policy", version=2), *(piece(data) for data in pieces)
    )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in said
    assert service.run.policies.latest(0).payload == b"before"
    assert service.run.policies.incoming_bytes == 0


async def test_chunks_beyond_1_mib_are_refused(service):
    target = await service.target()
    fits, too_long = BIG[:MAX_CHUNK_BYTES], BIG[: MAX_CHUNK_BYTES + 1]
    answer = await publish_raw(service, header(target, fits), piece(fits))
    assert answer == policy_pb2.PublishResponse(latest_version=1)
    code, said = await publish_raw(service, header(target, too_long, version=2), piece(too_long))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"at most {MAX_CHUNK_BYTES} bytes, not {MAX_CHUNK_BYTES + 1}" in said


async def test_streams_that_begin_or_go_on_wrongly_are_refused(service):
    right = header(await service.target(), b"policy")
    nothing = policy_pb2.PublishRequest()
    for requests, sentence in (
        ([], "must be its header"),
        ([nothing], "must be its header"),
        ([piece(b"policy")], "must be its header"),
        ([right, right], "takes chunks, not header"),
        ([right, nothing], "takes chunks, not nothing"),
    ):
        code, said = await publish_raw(service, *requests)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in said
    digest = header(await service.target(1), b"policy", sha256=b"short")
    assert (await publish_raw(service, digest))[1] == "a SHA-256 digest has 32 bytes, not 5"


async def test_a_refusal_under_many_writes_is_told_to_the_publisher(service):
    """grpc.aio overwrites the status of a stream that ends while it is written to."""
    publisher, seen = PolicyPublisher(await service.target()), Counter()
    await publisher.publish(5, b"five")
    for _ in range(40):
        try:
            await promptly(publisher.publish(4, BIG))
        except DaseError as error:
            seen[type(error)] += 1
    assert seen == {StalePolicyError: 40}


# Streams that break


async def test_a_publisher_that_breaks_off_half_way_changes_nothing_and_leaves_nothing(service, caplog):
    target = await service.target()
    await PolicyPublisher(target).publish(1, b"before")
    before = len(asyncio.all_tasks())
    async with open_channel(service.address) as channel:
        call = policy_pb2_grpc.PolicyServiceStub(channel).Publish()
        await call.write(header(target, BIG, version=2))
        await call.write(piece(BIG[:1_000]))
        await eventually(lambda: service.run.policies.incoming_bytes == 1_000)
    await eventually(lambda: service.run.policies.incoming_bytes == 0)
    assert service.run.policies.latest(0).payload == b"before"
    await eventually(lambda: len(asyncio.all_tasks()) <= before)
    assert await PolicyPublisher(target).publish(2, b"again") == 2
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


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
        before = len(asyncio.all_tasks())
        publishing = asyncio.ensure_future(PolicyPublisher(target).publish(1, b"policy"))
        await eventually(lambda: len(asyncio.all_tasks()) > before + 1)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        await eventually(lambda: len(asyncio.all_tasks()) <= before)


async def test_a_publisher_that_comes_back_does_not_wait_for_its_broken_stream(service):
    target = await service.target()
    stuck = stub_of(service).Publish()
    await stuck.write(header(target, b"policy"))
    await stuck.write(piece(b"pol"))
    await eventually(lambda: service.run.policies.incoming_bytes == 3)
    assert await promptly(PolicyPublisher(target).publish(1, b"policy")) == 1
    assert service.run.policies.incoming_bytes == 0
    await stuck.write(piece(b"icy"))
    with pytest.raises(grpc.aio.AioRpcError, match="another Publish stream"):
        await promptly(stuck)


async def test_a_service_that_does_not_come_or_does_not_answer_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr("dase_grpc.wire.policy.UNARY_TIMEOUT_S", 0.2)
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
        service.policies.drain()
        with pytest.raises(DrainingError, match="shutting down"):
            await promptly(coming)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await promptly(publishing)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(DrainingError):
            await promptly(PolicyPublisher(target).publish(1, b"policy"))
        with pytest.raises(DrainingError):
            await promptly((await subscriber_of(service).open()).next())


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


async def test_a_slow_reader_of_1000_policies_costs_no_memory_and_ends_with_the_latest(service):
    """The service keeps the latest policy and the one it is sending, whatever the reader does."""
    publisher, payload = PolicyPublisher(await service.target()), bytes(2**19)
    async with subscribed(service) as slow:  # reads nothing yet: the transport fills up
        for version in range(1_000):
            await publisher.publish(version, payload)
        held = [each for each in gc.get_objects() if type(each) is Policy and each.payload == payload]
        assert len(held) <= 2
        assert service.run.policies.incoming_bytes == 0
        seen = [(await promptly(slow.next())).version]
        while seen[-1] < 999:
            seen.append((await promptly(slow.next())).version)
    assert seen == sorted(set(seen))
    assert len(seen) < 100


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


# A service that sends what it should not


class Scripted(policy_pb2_grpc.PolicyServiceServicer):
    """Sends what a test has written."""

    def __init__(self, *answers: policy_pb2.SubscribeResponse) -> None:
        self._answers = answers

    async def Subscribe(self, request, context):
        async with refusals(context):
            for answer in self._answers:
                await context.write(answer)


def announced(payload: bytes, **changes) -> policy_pb2.SubscribeResponse:
    right = {"agent_id": 1, "lease_epoch": 1, "version": 2, "size": len(payload)}
    digest = hashlib.sha256(payload).digest()
    return policy_pb2.SubscribeResponse(
        header=policy_pb2.PolicyHeader(**{**right, "sha256": digest, **changes})
    )


CHUNK = policy_pb2.SubscribeResponse(chunk=b"policy")


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ([announced(b"policy", agent_id=2), CHUNK], "was not asked for"),
        ([CHUNK], "was not asked for"),
        ([announced(b"policy", size=MAX_POLICY_BYTES + 1)], f"1 to {MAX_POLICY_BYTES} bytes"),
        ([announced(b"policies", size=8), announced(b"policy")], "with 8 bytes got 0 more"),
        ([announced(b"pol"), CHUNK], "with 3 bytes got 6 more"),
        ([announced(b"Policy"), CHUNK], "do not have the SHA-256 digest"),
        ([announced(b"policies"), CHUNK], "ended the stream too early"),
    ],
    ids=["another agent", "no header", "too large", "cut off", "too long", "another digest", "ended"],
)
async def test_what_a_service_sends_wrongly_is_an_error_in_one_sentence(answers, sentence):
    async with (
        listening(replay_pb2_grpc.ReplayServiceServicer(), None, Scripted(*answers)) as (_, address),
        open_channel(address) as channel,
    ):
        subscriber = PolicySubscriber(
            channel, str(address), run_id="r", schema_fingerprint="f", agent_ids=[1]
        )
        with pytest.raises(DaseError, match=sentence):
            await promptly((await subscriber.open()).next())


async def test_a_subscriber_is_an_iterator(service):
    await PolicyPublisher(await service.target()).publish(1, b"policy")
    async with subscribed(service) as subscriber:
        async for policy in subscriber:
            assert policy.version == 1
            break
    with pytest.raises(TypeError, match="not been opened"):
        await subscriber_of(service).next()
