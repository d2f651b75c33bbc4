"""PolicyService: policies arrive whole or not at all, and subscribers get the latest, not the backlog."""

import asyncio
import hashlib

import pytest
from replay.wire.policy_streams import BIG, stub_of, subscribed, subscriber_of
from replay.wire.services import SCHEMA, listening, promptly

from dase_grpc.errors import DaseError, MalformedError
from dase_grpc.progress import MAX_AGENT_ID
from dase_grpc.replay.buffer.policies import MAX_POLICY_BYTES, PolicyBytes
from dase_grpc.replay.client.cluster import open_channel
from dase_grpc.replay.client.policies import PolicyPublisher, PolicySubscriber
from dase_grpc.replay.wire.addresses import CHUNK_BYTES
from dase_grpc.replay.wire.v1 import policy_pb2, policy_pb2_grpc, replay_pb2_grpc


async def test_what_is_published_is_what_a_subscriber_gets(service):
    target = await service.target(3)
    assert await PolicyPublisher(target).publish(7, b"the policy") == 7
    async with subscribed(service) as subscriber:
        got = await promptly(subscriber.next())
    assert got == PolicyBytes.of(b"the policy", agent_id=3, epoch=1, version=7)


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


# A service that sends what it should not
class Scripted(policy_pb2_grpc.PolicyServiceServicer):
    """Sends what a test has written."""

    def __init__(self, *answers: policy_pb2.SubscribeResponse) -> None:
        self._answers = answers

    async def Subscribe(self, request, context):
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


async def test_the_step_a_policy_was_published_at_comes_through_and_a_later_one_comes_too(service):
    publisher = PolicyPublisher(await service.target())
    async with subscribed(service) as subscriber:
        for step in (0, 1_000):
            await publisher.publish(0, b"untrained", step=step)
            assert (await promptly(subscriber.next())).step == step
