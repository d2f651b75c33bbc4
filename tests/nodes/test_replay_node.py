"""The replay node: it answers, refuses bad addresses, and ends in order, whatever its clients do."""

import asyncio
import gc
import signal
import socket

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from nodes.processes import replay_process
from nodes.running import OPTIONS, joined, replay_node
from patience import PATIENCE_S
from replay.wire.services import SCHEMA, WIDE, eventually, promptly, rows_of

from dase_grpc.errors import AddressError, ConfigError, DrainingError, StaleLeaseError, UnreachableError
from dase_grpc.nodes.replay import SERVICES, run_replay
from dase_grpc.nodes.replay_options import ReplayOptions
from dase_grpc.replay.client.cluster import ClusterClient, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.policies import PolicyPublisher, PolicySubscriber
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.security.door import PERMISSIONS
from dase_grpc.replay.wire.addresses import Address, parse_address

Health = health_pb2.HealthCheckResponse


async def health_of(channel, service=""):
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)).status


async def test_health_is_serving_for_the_node_and_each_of_its_services(replay):
    async with open_channel(replay.address) as channel:
        for service in ("", *SERVICES):
            assert await health_of(channel, service) == Health.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(channel, "dase.v1.Nothing")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_lists_the_node_and_each_of_its_services(replay, caplog):
    async with open_channel(replay.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).List(
            health_pb2.HealthListRequest(), timeout=PATIENCE_S
        )
    assert {name: each.status for name, each in answer.statuses.items()} == dict.fromkeys(
        ("", *SERVICES), Health.SERVING
    )
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_every_service_that_reflection_lists_implements_each_of_its_methods(replay, caplog):
    pool = descriptor_pool.Default()
    async with open_channel(replay.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = [pool.FindServiceByName(s.name) for s in (await call.read()).list_services_response.service]
        call.cancel()
        methods = [f"/{service.full_name}/{method.name}" for service in listed for method in service.methods]
        assert len(methods) == len(PERMISSIONS) - 1  # reflection's other name is not listed
        for method in methods:
            broken = channel.stream_stream(method)()
            await broken.write(b"\xff" * 40)  # refused before anything is done
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await promptly(broken.read())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    "method",
    [
        "dase.v1.PolicyService/Subscribe",
        "grpc.health.v1.Health/Watch",
        "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_a_request_that_its_stream_would_keep_is_short(replay, method):
    async with open_channel(replay.address) as channel:
        call = channel.stream_stream(f"/{method}")()
        await call.write(health_pb2.HealthCheckRequest(service="x" * 20_000).SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError, match="at most 16384 bytes, not 20004") as caught:
            await promptly(call.read())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_reflection_answers_under_its_newer_name_too(replay):
    async with open_channel(replay.address) as channel:
        call = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await promptly(call.read())).list_services_response.service}
        assert set(SERVICES) < listed
        call.cancel()


async def test_streams_that_idle_end_once_their_lease_was_given_back(monkeypatch):
    monkeypatch.setattr("dase_grpc.nodes.replay.LEASE_CHECK_S", 0.02)
    async with replay_node() as replay, joined(replay.address) as target:
        inserter = await Inserter(target, writer_id="w").open()
        sampler = await Sampler(target, batch_size=4).open(credits=0)
        await ClusterClient(target.channel, target.address).leave(target.member, reason="done")
        for ended in (inserter.receive(), sampler.next()):
            with pytest.raises(StaleLeaseError, match="gave epoch 1 back: done"):
                await promptly(ended)


async def test_reflection_lists_the_services_and_describes_their_messages(replay):
    async with open_channel(replay.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        assert listed == {
            "dase.v1.ReplayService",
            "dase.v1.ClusterService",
            "dase.v1.PolicyService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        for symbol in ("dase.v1.ReplayService", "dase.v1.ClusterService", "dase.v1.InsertChunk"):
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
            answer = await call.read()
            assert answer.file_descriptor_response.file_descriptor_proto
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_health_says_not_serving_before_the_streams_end(monkeypatch):
    monkeypatch.setattr("dase_grpc.nodes.replay.GRACE_S", 0.2)
    order = []
    async with replay_node() as replay, joined(replay.address) as target:
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


@pytest.fixture
def gracious(monkeypatch):
    """Whoever waits for the streams of a replay that stops to end by its grace waits in vain."""
    monkeypatch.setattr("dase_grpc.nodes.replay.GRACE_S", 2 * PATIENCE_S)


@pytest.mark.usefixtures("gracious")
async def test_an_idle_node_ends_at_once():
    async with replay_node() as replay:
        replay.stop.set()
        await promptly(replay.ended)


@pytest.mark.usefixtures("gracious")
async def test_idle_streams_end_at_once_with_draining(replay):
    async with joined(replay.address) as target:
        inserter = await Inserter(target, writer_id="w").open()
        sampler = await Sampler(target, batch_size=4).open(credits=0)
        subscriber = await PolicySubscriber(
            target.channel,
            target.address,
            run_id=target.member.run_id,
            schema_fingerprint=target.schema.fingerprint,
        ).open()
        await ClusterClient(target.channel, target.address).status()
        batch, policy = asyncio.ensure_future(sampler.next()), asyncio.ensure_future(subscriber.next())
        replay.stop.set()
        await promptly(replay.ended)
        with pytest.raises(DrainingError, match="shutting down"):
            await inserter.receive()
        with pytest.raises(DrainingError, match="shutting down"):
            await batch
        with pytest.raises(DrainingError, match="shutting down"):
            await policy


@pytest.mark.usefixtures("gracious")
async def test_a_sampler_that_waits_for_transitions_ends_at_once_with_draining():
    async with replay_node(min_size=100) as replay, joined(replay.address) as target:
        sampler = await Sampler(target, batch_size=4).open(credits=2)
        batch = asyncio.ensure_future(sampler.next())
        await eventually(lambda: sampler.waiting is not None)
        replay.stop.set()
        await promptly(replay.ended)
        with pytest.raises(DrainingError):
            await batch


@pytest.mark.slow
async def test_a_sampler_that_reads_nothing_does_not_keep_the_node(replay, monkeypatch):
    monkeypatch.setattr("dase_grpc.nodes.replay.GRACE_S", 0.5)
    async with joined(replay.address, schema=WIDE) as target:
        await insert(target, rows_of(1, 20, schema=WIDE))
        sampler = await Sampler(target, batch_size=200).open(credits=1_000)
        client, sampled = ClusterClient(target.channel, target.address), [0, 1]
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
        assert {type(error) for error in errors} == {DrainingError}


async def test_other_peoples_open_streams_do_not_keep_the_node(replay, monkeypatch):
    monkeypatch.setattr("dase_grpc.nodes.replay.GRACE_S", 0.2)
    async with open_channel(replay.address) as channel:
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
            await ClusterClient(target.channel, target.address).status(timeout_s=0.2)


async def test_a_new_node_takes_the_port_over_at_once():
    async with replay_node() as first:
        address = first.address
    async with replay_node(listen=address) as second, open_channel(address) as channel:
        assert second.address == address
        assert (await ClusterClient(channel, str(address)).status()).run_id == "the-run"


async def test_after_the_end_no_task_is_left():
    before = asyncio.all_tasks()
    async with replay_node(min_size=100) as replay, joined(replay.address) as target:
        inserter = await Inserter(target, writer_id="w").open()
        sampler = await Sampler(target, batch_size=4).open(credits=1)
        reading = asyncio.gather(inserter.receive(), sampler.next(), return_exceptions=True)
        await eventually(lambda: sampler.waiting is not None)
        await replay.end()
        await reading
    gc.collect()
    await eventually(lambda: asyncio.all_tasks() == before)


async def test_a_client_that_vanishes_leaves_the_node_serving_and_its_log_clean(replay, caplog):
    for _ in range(3):
        async with joined(replay.address) as target:
            inserter = await Inserter(target, writer_id="w").open()
            sampler = await Sampler(target, batch_size=4).open(credits=1_000)
            tasks = [
                asyncio.ensure_future(job)
                for job in (inserter.receive(), write_forever(inserter), read_all(sampler))
            ]
            await eventually(lambda inserter=inserter: inserter.acknowledged_seq > 1_000)
            await ClusterClient(target.channel, target.address).leave(target.member, reason="vanishing")
            await target.channel.close()
            await promptly(asyncio.gather(*tasks, return_exceptions=True))
    async with open_channel(replay.address) as channel:
        assert await health_of(channel) == Health.SERVING
    await replay.end()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


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


async def test_a_lease_that_ends_in_silence_is_said_in_the_log(caplog, monkeypatch):
    monkeypatch.setattr("dase_grpc.nodes.replay.LEASE_CHECK_S", 0.01)
    async with replay_node(lease_ttl_s=0.05) as replay, joined(replay.address):
        await eventually(lambda: "agent 0 was silent for 0.05 s" in caplog.text)
    assert caplog.text.count("was silent") == 1


async def test_metrics_beyond_loopback_need_insecure():
    with pytest.raises(AddressError, match="--insecure"):
        async with replay_node(metrics_host="0.0.0.0", metrics_port=1):
            pass


def parsed(**changes):
    """Options read from the texts of a command line."""
    texts = {
        "run_id": None,
        "listen": "127.0.0.1:0",
        "capacity": "1GB",
        "min_size": 3,
        "seed": 4,
        "metrics_port": 5,
        "metrics_host": "127.0.0.1",
        "insecure": True,
    }
    return ReplayOptions.parse(**{**texts, **changes})


@pytest.mark.parametrize("capacity", ["0", "-5", "x", "", "0kB"])
def test_an_unreadable_capacity_is_a_config_error(capacity):
    with pytest.raises(ConfigError, match="--capacity"):
        parsed(capacity=capacity)


@pytest.mark.parametrize("capacity", ["99999999999999", "900000GiB"])
def test_a_capacity_beyond_any_memory_is_a_config_error_unless_it_is_for_a_disk(capacity, tmp_path):
    with pytest.raises(ConfigError, match=r"--capacity 9.* needs at least .* GiB, .* which has [\d,.]+ GiB"):
        parsed(capacity=capacity)
    assert parsed(capacity=capacity, data_dir=tmp_path).capacity == capacity


def test_a_minimum_beyond_the_capacity_is_a_config_error():
    with pytest.raises(ConfigError, match="--min-size 21 exceeds --capacity 20"):
        parsed(capacity="20", min_size=21)
    assert parsed(capacity="20", min_size=20).min_size == 20


@pytest.mark.parametrize("run_id", [".", "..", "a/b", "/", "a\nb"])
def test_a_run_that_cannot_name_a_folder_is_a_config_error(run_id):
    with pytest.raises(ConfigError, match="--run-id"):
        parsed(run_id=run_id)


def test_a_run_that_is_not_named_gets_a_name_of_its_own():
    first, second = parsed(), parsed()
    assert first.run_id != second.run_id
    assert first == ReplayOptions(
        run_id=first.run_id,
        listen=OPTIONS.listen,
        capacity="1GB",
        min_size=3,
        seed=4,
        metrics_port=5,
        insecure=True,
    )


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


@pytest.mark.parametrize("run_id", ["../x", "/tmp/x", "..", "a/b", "a\nb"])
def test_a_run_id_that_is_no_folder_name_is_refused(run_id):
    with pytest.raises(ConfigError, match="plain folder name"):
        parsed(run_id=run_id)


def test_a_minimum_that_the_capacity_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match="--min-size 10 exceeds --capacity 5"):
        parsed(capacity="5", min_size=10)
