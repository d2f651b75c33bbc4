"""What is asked for wrongly, or of the wrong run, is refused."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from replay.wire.services import (
    SCHEMA,
    WIDE,
    another_epoch,
    eventually,
    promptly,
    refusal,
    sample_header,
    serving,
)

from dase_grpc.errors import (
    MalformedError,
    NotJoinedError,
    RunMismatchError,
    SchemaMismatchError,
    StaleLeaseError,
)
from dase_grpc.pace import Pace
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.sample import Pacing, Sampler
from dase_grpc.replay.service.sample import MAX_BATCH_BYTES, MAX_BATCH_SIZE, MAX_CREDITS
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.v1 import replay_pb2


@pytest.mark.parametrize("first", [True, False])
async def test_too_many_credits_are_refused(service, first):
    target = await service.target()
    service.fill(1)
    call = service.stub.Sample()
    await call.write(sample_header(target, credits=MAX_CREDITS + 1 if first else 0))
    if not first:
        await call.write(replay_pb2.SampleRequest(credits=MAX_CREDITS + 1))
    assert await refusal(call) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"a request grants at most {MAX_CREDITS} credits, not {MAX_CREDITS + 1}",
    )


@pytest.mark.parametrize("batch_size", [0, MAX_BATCH_SIZE + 1])
async def test_a_batch_is_neither_empty_nor_endless(service, batch_size):
    sampler = await Sampler(await service.target(), batch_size=batch_size).open(credits=1)
    with pytest.raises(MalformedError, match=f"1 to {MAX_BATCH_SIZE} transitions, not {batch_size}"):
        await sampler.next()


async def test_a_batch_that_no_memory_could_hold_is_refused(service):
    batch_size = MAX_BATCH_BYTES // WIDE.row_bytes + 1
    assert batch_size < MAX_BATCH_SIZE
    sampler = await Sampler(await service.target(schema=WIDE), batch_size=batch_size).open(credits=1)
    with pytest.raises(MalformedError, match=f"not {batch_size} transitions of {WIDE.row_bytes}"):
        await sampler.next()


async def test_a_stream_without_a_header_is_refused(service):
    call = service.stub.Sample()
    await call.write(replay_pb2.SampleRequest(credits=1))
    code, sentence = await refusal(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "no header" in sentence


@pytest.mark.parametrize("paced", [False, True])
async def test_a_second_header_is_refused(service, paced):
    header = sample_header(await service.target())
    if paced:
        header.header.pace.CopyFrom(Pacing(Pace(1.0, 4), used=0, held=0).message())
    call = service.stub.Sample()
    await call.write(header)
    await call.write(header)
    code, sentence = await refusal(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence.startswith("only the first request")


async def test_a_stream_without_any_request_just_ends(service):
    call = service.stub.Sample()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_a_stream_of_another_run_schema_or_epoch_is_refused(service):
    target = await service.target()
    for other, error in (
        (replace(target, member=replace(target.member, run_id="another")), RunMismatchError),
        (replace(target, schema=WIDE), SchemaMismatchError),
        (another_epoch(target, 5), StaleLeaseError),
    ):
        sampler = await Sampler(other, batch_size=4).open(credits=1)
        with pytest.raises(error):
            await sampler.next()


async def test_a_stream_before_anybody_joined_is_refused(service):
    member = Membership("the-run", 0, 1, ttl_s=10, capacity=0, min_size=0)
    sampler = await Sampler(StreamTarget(service.channel, "x", member, SCHEMA), batch_size=4).open(credits=1)
    with pytest.raises(NotJoinedError):
        await sampler.next()


async def test_a_lease_that_is_lost_while_sampling_fences_off_the_next_batch(service):
    target = await service.target()
    service.fill(10)
    sampler = await Sampler(target, batch_size=4).open(credits=1)
    await sampler.next()
    await service.client.leave(target.member, reason="test")
    await sampler.grant(1)
    with pytest.raises(StaleLeaseError, match="join again"):
        await sampler.next()


async def test_a_lease_that_is_lost_while_waiting_ends_the_wait(monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.service.sample.WAITING_EVERY_S", 0.01)
    async with serving(min_size=10) as service:
        target = await service.target()
        sampler = await Sampler(target, batch_size=4).open(credits=1)
        batch = asyncio.ensure_future(sampler.next())
        await eventually(lambda: sampler.waiting is not None)
        await service.client.leave(target.member, reason="test")
        with pytest.raises(StaleLeaseError):
            await promptly(batch)
