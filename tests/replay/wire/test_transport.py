"""Addresses: what they are read from, who may listen on them, and whose they already are."""

import socket

import grpc
import pytest
from contracts.sentences import refuses
from patience import PATIENCE_S
from replay.wire.services import LOOPBACK, serving

from dase_grpc.errors import AddressError
from dase_grpc.replay.client.cluster import open_channel
from dase_grpc.replay.service import server as service_server
from dase_grpc.replay.service.server import bind, make_server
from dase_grpc.replay.wire.addresses import MAX_MESSAGE_BYTES, Address, parse_address, require_private
from dase_grpc.replay.wire.packed import CHUNK_HEAD_BYTES, FRAME_HEAD_BYTES, ROWS_BYTES


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50_051),
        ("localhost:0", "localhost", 0),
        ("0.0.0.0:65535", "0.0.0.0", 65_535),
        ("replay.default.svc.cluster.local:1", "replay.default.svc.cluster.local", 1),
        ("node_1-a:80", "node_1-a", 80),
        ("[::1]:50051", "::1", 50_051),
        ("[fe80::1%eth0]:7", "fe80::1%eth0", 7),
        ("[::ffff:10.0.0.1]:7", "::ffff:10.0.0.1", 7),
        (f"{'a' * 63}.x:1", f"{'a' * 63}.x", 1),
        ("replay.example.:1", "replay.example.", 1),
        ("bücher.example:1", "bücher.example", 1),
    ],
)
def test_an_address_is_read_and_written_the_same(text, host, port):
    assert parse_address(text) == Address(host, port)
    assert str(parse_address(text)) == text


@pytest.mark.parametrize("host", ["dns", "unix", "ipv4", "localhost"])
def test_no_host_is_taken_for_a_scheme_of_grpc(host):
    assert Address(host, 50_051).target == f"dns:///{host}:50051"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1",
        ":50051",
        "127.0.0.1:",
        "127.0.0.1:x",
        "127.0.0.1:-1",
        "127.0.0.1:65536",
        "127.0.0.1:999999999999",
        "127.0.0.1:٣",
        "127.0.0.1: 5",
        " 127.0.0.1:5",
        "::1:50051",
        "[::1]",
        "[::1:50051",
        "::1]:50051",
        "[]:5",
        "http://127.0.0.1:50051",
        "a/b:5",
        "127.0.0.1:5\n",
        ".example.com:1",
        "a..b:1",
        "dns:a..b:1",
        "a" * 64 + ".x:1",
        ".:1",
        "a\0b:1",
        "\udcff:1",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text):
    with refuses(AddressError, repr(text), "HOST:PORT, e.g. 127.0.0.1:50051"):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("localhost", True),
        ("LocalHost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("replay", False),
        ("localhost.example.org", False),
    ],
)
def test_only_loopback_may_be_listened_on_without_saying_insecure(host, loopback):
    address = Address(host, 1)
    assert address.loopback is loopback
    require_private(address, insecure=True)
    if loopback:
        require_private(address, insecure=False)
    else:
        with pytest.raises(AddressError, match="--insecure"):
            require_private(address, insecure=False)


async def test_port_0_becomes_a_real_one():
    async with serving() as service:
        assert service.address.port > 0
        assert (await service.client.status()).run_id == "the-run"


@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")])
async def test_a_name_is_not_listened_on_where_one_of_its_addresses_is_taken(monkeypatch, addresses):
    resolve = socket.getaddrinfo

    def several(host, port, **how):
        return [found for each in addresses for found in resolve(each, port, **how)]

    monkeypatch.setattr(socket, "getaddrinfo", several)
    refused = pytest.raises(AddressError, match=r"cannot listen on several\.test:\d+ \(in use\)")
    with socket.create_server(("127.0.0.1", 0)) as taken, refused:
        bind(make_server(), Address("several.test", taken.getsockname()[1]))


async def test_a_port_in_use_is_refused_without_a_line_from_grpc(capfd):
    async with serving() as service:
        server = make_server()
        with pytest.raises(AddressError, match=f"cannot listen on {service.address}.*--listen"):
            bind(server, service.address)
    assert "add_port" not in capfd.readouterr().err


async def test_a_port_that_was_taken_meanwhile_is_refused_too(monkeypatch):
    monkeypatch.setattr(service_server, "require_bindable", lambda address: None)
    async with serving() as service:
        with pytest.raises(AddressError, match=f"cannot listen on {service.address}.*--listen"):
            bind(make_server(), service.address)


async def test_a_host_that_is_not_this_machines_is_refused():
    with pytest.raises(AddressError, match=r"203\.0\.113\.7"):
        bind(make_server(), Address("203.0.113.7", 0))


async def test_a_message_of_the_limit_passes_in_both_directions():
    size = MAX_MESSAGE_BYTES
    server = make_server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("raw", {"Echo": grpc.unary_unary_rpc_method_handler(_echo)})]
    )
    address = bind(server, LOOPBACK)
    await server.start()
    async with open_channel(address) as channel:
        echo = channel.unary_unary("/raw/Echo")
        assert len(await echo(bytes(size), timeout=PATIENCE_S)) == size
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await echo(bytes(size + 1), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(None)


async def _echo(request, context):
    return request


def test_frames_and_chunks_stay_below_1_mib_with_what_surrounds_them():
    assert ROWS_BYTES + max(FRAME_HEAD_BYTES, CHUNK_HEAD_BYTES) <= 2**20 <= MAX_MESSAGE_BYTES
