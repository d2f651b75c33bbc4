"""Insert: each row is stored once, acknowledged after its commit, and refused with a reason."""

import asyncio
import itertools

import grpc
import numpy as np
import pytest
from replay.wire.services import (
    END,
    SCHEMA,
    WIDE,
    acknowledged,
    answers,
    chunk,
    eventually,
    grown,
    insert,
    insert_header,
    listening,
    promptly,
    rows_of,
    sent,
    serving,
)

from dase_grpc.errors import MalformedError, SequenceGapError, StaleLeaseError, UnreachableError
from dase_grpc.replay.client.cluster import StreamTarget, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.service.insert import ACK_ROWS
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.v1 import replay_pb2, replay_pb2_grpc


async def inserting(service, *messages, target=None):
    """An Insert stream, of a node that joins now without `target`, on which these messages were sent."""
    return await sent(service.stub.Insert(), insert_header(target or await service.target()), *messages)


async def test_rows_arrive_in_order_and_are_all_acknowledged(service):
    inserter = Inserter(await service.target(), writer_id="w")
    await insert(inserter, rows_of(1, 3), rows_of(4, 4), rows_of(5, 300))
    assert service.stored() == list(range(1, 301))
    assert (inserter.sent_seq, inserter.acknowledged_seq, inserter.unacknowledged) == (300, 300, 0)
    assert inserter.finished


async def test_a_second_stream_of_a_writer_goes_on_from_what_is_committed(service):
    target = await service.target()
    await insert(Inserter(target, writer_id="w"), rows_of(1, 10))
    second = Inserter(target, writer_id="w")
    await insert(second, rows_of(11, 20))
    assert service.stored() == list(range(1, 21))
    assert second.acknowledged_seq == 20


async def test_writers_of_two_agents_may_have_the_same_name(service):
    for agent_id in (0, 1):
        inserter = Inserter(await service.target(agent_id), writer_id="w")
        await insert(inserter, rows_of(1, 3, agent_id))
        assert inserter.acknowledged_seq == 3
    assert [service.stored(agent_id=agent_id) for agent_id in (0, 1)] == [[1, 2, 3], [1, 2, 3]]


async def test_a_gap_is_refused_and_the_sentence_names_the_number_that_comes_next(service):
    inserter = await Inserter(await service.target(), writer_id="w").open()
    await inserter.append(rows_of(1, 2))
    inserter.sent_seq = 5
    await inserter.append(rows_of(6, 6))
    with pytest.raises(SequenceGapError, match="resend from 3"):
        await inserter.receive()
    assert service.stored() == [1, 2]


async def test_a_stream_that_just_ends_keeps_the_chunks_that_arrived_whole(service):
    call = await inserting(service, chunk(1, rows_of(1, 5)), chunk(6, rows_of(6, 9)))
    await call.done_writing()
    await answers(call)
    assert service.stored() == list(range(1, 10))


async def test_a_stream_cancelled_in_the_middle_leaves_whole_rows_and_the_writer_goes_on(service):
    target = await service.target()
    chunks = (chunk(first, rows_of(first, first + 9)) for first in range(1, 200, 10))
    (await inserting(service, *chunks, target=target)).cancel()
    inserter = await Inserter(target, writer_id="w").open()
    assert service.stored() == list(range(1, inserter.sent_seq + 1))


async def test_the_end_frame_is_answered_once_with_finished(service):
    call = await inserting(service, chunk(1, rows_of(1, 2)), END)
    *before, last = await answers(call)
    assert last == replay_pb2.InsertResponse(committed_seq=2, finished=True)
    assert not any(answer.finished for answer in before)
    assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_without_rows_finishes(service):
    inserter = await insert(Inserter(await service.target(), writer_id="w"))
    assert (inserter.finished, inserter.acknowledged_seq) == (True, 0)


async def test_acknowledgements_are_cumulative_and_cover_many_chunks_of_a_fast_writer(service):
    call = await inserting(service)
    assert (await call.read()).committed_seq == 0
    chunks = 200
    await sent(call, *(chunk(first, rows_of(first, first + 9)) for first in range(1, 10 * chunks, 10)), END)
    seen = [answer.committed_seq for answer in await answers(call)]
    assert seen == sorted(seen)
    assert seen[-1] == 10 * chunks
    assert len(seen) < chunks


async def test_an_acknowledgement_comes_although_nothing_follows(service):
    call = await inserting(service)
    assert (await call.read()).committed_seq == 0
    for seq in (1, 2, 3):
        await call.write(chunk(seq, rows_of(seq, seq)))
        assert (await call.read()).committed_seq == seq


async def test_one_acknowledgement_goes_out_at_once_and_the_next_one_not_soon_after_it(service, monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.service.insert.ACK_EVERY_S", 0.0)
    call = await inserting(service)
    assert (await call.read()).committed_seq == 0
    await service.round_trips()
    monkeypatch.setattr("dase_grpc.replay.service.insert.ACK_EVERY_S", 3_600.0)
    await call.write(chunk(1, rows_of(1, 1)))
    assert (await promptly(call.read())).committed_seq == 1
    await sent(call, *(chunk(seq, rows_of(seq, seq)) for seq in (2, 3)))
    await eventually(lambda: service.stored() == [1, 2, 3])
    await service.round_trips()
    await call.write(END)
    answer = await promptly(call.read())
    assert (answer.committed_seq, answer.finished) == (3, True)  # one, for all that came since the first


async def test_many_rows_are_acknowledged_at_once():
    async with serving(capacity=10 * ACK_ROWS) as service:
        call = await inserting(service)
        assert (await call.read()).committed_seq == 0
        await call.write(chunk(1, rows_of(1, ACK_ROWS)))
        assert (await call.read()).committed_seq == ACK_ROWS


class Reluctant(replay_pb2_grpc.ReplayServiceServicer):
    """Takes all rows, and acknowledges one for each time `allowed` is released."""

    def __init__(self) -> None:
        self.received = 0
        self.allowed = asyncio.Semaphore(0)

    async def Insert(self, request_iterator, context):
        await context.write(replay_pb2.InsertResponse())
        acknowledging = asyncio.ensure_future(self._acknowledge(context))
        while not (request := await context.read()).HasField("end"):
            self.received += len(request.chunk.rows) // SCHEMA.row_bytes
        acknowledging.cancel()
        await context.write(replay_pb2.InsertResponse(committed_seq=self.received, finished=True))

    async def _acknowledge(self, context):
        for seq in itertools.count(1):
            await self.allowed.acquire()
            await context.write(replay_pb2.InsertResponse(committed_seq=seq))


@pytest.mark.parametrize("rows_per_append", [1, 5, 100])
async def test_never_more_rows_than_the_window_are_unacknowledged(rows_per_append):
    service, window, total = Reluctant(), 8, 40
    waits_for = min(rows_per_append, window)  # a chunk waits until there is room for all of it

    async def send_all(inserter):
        for first in range(1, total + 1, rows_per_append):
            await inserter.append(rows_of(first, min(first + rows_per_append - 1, total)))
        await inserter.finish()

    async with (
        listening(service) as (_, address),
        open_channel(address) as channel,
        asyncio.TaskGroup() as tasks,
    ):
        member = Membership("the-run", 0, 1, ttl_s=10, capacity=0, min_size=0)
        inserter = Inserter(StreamTarget(channel, str(address), member, SCHEMA), writer_id="w", window=window)
        await inserter.open()
        tasks.create_task(inserter.receive())
        tasks.create_task(send_all(inserter))
        for acknowledged_rows in range(total - window):
            await eventually(lambda n=acknowledged_rows: service.received > n + window - waits_for)
            assert inserter.sent_seq <= acknowledged_rows + window
            service.allowed.release()
    assert service.received == total


async def test_rows_wider_than_a_chunk_limit_go_out_in_several_chunks():
    async with serving() as service:
        target = await service.target(schema=WIDE)
        inserter = await insert(Inserter(target, writer_id="w"), rows_of(1, 100, schema=WIDE))
        assert 100 * WIDE.row_bytes > 3 * 2**20
        assert service.stored() == list(range(1, 101))
        assert inserter.acknowledged_seq == 100


async def test_a_lease_that_is_lost_fences_off_the_next_chunk(service):
    target = await service.target()
    inserter = await Inserter(target, writer_id="w").open()
    await inserter.append(rows_of(1, 2))
    await eventually(lambda: service.stored() == [1, 2])
    await service.client.leave(target.member, reason="test")
    await inserter.append(rows_of(3, 4))
    with pytest.raises(StaleLeaseError, match="join again"):
        await inserter.receive()
    assert service.stored() == [1, 2]


async def test_rows_of_another_agent_are_refused_and_none_is_stored(service):
    inserter = await Inserter(await service.target(0), writer_id="w").open()
    await inserter.append(np.concatenate([rows_of(1, 2, 0), rows_of(3, 3, 1)]))
    with pytest.raises(MalformedError, match="another agent than its own, 0"):
        await inserter.receive()
    assert service.stored() == []


async def test_rows_that_are_not_finite_are_refused_one_by_one_and_reported(service):
    rows = rows_of(1, 5)
    rows[1, 0], rows[3, 4] = np.nan, np.inf
    inserter = await insert(Inserter(await service.target(), writer_id="w"), rows, rows_of(6, 6))
    assert service.stored() == [1, 3, 5, 6]
    assert (inserter.refused_rows, inserter.acknowledged_seq) == (2, 6)
    assert service.run.store.traffic.refused == {(0, "not_finite"): 2}


async def test_an_inserter_that_is_cancelled_raises_instead_of_waiting(service):
    inserter = await Inserter(await service.target(), writer_id="w", window=4).open()
    receiving = asyncio.ensure_future(inserter.receive())
    await inserter.append(rows_of(1, 4))
    await eventually(lambda: inserter.unacknowledged == 0)
    inserter.cancel()
    with pytest.raises(UnreachableError, match="was cancelled"):
        await receiving
    with pytest.raises(UnreachableError):
        await inserter.append(rows_of(5, 5))


# Streams that idle
@pytest.mark.slow
async def test_a_stream_that_idles_keeps_no_rows(service):
    target = await service.target(schema=WIDE)
    data = rows_of(1, 32, schema=WIDE)
    calls = []
    with grown() as bytes_grown:
        for writer in range(16):
            header = insert_header(target, f"w-{writer}")
            calls.append(await sent(service.stub.Insert(), header, chunk(1, data)))
            await acknowledged(calls[-1], 32)
        assert bytes_grown() < 4 * 2**20
    for call in calls:
        call.cancel()
