"""The replay node: it answers, refuses bad addresses, and ends in order, whatever its clients do."""

import asyncio
import gc
import signal
import socket

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from logged import errors_in
from nodes.processes import replay_process
from nodes.running import joined, replay_node
from nodes.test_standard_services import Health, health_of
from patience import PATIENCE_S
from replay.wire.services import SCHEMA, WIDE, eventually, promptly, rows_of

from dase_grpc.errors import AddressError, DrainingError, StaleLeaseError, UnreachableError
from dase_grpc.nodes.replay import run_replay
from dase_grpc.nodes.replay_options import ReplayOptions
from dase_grpc.replay.client.cluster import ClusterClient, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.policies import PolicyPublisher, PolicySubscriber
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.wire.addresses import Address, parse_address


async def test_streams_that_idle_end_once_their_lease_was_given_back():
    async with replay_node(lease_check_s=0.02) as replay, joined(replay.address) as target:
        inserter, sampler = await opened(target, credits=0)
        await target.cluster.leave(target.member, reason="done")
        for ended in (inserter.receive(), sampler.next()):
            with pytest.raises(StaleLeaseError, match="gave epoch 1 back: done"):
                await promptly(ended)


async def test_health_says_not_serving_before_the_streams_end():
    order = []
    async with replay_node(grace_s=0.2) as replay, joined(replay.address) as target:
        inserter = await Inserter(target, writer_id="w").open()
        watching = health_pb2_grpc.HealthStub(target.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == Health.SERVING

        async def watch_health():
            assert (await watching.read()).status == Health.NOT_SERVING
            order.append("not serving")

        async def watch_stream():
            with pytest.raises(DrainingError):
                await inserter.receive()
            order.append("stream ended")

        watchers = asyncio.gather(watch_health(), watch_stream())
        await replay.end()
        await watchers
    assert order == ["not serving", "stream ended"]


GRACIOUS = {"grace_s": 2 * PATIENCE_S}
"""Whoever waits for the streams of a replay that stops to end by its grace waits in vain."""


async def test_an_idle_node_ends_at_once():
    async with replay_node(**GRACIOUS) as replay:
        await replay.end()


async def test_idle_streams_end_at_once_with_draining():
    async with replay_node(**GRACIOUS) as replay, joined(replay.address) as target:
        inserter, sampler = await opened(target, credits=0)
        subscriber = await PolicySubscriber(
            target.channel,
            target.address,
            run_id=target.member.run_id,
            schema_fingerprint=target.schema.fingerprint,
        ).open()
        await target.cluster.status()
        batch, policy = asyncio.ensure_future(sampler.next()), asyncio.ensure_future(subscriber.next())
        await replay.end()
        with pytest.raises(DrainingError, match="shutting down"):
            await inserter.receive()
        with pytest.raises(DrainingError, match="shutting down"):
            await batch
        with pytest.raises(DrainingError, match="shutting down"):
            await policy


async def test_a_sampler_that_waits_for_transitions_ends_at_once_with_draining():
    async with replay_node(min_size=100, **GRACIOUS) as replay, joined(replay.address) as target:
        sampler = await Sampler(target, batch_size=4).open(credits=2)
        batch = asyncio.ensure_future(sampler.next())
        await eventually(lambda: sampler.waiting is not None)
        await replay.end()
        with pytest.raises(DrainingError):
            await batch


@pytest.mark.slow
async def test_a_sampler_that_reads_nothing_does_not_keep_the_node():
    async with replay_node(grace_s=0.5) as replay, joined(replay.address, schema=WIDE) as target:
        await insert(target, rows_of(1, 20, schema=WIDE))
        sampler = await Sampler(target, batch_size=200).open(credits=1_000)
        client, sampled = target.cluster, [0, 1]
        while sampled[-1] != sampled[-2]:  # until the service is stuck in a write
            sampled.append((await client.status()).buffer.sampled_total)
            await asyncio.sleep(0.01)
        await replay.end()
        with pytest.raises((DrainingError, UnreachableError)):
            await read_all(sampler)


async def test_a_writing_inserter_ends_with_draining(replay):
    async with joined(replay.address) as target:
        inserter = await Inserter(target, writer_id="w").open()
        tasks = [asyncio.ensure_future(job) for job in (inserter.receive(), write_forever(inserter))]
        await eventually(lambda: inserter.acknowledged_seq > 1_000)
        await replay.end()
        errors = await promptly(asyncio.gather(*tasks, return_exceptions=True))
        assert {type(error) for error in errors} <= {DrainingError, UnreachableError}  # of a broken write


async def test_other_peoples_open_streams_do_not_keep_the_node():
    async with replay_node(grace_s=0.2) as replay, open_channel(replay.address) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watching.read()
        reflecting = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await reflecting.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await reflecting.read()
        await replay.end()


@pytest.mark.slow
async def test_a_node_with_many_open_streams_ends_without_a_word_too_much_when_it_is_told_so_twice():
    with replay_process("--run-id=the-run") as (node, text):
        async with joined(parse_address(text)) as target:
            run = {"run_id": target.member.run_id, "schema_fingerprint": target.schema.fingerprint}
            for number in range(4):
                await Inserter(target, writer_id=f"w{number}").open()
                await Sampler(target, batch_size=4).open(credits=2)
                await PolicySubscriber(target.channel, target.address, **run).open()
            others = [  # of these the end of the run is none, so they are cut off
                health_pb2_grpc.HealthStub(target.channel).Watch(health_pb2.HealthCheckRequest())
                for _ in range(4)
            ]
            for each in others:
                await each.read()
            node.send(signal.SIGTERM)
            node.send(signal.SIGTERM)
            assert await asyncio.to_thread(node.exit_code) == 0
    assert node.log.rpartition(" | ")[2].startswith("stopped; the buffer held 0 transitions")
    assert "Traceback" not in node.log


async def test_after_the_end_the_port_is_free_and_nothing_answers(replay):
    async with joined(replay.address) as target:
        await Inserter(target, writer_id="w").open()
        await replay.end()
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind((replay.address.host, replay.address.port))
        with pytest.raises(UnreachableError):
            await target.cluster.status(timeout_s=0.2)


async def test_a_new_node_takes_the_port_over_at_once():
    async with replay_node() as first:
        address = first.address
    async with replay_node(listen=address) as second, open_channel(address) as channel:
        assert second.address == address
        assert (await ClusterClient(channel, str(address)).status()).run_id == "the-run"


async def test_after_the_end_no_task_is_left():
    before = asyncio.all_tasks()
    async with replay_node(min_size=100) as replay, joined(replay.address) as target:
        inserter, sampler = await opened(target, credits=1)
        reading = asyncio.gather(inserter.receive(), sampler.next(), return_exceptions=True)
        await eventually(lambda: sampler.waiting is not None)
        await replay.end()
        await reading
    gc.collect()
    await eventually(lambda: asyncio.all_tasks() == before)


async def test_a_client_that_vanishes_leaves_the_node_serving_and_its_log_clean(replay, caplog):
    for _ in range(3):
        async with joined(replay.address) as target:
            inserter, sampler = await opened(target, credits=1_000)
            tasks = [
                asyncio.ensure_future(job)
                for job in (inserter.receive(), write_forever(inserter), read_all(sampler))
            ]
            await eventually(lambda inserter=inserter: inserter.acknowledged_seq > 1_000)
            await target.cluster.leave(target.member, reason="vanishing")
            await target.channel.close()
            await promptly(asyncio.gather(*tasks, return_exceptions=True))
    async with open_channel(replay.address) as channel:
        assert await health_of(channel) == Health.SERVING
    await replay.end()
    assert errors_in(caplog) == []


async def test_a_draining_node_refuses_to_be_joined():
    async with replay_node() as replay, open_channel(replay.address) as channel:
        client = ClusterClient(channel, str(replay.address))
        await client.status()
        replay.stop.set()
        with pytest.raises((DrainingError, UnreachableError)):
            await client.join(node_name="late", schema=SCHEMA, agent_id=0, timeout_s=0.2)


async def test_a_port_in_use_is_an_address_error_and_leaves_the_first_node_alone(replay):
    with pytest.raises(AddressError, match=str(replay.address)):
        async with replay_node(listen=replay.address):
            pass
    async with open_channel(replay.address) as channel:
        assert await health_of(channel) == Health.SERVING


async def test_listening_beyond_loopback_needs_insecure():
    everywhere = Address("0.0.0.0", 0)
    with pytest.raises(AddressError, match="--insecure"):
        await run_replay(
            ReplayOptions(run_id="r", listen=everywhere),
            asyncio.Event(),
            lambda address: pytest.fail(str(address)),
        )
    async with (
        replay_node(listen=everywhere, insecure=True) as replay,
        open_channel(Address("127.0.0.1", replay.address.port)) as channel,
    ):
        assert await health_of(channel) == Health.SERVING


async def test_a_metrics_port_in_use_is_an_address_error_and_frees_the_nodes_own_port():
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        own = Address("127.0.0.1", free.getsockname()[1])
        free.close()
        with pytest.raises(AddressError, match="metrics"):
            async with replay_node(listen=own, metrics_port=taken.getsockname()[1]):
                pass
    async with replay_node(listen=own):
        pass


@pytest.mark.slow
async def test_the_metrics_endpoint_counts_what_was_inserted_and_sampled():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with replay_node(metrics_port=port) as replay, joined(replay.address) as target:
        await insert(target, rows_of(1, 20))
        sampler = await Sampler(target, batch_size=4).open(credits=2)
        await sampler.next()
        await sampler.next()
        await PolicyPublisher(target).publish(400, b"policy")
        text = await asyncio.to_thread(scrape, port)
        assert 'dase_replay_active_streams{rpc="Sample"} 1.0' in text
        sampler.cancel()
        none_open = 'dase_replay_active_streams{rpc="Sample"} 0.0'
        while none_open not in await asyncio.to_thread(scrape, port):  # noqa: ASYNC110 - not ours to set
            await asyncio.sleep(0.01)
    assert 'dase_replay_inserted_transitions_total{agent_id="0"} 20.0' in text
    assert 'dase_replay_sampled_transitions_total{agent_id="0",source_agent_id="0"} 8.0' in text
    assert 'dase_replay_buffer_transitions{agent_id="0"} 20.0' in text
    assert 'dase_replay_policy_version{agent_id="0"} 400.0' in text


async def test_a_lease_that_ends_in_silence_is_said_in_the_log(caplog):
    async with replay_node(lease_ttl_s=0.05, lease_check_s=0.01) as replay, joined(replay.address):
        await eventually(lambda: "agent 0 was silent for 0.05 s" in caplog.text)
    assert caplog.text.count("was silent") == 1


async def test_metrics_beyond_loopback_need_insecure():
    with pytest.raises(AddressError, match="--insecure"):
        async with replay_node(metrics_host="0.0.0.0", metrics_port=1):
            pass


async def opened(target, *, credits):
    inserter = await Inserter(target, writer_id="w").open()
    return inserter, await Sampler(target, batch_size=4).open(credits=credits)


async def insert(target, rows):
    """Stores rows, every one acknowledged."""
    async with asyncio.TaskGroup() as tasks:
        inserter = await Inserter(target, writer_id="w").open()
        tasks.create_task(inserter.receive())
        await inserter.append(rows)
        await inserter.finish()


async def write_forever(inserter):
    rows = rows_of(1, 100)
    while True:
        await inserter.append(rows)


async def read_all(sampler):
    while True:
        await sampler.next()


def scrape(port):
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
