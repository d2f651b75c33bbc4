"""ClientStream: however a stream ends, and whenever, its client learns why."""

import asyncio
import gc
from collections import Counter
from contextlib import ExitStack, asynccontextmanager

import grpc
import pytest
from replay.wire.services import (
    eventually,
    insert_header,
    listening,
    promptly,
    rows_of,
    sample_header,
    serving,
)

from dase_grpc.config.sections import TrainConfig
from dase_grpc.errors import DrainingError, StaleLeaseError, UnreachableError
from dase_grpc.replay.client.cluster import open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.client.streams import ClientStream
from dase_grpc.replay.service.streams import Admission
from dase_grpc.replay.wire.v1 import replay_pb2, replay_pb2_grpc

ANSWER = replay_pb2.InsertResponse(committed_seq=1)


class Scripted(replay_pb2_grpc.ReplayServiceServicer):
    """An Insert stream that answers some requests and then ends as it was told."""

    def __init__(self, answers: int, ending: Exception | None = None) -> None:
        self._answers = answers
        self._ending = ending

    async def Insert(self, request_iterator, context):
        for _ in range(self._answers):
            await context.read()
            await context.write(ANSWER)
        if self._ending is not None:
            raise self._ending


@asynccontextmanager
async def scripted(answers, ending=None):
    """A stream to a service that ends it like this."""
    async with listening(Scripted(answers, ending)) as (_, address), open_channel(address) as channel:
        yield ClientStream(replay_pb2_grpc.ReplayServiceStub(channel).Insert(), str(address))


def test_a_learner_and_as_many_actors_as_an_agent_may_have_store_at_once():
    actors = TrainConfig.model_json_schema()["properties"]["actors"]["maximum"]
    admission = Admission("Insert")
    with ExitStack() as streams:
        for _ in range(1 + actors):
            streams.enter_context(admission.stream(0))


async def test_messages_are_read_until_the_end():
    async with scripted(2) as stream:
        for _ in range(2):
            await stream.write(replay_pb2.InsertRequest())
            assert await stream.read() == ANSWER
        await stream.end_writing()
        await stream.read_end()


async def test_the_end_comes_after_what_nobody_read():
    async with scripted(3) as stream:
        for _ in range(3):
            await stream.write(replay_pb2.InsertRequest())
        await stream.read_end()


async def test_a_stream_that_ends_well_but_early_is_unreachable_for_reader_and_writer():
    async with scripted(0) as stream:
        for _ in range(2):
            with pytest.raises(UnreachableError, match="ended the stream too early"):
                await stream.read()
        with pytest.raises(UnreachableError, match="ended the stream too early"):
            await stream.write(replay_pb2.InsertRequest())
        await stream.end_writing()


async def test_a_refusal_is_raised_by_everything_that_follows_it():
    async with scripted(0, StaleLeaseError("gone")) as stream:
        for _ in range(2):
            with pytest.raises(StaleLeaseError, match="gone"):
                await stream.read()
        with pytest.raises(StaleLeaseError, match="gone"):
            await stream.write(replay_pb2.InsertRequest())
        with pytest.raises(StaleLeaseError, match="gone"):
            await stream.read_end()


async def test_what_was_sent_before_a_refusal_can_be_read():
    async with scripted(2, StaleLeaseError("gone")) as stream:
        await stream.write(replay_pb2.InsertRequest())
        await stream.write(replay_pb2.InsertRequest())
        assert [await stream.read(), await stream.read()] == [ANSWER, ANSWER]
        with pytest.raises(StaleLeaseError):
            await stream.read()


async def test_a_refusal_under_many_writes_is_told_to_the_writer_and_the_reader():
    """grpc.aio overwrites the status of a stream that ends while it is written to."""
    seen = Counter()

    async def write(stream):
        big = replay_pb2.InsertRequest(chunk=replay_pb2.InsertChunk(rows=bytes(20_000)))
        while True:
            await stream.write(big)

    async def read(stream):
        while True:
            await stream.read()

    for answers in range(100):
        async with scripted(answers % 7, StaleLeaseError("gone")) as stream:
            for error in await asyncio.gather(write(stream), read(stream), return_exceptions=True):
                seen[type(error)] += 1
    assert seen == {StaleLeaseError: 200}


async def test_a_writer_whose_answers_nobody_reads_is_told_at_least_that_the_stream_broke():
    async def write(stream):
        while True:
            await stream.write(replay_pb2.InsertRequest())

    async with scripted(3, StaleLeaseError("gone")) as stream:
        with pytest.raises((StaleLeaseError, UnreachableError)):
            await write(stream)


async def test_cancelling_a_stream_wakes_its_reader_and_fails_its_writer():
    async with scripted(2) as stream:
        await stream.write(replay_pb2.InsertRequest())
        assert await stream.read() == ANSWER
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises(UnreachableError, match="was cancelled"):
            await promptly(reading)
        with pytest.raises(UnreachableError):
            await promptly(stream.write(replay_pb2.InsertRequest()))


async def test_a_task_that_is_cancelled_while_it_reads_is_cancelled():
    async with scripted(1) as stream:
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert reading.cancelled()


async def test_a_closed_channel_wakes_its_streams():
    async with listening(Scripted(1)) as (_, address), open_channel(address) as channel:
        stream = ClientStream(replay_pb2_grpc.ReplayServiceStub(channel).Insert(), str(address))
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        await channel.close()
        with pytest.raises(UnreachableError):
            await promptly(reading)


async def test_a_stream_that_gets_no_connection_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.client.insert.UNARY_TIMEOUT_S", 0.2)
    monkeypatch.setattr("dase_grpc.replay.client.sample.UNARY_TIMEOUT_S", 0.2)
    async with serving() as service:
        target = await service.target()
        await service.server.stop(None)
        with pytest.raises(UnreachableError, match=r"within 0.2 s"):
            await Inserter(target, writer_id="w").open()
        with pytest.raises(UnreachableError, match=r"within 0.2 s"):
            await Sampler(target, batch_size=1).open(credits=1)


async def test_a_service_that_does_not_answer_a_header_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.client.insert.UNARY_TIMEOUT_S", 0.2)
    monkeypatch.setattr("dase_grpc.replay.client.sample.UNARY_TIMEOUT_S", 0.2)

    class Silent(replay_pb2_grpc.ReplayServiceServicer):
        async def Insert(self, request_iterator, context):
            while await context.read() is not grpc.aio.EOF:
                pass

    async with serving() as service, listening(Silent()) as (_, address), open_channel(address) as channel:
        target = await service.target()
        silent = type(target)(channel, str(address), target.member, target.schema)
        with pytest.raises(UnreachableError, match=r"did not answer within 0.2 s"):
            await Inserter(silent, writer_id="w").open()


async def test_a_lease_that_is_lost_under_a_writing_inserter_is_told_to_both_its_tasks():
    async with serving(capacity=100) as service:
        for agent_id in range(10):
            target = await service.target(agent_id)
            inserter = await Inserter(target, writer_id=f"w{agent_id}", window=100_000).open()

            async def write(inserter=inserter, agent_id=agent_id):
                rows = rows_of(1, 100, agent_id)
                while True:
                    await inserter.append(rows)

            receiving = asyncio.ensure_future(inserter.receive())
            writing = asyncio.ensure_future(write())
            await eventually(lambda inserter=inserter: inserter.acknowledged_seq > 500)
            service.run.leases.leave(agent_id, target.member.epoch, because="test")
            errors = await promptly(asyncio.gather(receiving, writing, return_exceptions=True))
            assert [type(error) for error in errors] == [StaleLeaseError, StaleLeaseError]


async def test_draining_under_a_writing_inserter_is_told_as_such():
    async with serving(capacity=100) as service:
        inserter = await Inserter(await service.target(), writer_id="w").open()

        async def write():
            rows = rows_of(1, 100)
            while True:
                await inserter.append(rows)

        receiving, writing = asyncio.ensure_future(inserter.receive()), asyncio.ensure_future(write())
        await eventually(lambda: inserter.acknowledged_seq > 500)
        service.replay.streams.drain()
        errors = await promptly(asyncio.gather(receiving, writing, return_exceptions=True))
        assert [type(error) for error in errors] == [DrainingError, DrainingError]


async def test_streams_that_are_cancelled_at_once_leave_nothing_behind(service):
    """Whatever a servicer had started by then is to be ended and awaited."""
    target, before = await service.target(), len(asyncio.all_tasks())
    for rounds in range(60):
        call = service.stub.Insert() if rounds % 2 else service.stub.Sample()
        await call.write(insert_header(target) if rounds % 2 else sample_header(target, credits=1))
        for _ in range(rounds % 6):
            await asyncio.sleep(0)
        call.cancel()
    await eventually(lambda: len(asyncio.all_tasks()) <= before)
    gc.collect()
