"""Probes of real nodes: they live while they wait for others, and are ready while they can work."""

import asyncio
import http.client

import pytest
from nodes.learning_cases import FOREVER, learner_options, learning, until_trained
from nodes.running import replay_node
from patience import PATIENCE_S
from replay.wire.services import free_port, promptly

from dase_grpc.metrics.endpoint import LIVE_PATH, READY_PATH
from dase_grpc.replay.wire.addresses import Address


def asked(port: int, path: str) -> int:
    """The status of an answer; 0 where nobody listens."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        client.request("GET", path)
        return client.getresponse().status
    except ConnectionRefusedError:
        return 0
    finally:
        client.close()


async def until_asked(port: int, path: str, status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(asked, port, path) != status:  # noqa: ASYNC110 - what another thread says
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_replay_is_alive_and_ready_while_it_serves():
    port = free_port()
    async with replay_node(metrics_port=port):
        assert await asyncio.to_thread(asked, port, LIVE_PATH) == 200
        assert await asyncio.to_thread(asked, port, READY_PATH) == 200
    assert asked(port, READY_PATH) == 0


@pytest.mark.slow
async def test_a_learner_that_waits_for_its_replay_is_alive_but_not_ready(tmp_path):
    port = free_port()
    nobody = Address("127.0.0.1", free_port())
    async with learning(learner_options(nobody, tmp_path / "run", metrics_port=port)):
        await until_asked(port, LIVE_PATH, 200)
        assert await asyncio.to_thread(asked, port, READY_PATH) == 503


@pytest.mark.slow
async def test_a_learner_that_has_joined_is_ready_until_it_ends(tmp_path):
    port = free_port()
    async with replay_node() as replay:
        options = learner_options(replay.address, tmp_path / "run", metrics_port=port, train__steps=FOREVER)
        async with learning(options) as (task, stop):
            await until_trained(replay.address, task=task)
            await until_asked(port, READY_PATH, 200)
            stop.set()
            await promptly(task)
    assert asked(port, READY_PATH) == 0
