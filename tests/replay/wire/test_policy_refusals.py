"""What is published or followed wrongly is refused, and changes nothing."""

import asyncio
from collections import Counter

import grpc
import pytest
from replay.wire.policy_streams import BIG, half_way, header, piece, stub_of, subscribed
from replay.wire.services import promptly

from dase_grpc.errors import DaseError, MalformedError, StaleLeaseError, StalePolicyError
from dase_grpc.replay.buffer.policies import MAX_POLICY_BYTES
from dase_grpc.replay.client.policies import PolicyPublisher
from dase_grpc.replay.wire.addresses import MAX_CHUNK_BYTES
from dase_grpc.replay.wire.v1 import policy_pb2


async def publish_raw(service, *requests):
    """What a Publish stream of these requests is answered, or (code, sentence) of its refusal."""
    try:
        return await stub_of(service).Publish(iter(requests))
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()


# What is refused, and that it changes nothing
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


async def test_a_lease_that_is_lost_while_a_policy_arrives_fences_it_off(service):
    target = await service.target()
    call = await half_way(service, target)
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
    monkeypatch.setattr("dase_grpc.replay.buffer.policies.MAX_POLICY_BYTES", 10)
    publisher = PolicyPublisher(await service.target())
    for payload in (b"", b"x" * 11):
        with pytest.raises(MalformedError, match=f"1 to 10 bytes, not {len(payload)}"):
            await publisher.publish(1, payload)
    assert service.run.policies.agents() == []
    assert await publisher.publish(1, b"x" * 10) == 1


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ([], "ended after 0 of 6 bytes"),
        ([b"policy", b"!"], "with 6 bytes got 1 more after 6"),
        ([b"pol", b""], "with 6 bytes got 0 more after 3"),
        ([b"Policy"], "do not have the SHA-256 digest"),
    ],
    ids=["nothing", "long", "empty chunk", "wrong digest"],
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
