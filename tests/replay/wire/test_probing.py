"""Why a service does not answer: its name, its port, or nothing that the operating system knows of."""

import asyncio
import socket

import pytest

from dase_grpc.replay.wire.addresses import Address, silence_of


async def test_a_port_where_nobody_listens_is_called_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, so nobody else has it, and not listening
        assert await silence_of(Address("127.0.0.1", taken.getsockname()[1])) == "nothing listens there"


async def test_a_name_that_does_not_resolve_is_named(monkeypatch):
    async def resolve(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    silence = await silence_of(Address("replay.example", 50051))
    assert silence == "the name replay.example does not resolve (Name or service not known)"


async def test_a_machine_that_says_nothing_is_given_up_soon(monkeypatch):
    async def connect(host, port):
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", connect)
    assert await silence_of(Address("127.0.0.1", 1), within_s=0.01) == "no connection within 0.01 s"


@pytest.mark.parametrize("error", [OSError(101, "Network is unreachable"), OSError("no route")])
async def test_what_the_operating_system_says_otherwise_is_passed_on(monkeypatch, error):
    async def connect(host, port):
        raise error

    monkeypatch.setattr(asyncio, "open_connection", connect)
    assert await silence_of(Address("127.0.0.1", 1)) == f"no connection ({error.strerror or error})"


async def test_a_service_that_listens_has_nothing_of_that(monkeypatch):
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        assert not await silence_of(Address("127.0.0.1", server.sockets[0].getsockname()[1]))
