"""The Prometheus endpoint over HTTPS: who may read it, and with which files."""

import asyncio
import http.client
import shutil
import socket
import ssl
from pathlib import Path

import pytest
from nodes.running import replay_node
from patience import PATIENCE_S

from dase_grpc.errors import AddressError, CredentialsError
from dase_grpc.metrics.endpoint import make_registry, metrics_endpoint
from dase_grpc.nodes.options import NodeOptions
from dase_grpc.replay.security.folders import server_contexts


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def client(folder: Path | None, authority: Path) -> ssl.SSLContext:
    """What a scraper knows: whom it trusts, and its own certificate, if any."""
    context = ssl.create_default_context(cafile=str(authority / "ca.crt"))
    if folder is not None:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


def scrape(port: int, context: ssl.SSLContext) -> tuple[str, int]:
    """The text, and the serial number of the certificate that the endpoint has shown."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE_S, context=context)
    try:
        connection.request("GET", "/metrics")
        shown = connection.sock.getpeercert()
        return connection.getresponse().read().decode(), int(shown["serialNumber"], 16)
    finally:
        connection.close()


@pytest.mark.slow
def test_whoever_shows_a_certificate_of_the_authority_reads_the_metrics(keyring, port):
    tls = server_contexts(keyring.folder("replay"))
    with metrics_endpoint(make_registry(), "127.0.0.1", port, tls=tls):
        text, _ = scrape(port, client(keyring.folder("observer"), keyring.authority))
    assert "dase_build_info" in text


@pytest.mark.parametrize("shown", [None, "other"])
@pytest.mark.slow
def test_nobody_else_does_and_no_traceback_is_printed(keyring, port, capfd, shown):
    folder = None if shown is None else keyring.folder("observer", authority=shown)
    with (
        metrics_endpoint(make_registry(), "127.0.0.1", port, tls=server_contexts(keyring.folder("replay"))),
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        scrape(port, client(folder, keyring.authority))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_client_that_does_not_shake_hands_keeps_neither_another_nor_the_end_waiting(keyring, port):
    tls = server_contexts(keyring.folder("replay"))
    with socket.socket() as silent:
        with metrics_endpoint(make_registry(), "127.0.0.1", port, tls=tls):
            silent.connect(("127.0.0.1", port))
            text, _ = scrape(port, client(keyring.folder("observer"), keyring.authority))
        assert "dase_build_info" in text


@pytest.mark.slow
def test_a_certificate_that_is_renewed_is_shown_to_the_next_client(keyring, port, tmp_path):
    folder = shutil.copytree(keyring.folder("replay"), tmp_path / "tls")
    context = client(keyring.folder("observer"), keyring.authority)
    with metrics_endpoint(make_registry(), "127.0.0.1", port, tls=server_contexts(folder)):
        before = scrape(port, context)[1]
        shutil.copytree(keyring.folder("replay", days_ago=1), folder, dirs_exist_ok=True)
        assert scrape(port, context)[1] != before


@pytest.mark.slow
async def test_a_replay_serves_its_metrics_beyond_loopback_with_certificates(keyring, port):
    async with replay_node(
        metrics_host="0.0.0.0", metrics_port=port, metrics_tls=keyring.folder("replay")
    ) as replay:
        context = client(keyring.folder("observer"), keyring.authority)
        text, _ = await asyncio.to_thread(scrape, port, context)
        assert "dase_replay_buffer_capacity_transitions" in text
        assert replay.address.loopback


def test_an_endpoint_that_is_off_needs_nothing_and_one_without_certificates_says_which_flag():
    assert NodeOptions(metrics_host="0.0.0.0", metrics_tls=Path("missing")).metrics_contexts() is None
    assert NodeOptions(metrics_host="0.0.0.0", metrics_port=1, insecure=True).metrics_contexts() is None
    with pytest.raises(AddressError, match="--metrics-tls DIR"):
        NodeOptions(metrics_host="0.0.0.0", metrics_port=1).metrics_contexts()
    with pytest.raises(CredentialsError, match=r"missing"):
        NodeOptions(metrics_port=1, metrics_tls=Path("missing")).metrics_contexts()
