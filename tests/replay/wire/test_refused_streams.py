"""Streams that begin or go on wrongly, or belong to another run, schema or lease, are refused."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from replay.wire.policy_streams import subscriber_of
from replay.wire.services import (
    SCHEMA,
    WIDE,
    chunk,
    eventually,
    insert_header,
    promptly,
    refusal,
    rows_of,
    sample_header,
    sent,
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
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.policies import PolicyPublisher
from dase_grpc.replay.client.sample import Pacing, Sampler
from dase_grpc.replay.service.insert import MAX_WRITER_ID
from dase_grpc.replay.service.sample import MAX_BATCH_BYTES, MAX_BATCH_SIZE, MAX_CREDITS
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.v1 import replay_pb2


async def insert(target):
    await Inserter(target, writer_id="w").open()


async def sample(target):
    await (await Sampler(target, batch_size=4).open(credits=1)).next()


async def publish(target):
    await PolicyPublisher(target).publish(1, b"policy")


of_each_kind = pytest.mark.parametrize("begun", [insert, sample, publish], ids=lambda begun: begun.__name__)


@of_each_kind
@pytest.mark.parametrize(
    ("changes", "schema", "error", "sentence"),
    [
        ({"run_id": "another"}, SCHEMA, RunMismatchError, "'the-run'.*'another'"),
        ({}, WIDE, SchemaMismatchError, f"{SCHEMA.fingerprint[:8]}.*{WIDE.fingerprint[:8]}"),
        ({"epoch": 9}, SCHEMA, StaleLeaseError, "epoch 9 is not valid"),
        ({"agent_id": 8}, SCHEMA, StaleLeaseError, "agent 8 with epoch 1"),
    ],
    ids=["run", "schema", "epoch", "agent"],
)
async def test_a_stream_of_another_run_schema_epoch_or_agent_is_refused(
    service, begun, changes, schema, error, sentence
):
    target = await service.target()
    other = replace(target, member=replace(target.member, **changes), schema=schema)
    with pytest.raises(error, match=sentence):
        await begun(other)
    assert service.run.policies.agents() == service.stored() == []


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"run_id": "another"}, RunMismatchError),
        ({"run_id": ""}, RunMismatchError),
        ({"schema_fingerprint": WIDE.fingerprint}, SchemaMismatchError),
    ],
)
async def test_a_subscriber_of_another_run_or_schema_is_refused(service, changes, error):
    await service.join()
    with pytest.raises(error):
        await subscriber_of(service, **changes).open()


@of_each_kind
async def test_a_stream_before_anybody_joined_is_refused(service, begun):
    member = Membership("the-run", 0, 1, ttl_s=10, capacity=0, min_size=0)
    with pytest.raises(NotJoinedError, match="no learner has joined"):
        await begun(StreamTarget(service.channel, "x", member, SCHEMA))


def paced(header: replay_pb2.SampleRequest) -> replay_pb2.SampleRequest:
    header.header.pace.CopyFrom(Pacing(Pace(1.0, 4), used=0, held=0).message())
    return header


MANY = replay_pb2.SampleRequest(credits=MAX_CREDITS + 1)
TOO_MANY = f"a request grants at most {MAX_CREDITS} credits, not {MAX_CREDITS + 1}"


@pytest.mark.parametrize(
    ("rpc", "messages", "sentence"),
    [
        ("Insert", lambda _: [], "the first message of this stream must be its header"),
        (
            "Insert",
            lambda _: [chunk(1, rows_of(1, 1))],
            "the first message of this stream must be its header",
        ),
        ("Insert", lambda to: 2 * [insert_header(to)], "an end frame, not header"),
        ("Insert", lambda to: [insert_header(to), replay_pb2.InsertRequest()], "an end frame, not nothing"),
        (
            "Insert",
            lambda to: [insert_header(to), chunk(1, rows_of(1, 2).tobytes()[:-1])],
            "not a whole number of 36-byte transitions",
        ),
        ("Sample", lambda _: [replay_pb2.SampleRequest(credits=1)], "no header"),
        ("Sample", lambda to: 2 * [sample_header(to)], "only the first request"),
        ("Sample", lambda to: 2 * [paced(sample_header(to))], "only the first request"),
        ("Sample", lambda to: [sample_header(to, credits=MAX_CREDITS + 1)], TOO_MANY),
        ("Sample", lambda to: [sample_header(to), MANY], TOO_MANY),
    ],
)
async def test_messages_that_do_not_belong_there_are_refused(service, rpc, messages, sentence):
    target = await service.target()
    service.fill(1)
    call = await sent(getattr(service.stub, rpc)(), *messages(target))
    await call.done_writing()
    code, said = await refusal(call)
    assert (code, service.stored()) == (grpc.StatusCode.INVALID_ARGUMENT, [1])
    assert sentence in said


async def test_a_sample_stream_without_any_request_just_ends(service):
    call = service.stub.Sample()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize("writer_id", ["", "w" * (MAX_WRITER_ID + 1)])
async def test_a_writer_id_is_neither_empty_nor_endless(service, writer_id):
    with pytest.raises(MalformedError, match=f"1 to {MAX_WRITER_ID} characters, not {len(writer_id)}"):
        await Inserter(await service.target(), writer_id=writer_id).open()


TOO_LARGE = MAX_BATCH_BYTES // WIDE.row_bytes + 1


@pytest.mark.parametrize(
    ("batch_size", "sentence"),
    [
        (0, f"1 to {MAX_BATCH_SIZE} transitions, not 0"),
        (MAX_BATCH_SIZE + 1, f"1 to {MAX_BATCH_SIZE} transitions, not {MAX_BATCH_SIZE + 1}"),
        (TOO_LARGE, f"not {TOO_LARGE} transitions of {WIDE.row_bytes}"),
    ],
)
async def test_a_batch_is_neither_empty_nor_endless_nor_more_than_memory_could_hold(
    service, batch_size, sentence
):
    target = await service.target(schema=WIDE)
    with pytest.raises(MalformedError, match=sentence):
        await Sampler(target, batch_size=batch_size).open(credits=1)


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


@pytest.mark.parametrize("opened", ["Insert", "Sample"])
async def test_a_stream_that_idles_ends_once_its_lease_is_another_nodes(service, opened):
    target, streams = await service.target(), service.replay.streams
    header = insert_header(target) if opened == "Insert" else sample_header(target)
    call = await sent(getattr(service.stub, opened)(), header)
    await eventually(lambda: streams.open_streams[opened] == 1)
    await service.round_trips()
    streams.look()
    await service.round_trips()
    assert not call.done()
    service.clock.now += 60
    await service.join()
    streams.look()
    assert (await promptly(refusal(call)))[0] is grpc.StatusCode.ABORTED
    await eventually(lambda: streams.open_streams[opened] == 0)
