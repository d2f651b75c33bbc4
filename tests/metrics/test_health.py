"""Probes: what a node answers whoever asks whether it lives and whether it can work."""

import http.client
import socket

import pytest
from patience import PATIENCE_S

from dase_grpc.metrics.endpoint import LIVE_PATH, READY_PATH, Health, make_registry, metrics_endpoint


def asked(health: Health, path: str) -> tuple[int, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with metrics_endpoint(make_registry(), "127.0.0.1", port, health):
        return got(port, path)


def got(port: int, path: str) -> tuple[int, str]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    client.request("GET", path)
    answer = client.getresponse()
    text = answer.read().decode()
    client.close()
    return answer.status, text


@pytest.mark.slow
def test_a_node_lives_while_its_loop_turns():
    assert asked(Health(lambda: True), LIVE_PATH) == (200, "alive\n")
    assert asked(Health(lambda: False), LIVE_PATH) == (503, "the event loop is stuck\n")


@pytest.mark.slow
def test_a_node_is_ready_only_within_the_block_in_which_it_works():
    health = Health(lambda: True)
    assert asked(health, READY_PATH) == (503, "not ready\n")
    with health.ready():
        assert asked(health, READY_PATH) == (200, "ready\n")
    assert asked(health, READY_PATH) == (503, "not ready\n")


def test_a_node_is_not_ready_after_an_error_in_its_work():
    health = Health(lambda: True)
    with pytest.raises(RuntimeError), health.ready():
        raise RuntimeError
    assert not health.is_ready


@pytest.mark.slow
def test_metrics_are_served_beside_the_probes():
    status, text = asked(Health(lambda: False), "/metrics")
    assert status == 200
    assert "dase_build_info" in text
