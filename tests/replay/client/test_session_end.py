"""How a session ends: by its block, by an error, by Ctrl-C, or because its replay has ended it."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
from contracts.sentences import assert_one_sentence
from patience import PATIENCE_S
from replay.client.test_session import error_of, session_at, store_all
from replay.wire.services import SCHEMA, eventually, promptly, rows_of

from dase_grpc.errors import (
    StaleLeaseError,
    UnreachableError,
)
from dase_grpc.replay.client.cluster import Lines
from dase_grpc.replay.client.handoff import Times
from dase_grpc.replay.client.session import Session
from dase_grpc.replay.wire.messages import Membership


@pytest.mark.parametrize("call", ["store", "next", "publish", "latest"])
async def test_a_lost_lease_is_raised_by_the_next_call_and_nothing_more_is_stored(service, call):
    joined, lost = list[Membership](), threading.Event()
    calls = {
        "store": lambda session: session.store(rows_of(2, 2)[0]),
        "next": lambda session: session.next(),
        "publish": lambda session: session.publish(1, b"policy"),
        "latest": lambda session: session.latest(1),
    }

    def program():
        with session_at(service, agent=0, follow=[1]) as session:
            session.store(rows_of(1, 1)[0])
            joined.append(session.member)
            lost.wait(PATIENCE_S)
            while True:
                calls[call](session)

    running = asyncio.ensure_future(error_of(StaleLeaseError, program))
    await eventually(lambda: bool(joined) and service.stored() == [1])
    await service.client.leave(joined[0], reason="for another node")
    await service.join(0)
    lost.set()
    assert_one_sentence(await promptly(running), "fenced off: agent 0 belongs to another node now")
    assert service.stored() == [1]


@pytest.mark.parametrize("call", ["publish", "latest"])
async def test_calls_after_the_streams_have_ended_raise_what_has_ended_them_although_the_farewell_goes_on(
    service, call, monkeypatch
):
    """A farewell takes long where a replay is away."""
    ended, goes_on = threading.Event(), threading.Event()

    @asynccontextmanager
    async def lines(*arguments):
        async with Lines(*arguments) as opened:
            try:
                yield opened
            finally:
                ended.set()
                await asyncio.to_thread(goes_on.wait, PATIENCE_S)

    monkeypatch.setattr("dase_grpc.replay.client.session.Lines", lines)
    joined = list[Membership]()

    def program():
        with session_at(service, agent=0, follow=[1]) as session:
            joined.append(session.member)
            ended.wait(PATIENCE_S)
            threading.Timer(0.1, goes_on.set).start()
            _ = session.publish(1, b"policy") if call == "publish" else session.latest(1)
            raise AssertionError("the session has ended")

    running = asyncio.ensure_future(error_of(StaleLeaseError, program))
    await eventually(lambda: bool(joined))
    await service.client.leave(joined[0], reason="for another node")
    await service.join(0)
    await promptly(running)


async def test_rows_that_a_replay_does_not_take_are_counted_in_the_error(service):
    gone = threading.Event()

    def program():
        with session_at(service, replay_timeout_s=0.2, timing=Times(gather_s=3_600.0)) as session:
            store_all(session, rows_of(1, 3))
            gone.wait(PATIENCE_S)

    running = asyncio.ensure_future(error_of(UnreachableError, program))
    await eventually(lambda: bool(service.run.opened))
    await service.server.stop(None)
    gone.set()
    error = await promptly(running)
    assert error.__notes__ == ["3 transitions were not acknowledged"]


async def test_an_error_in_the_block_goes_on_after_its_rows_have_arrived(service):
    def program():
        with session_at(service) as session:
            store_all(session, rows_of(1, 3))
            raise ZeroDivisionError("no step")

    await error_of(ZeroDivisionError, program)
    assert service.stored() == [1, 2, 3]
    assert (await service.client.status()).agents[0].reason == "failed: ZeroDivisionError: no step"


async def test_ctrl_c_in_the_block_goes_on_after_its_rows_have_arrived(service):
    def program():
        with session_at(service) as session:
            store_all(session, rows_of(1, 3))
            raise KeyboardInterrupt

    await error_of(KeyboardInterrupt, program)
    assert service.stored() == [1, 2, 3]
    assert (await service.client.status()).agents[0].reason == "left after 3 transitions"


async def test_ctrl_c_while_the_replay_is_waited_for_ends_the_wait(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dase_grpc.replay.client.session.wait", interrupted)

    def program():
        with Session("127.0.0.1:9", schema=SCHEMA):
            raise AssertionError("the block has begun")

    await error_of(KeyboardInterrupt, program)


async def test_a_second_ctrl_c_does_not_wait_for_rows(service, monkeypatch):
    gone = threading.Event()

    def program():
        with session_at(service) as session:
            gone.wait(PATIENCE_S)
            store_all(session, rows_of(1, 3))
            monkeypatch.setattr(session._thread, "join", pressed(session._thread.join))

    running = asyncio.ensure_future(error_of(KeyboardInterrupt, program))
    await eventually(lambda: bool(service.run.opened))
    await service.server.stop(None)
    gone.set()
    await promptly(running)


def pressed(join):
    """A wait that Ctrl-C interrupts the first time."""
    presses = iter([KeyboardInterrupt()])

    def interrupted():
        for press in presses:
            raise press
        join()

    return interrupted
