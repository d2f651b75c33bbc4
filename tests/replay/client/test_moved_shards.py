"""Shards that have moved, looked for behind their name while a node works."""

import asyncio
import time

import grpc
import pytest
from replay.wire.services import eventually, serving

from dase_grpc.replay.client.cluster import Lines
from dase_grpc.replay.client.connection import Away, Outage
from dase_grpc.replay.client.discovery import follow_name
from dase_grpc.replay.client.handoff import Times
from dase_grpc.replay.client.membership import LearnerConnection
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.security.dialler import NO_CREDENTIALS
from dase_grpc.replay.wire.addresses import Address, ReplayPlace


@pytest.fixture
async def foreign():
    """The address of a gRPC service of another kind."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Address("127.0.0.1", port)
    await server.stop(None)


async def test_a_service_of_another_kind_behind_the_name_is_passed_over_and_that_is_said_once(
    foreign, monkeypatch, caplog
):
    """As where the address of a pod that has gone has been given to another."""
    behind, looks = [foreign], []

    async def resolved(name):
        looks.append(name)
        return tuple(behind)

    monkeypatch.setattr("dase_grpc.replay.wire.addresses.resolved", resolved)
    async with serving() as before, serving() as now:
        connection = LearnerConnection(await before.target(), timing=Times(find_again_s=0.01))
        connection.outage = Outage(time.monotonic() - 60, Away.UNREACHABLE)
        async with Lines(ReplayPlace.parse("dns:replay.test:1"), NO_CREDENTIALS) as lines:
            following = asyncio.ensure_future(follow_name(Shards([connection]), lines))
            await eventually(lambda: len(looks) > 2 or following.done())
            behind.append(now.address)
            await eventually(lambda: connection.target.address == str(now.address) or following.done())
            assert not following.done()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    said = [record.getMessage() for record in caplog.records if "is passed over" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"{foreign}, to which dns:replay.test:1 leads, is passed over: ")
    assert "UNIMPLEMENTED" in said[0]
