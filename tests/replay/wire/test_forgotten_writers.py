"""Writers that come and go: those that are done make room, and who was forgotten is never taken for new."""

import asyncio

import pytest
from replay.wire.services import (
    acknowledged,
    chunk,
    eventually,
    insert,
    insert_header,
    refusal,
    rows_of,
    sent,
)

from dase_grpc.errors import WriterForgottenError
from dase_grpc.progress import Attendance, Attendant
from dase_grpc.replay.buffer.store import MAX_AGENT_WRITERS
from dase_grpc.replay.client.insert import Inserter

STATUS = "FAILED_PRECONDITION"


@pytest.mark.slow
async def test_more_actors_than_the_table_takes_may_come_and_go(service):
    target = await service.target()
    for number in range(MAX_AGENT_WRITERS + 20):
        row = rows_of(number + 1, number + 1)
        node = Attendant(str(number), "host", "actor", 0)
        await insert(Inserter(target, writer_id=node.writer_id), row)
        await service.client.attend(node, Attendance(), leaving=True)
    assert service.stored() == [*range(1, MAX_AGENT_WRITERS + 21)]


async def test_however_many_streams_begin_before_their_first_rows_those_that_are_gone_make_room(service):
    """As where a fleet of actors starts at once: at each header the table still had room for one."""
    target, store = await service.target(), service.run.store
    for number in range(MAX_AGENT_WRITERS - 10):
        name = f"gone {number}"
        store.append(name, 1, rows_of(1, 1), agent_id=0)
        store.watch.leave((0, name))
    new = [await Inserter(target, writer_id=f"new {number}").open() for number in range(20)]
    async with asyncio.TaskGroup() as tasks:
        for each in new:
            tasks.create_task(each.receive())
            await each.append(rows_of(2, 2))
            await each.finish()
    assert service.stored().count(2) == 20


async def test_a_writer_that_was_forgotten_after_its_rows_were_stored_unheard_cannot_store_them_again(
    service,
):
    """Its first chunk is stored, the acknowledgement lost; what it resends would begin at 1 again."""
    target = await service.target()
    call = await sent(service.stub.Insert(), insert_header(target))
    heard = (await call.read()).forgotten_writers
    await call.write(chunk(1, rows_of(1, 3)))
    await acknowledged(call, 3)
    call.cancel()
    service.run.store.forget([(0, "w")])

    header = insert_header(target)
    header.header.forgotten_writers = heard
    code, sentence = await refusal(await sent(service.stub.Insert(), header))
    assert (code.name, service.stored()) == (STATUS, [1, 2, 3])
    assert "start its node again" in sentence


async def test_a_writer_that_stays_away_while_others_are_forgotten_goes_on(service):
    target = await service.target()
    first = await insert(Inserter(target, writer_id="w"), rows_of(1, 3))
    await insert(Inserter(target, writer_id="another"), rows_of(4, 4))
    service.run.store.forget([(0, "another")])
    again = Inserter(target, writer_id="w", forgotten_writers=first.forgotten_writers)
    await insert(again, rows_of(5, 6))
    assert (again.acknowledged_seq, again.forgotten_writers) == (5, 1)
    assert service.stored() == [*range(1, 7)]


async def test_a_writer_that_has_stored_nothing_yet_is_not_taken_for_a_forgotten_one(service):
    target = await service.target()
    first = await Inserter(target, writer_id="w").open()
    first.cancel()
    again = Inserter(target, writer_id="w", forgotten_writers=first.forgotten_writers)
    await insert(again, rows_of(1, 2))
    assert service.stored() == [1, 2]


async def test_what_a_stream_hears_while_it_is_open_counts(service):
    """A writer that has long waited with an open stream is not refused for those forgotten meanwhile."""
    target = await service.target()
    await insert(Inserter(target, writer_id="another"), rows_of(1, 1))
    waiting = await Inserter(target, writer_id="w").open()
    service.run.store.forget([(0, "another")])
    receiving = asyncio.ensure_future(waiting.receive())
    await waiting.append(rows_of(2, 2))
    await eventually(lambda: not waiting.unacknowledged)
    assert waiting.forgotten_writers == 1
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)


@pytest.mark.parametrize("heard", [0, 7])
async def test_a_client_of_ours_is_refused_with_the_error_of_that_name(service, heard):
    target = await service.target()
    await insert(Inserter(target, writer_id="w"), rows_of(1, 1))
    service.run.store.forget([(0, "w")])
    with pytest.raises(WriterForgottenError):
        await Inserter(target, writer_id="w", forgotten_writers=heard).open()
