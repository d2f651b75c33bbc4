"""Clients that send noise, too much, or too little: the replay stays up and small, others do not notice."""

import asyncio
import random
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from fuzz.attacked import EXAMPLES, MIB, attacked
from patience import PATIENCE_S
from replay.wire.services import (
    END,
    SCHEMA,
    acknowledged,
    chunk,
    insert_header,
    refusal,
    rows_of,
    sample_header,
)

from dase_grpc.progress import Progress
from dase_grpc.replay.client.cluster import ClusterClient
from dase_grpc.replay.service import server
from dase_grpc.replay.service.interceptors import HEADER_S, MAX_CALLS
from dase_grpc.replay.service.sample import MAX_CREDITS
from dase_grpc.replay.service.streams import MAX_AGENT_STREAMS
from dase_grpc.replay.wire.v1 import policy_pb2, policy_pb2_grpc, replay_pb2_grpc

pytestmark = pytest.mark.fuzz

TINY = 100_000 if EXAMPLES else 10_000
"""One-row chunks, each after an empty one."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"


def frame(kind: int, flags: int, stream: int, payload: bytes, *, length: int | None = None) -> bytes:
    return (
        struct.pack(">I", len(payload) if length is None else length)[1:]
        + struct.pack(">BBI", kind, flags, stream)
        + payload
    )


def noise(rng: random.Random) -> list[bytes]:
    """What a stranger may send to a port: none of it is a call."""
    begun = PREFACE + SETTINGS
    literal = b"\0\x7f\xff\xff\xff\x0f"  # a header whose name has 256 MiB
    return [
        rng.randbytes(65_536),
        b"GET / HTTP/1.1\r\nHost: replay\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + rng.randbytes(512),
        PREFACE[:11],
        begun + rng.randbytes(4_096),
        begun + frame(0, 0, 1, b"", length=2**24 - 1),
        begun + frame(1, 4, 1, literal + bytes(8_192)),
        begun + frame(1, 0, 1, b"") + frame(9, 0, 1, bytes(16_000)) * 300,
        begun + SETTINGS * 20_000,
        begun + frame(6, 0, 0, bytes(8)) * 20_000,
        begun + b"".join(frame(1, 4, n, b"\x82") + frame(3, 0, n, bytes(4)) for n in range(1, 20_001, 2)),
        begun + frame(8, 0, 0, b"\x7f\xff\xff\xff") * 10,
        begun
        + b"".join(
            frame(rng.randrange(12), rng.randrange(256), rng.randrange(8), rng.randbytes(40))
            for _ in range(200)
        ),
    ]


def send_and_leave(host: str, port: int, data: bytes) -> None:
    with socket.create_connection((host, port), timeout=PATIENCE_S) as connection:
        connection.settimeout(0.3)
        try:
            connection.sendall(data)
            while connection.recv(65_536):
                pass
        except OSError:  # closed on us, or nothing to say: both will do
            pass


@pytest.mark.slow
async def test_noise_on_the_port_harms_nobody(tmp_path):
    rng = random.Random(20)
    async with attacked(tmp_path / "noise", grows_at_most=48 * MIB) as replay:
        for _ in range(1 + EXAMPLES // 100):
            async with asyncio.TaskGroup() as tasks:
                for data in noise(rng):
                    tasks.create_task(asyncio.to_thread(send_and_leave, replay.host, replay.port, data))
            await replay.goes_on()


@pytest.mark.slow
async def test_a_flood_of_tiny_messages_take_no_memory_and_hold_nobody_up(tmp_path):
    async with attacked(tmp_path / "tiny", grows_at_most=64 * MIB) as replay, replay.channel() as channel:
        target = await replay.target(channel)
        cluster, stub = ClusterClient(channel, replay.address), replay_pb2_grpc.ReplayServiceStub(channel)
        rows = [row.tobytes() for row in rows_of(1, TINY, agent_id=1)]

        async def messages():
            yield insert_header(target, "tiny")
            for first_seq, row in enumerate(rows, start=1):
                yield chunk(first_seq, b"")
                yield chunk(first_seq, row)
            yield END

        async def beat():
            while last is None or not last.finished:
                await cluster.heartbeat(target.member, Progress(), timeout_s=PATIENCE_S)

        last = None
        beating = asyncio.ensure_future(beat())
        async for answer in stub.Insert(messages()):
            last = answer
        assert last.finished
        assert last.committed_seq == TINY
        await beating


@pytest.mark.slow
async def test_samplers_that_never_read_cost_their_batches_and_no_more(tmp_path):
    batch, streams = 20_000, MAX_AGENT_STREAMS
    each = batch * SCHEMA.row_bytes + 3 * MIB  # the batch, and up to three copies of a frame inside gRPC
    async with (
        attacked(tmp_path / "slow", grows_at_most=streams * each) as replay,
        replay.channel() as channel,
    ):
        target = await replay.target(channel)
        stub = replay_pb2_grpc.ReplayServiceStub(channel)
        calls = []
        for _ in range(streams):
            calls.append(stub.Sample())
            await calls[-1].write(sample_header(target, batch_size=batch, credits=MAX_CREDITS))
            await calls[-1].initial_metadata()
        await replay.goes_on(batches=20)
        code, sentence = await refusal_of_one_more(stub, target, batch)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"agent 1 has {streams} Sample streams open" in sentence
        for call in calls:
            call.cancel()


async def refusal_of_one_more(stub, target, batch):
    call = stub.Sample()
    await call.write(sample_header(target, batch_size=batch, credits=1))
    return await refusal(call)


@pytest.mark.slow
async def test_thousands_of_idle_streams_of_one_client_leave_room_for_others(tmp_path):
    async with attacked(tmp_path / "many", grows_at_most=192 * MIB) as replay:
        channels = [replay.channel() for _ in range(MAX_CALLS // server.MAX_CONNECTION_STREAMS + 2)]
        target = await replay.target(channels[0])
        fingerprint = target.schema.fingerprint
        request = policy_pb2.SubscribeRequest(run_id=target.member.run_id, schema_fingerprint=fingerprint)
        calls = []
        for channel in channels:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            calls += [stub.Subscribe(request) for _ in range(server.MAX_CONNECTION_STREAMS - 8)]
        replays = replay_pb2_grpc.ReplayServiceStub(channels[-1])
        calls += [replays.Insert() for _ in range(1_000)] + [replays.Sample() for _ in range(1_000)]
        await replay.goes_on(batches=20)
        async with replay.channel() as late:  # a learner that comes now is served
            newcomer = await replay.target(late, agent_id=2)
            call = replay_pb2_grpc.ReplayServiceStub(late).Insert()
            await call.write(insert_header(newcomer, "late"))
            await call.write(chunk(1, rows_of(1, 10, agent_id=2)))
            await acknowledged(call, 10)
        for call in calls:
            call.cancel()
        for channel in channels:
            await channel.close()


STOPPED = """
import asyncio, sys, grpc
async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        calls = [channel.stream_stream(f"/dase.v1.ReplayService/{kind}")() for kind in ("Insert", "Sample")]
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        await watch.read()
        print("ready", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@contextmanager
def stopped_client(address: str) -> Iterator[None]:
    """A client with open streams that is frozen, as by SIGSTOP."""
    command = [sys.executable, "-c", textwrap.dedent(STOPPED), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
            client.send_signal(signal.SIGSTOP)
            yield
        finally:
            client.kill()


@pytest.mark.slow
async def test_whoever_falls_silent_is_given_up(tmp_path):
    async with attacked(tmp_path / "silent", grows_at_most=48 * MIB) as replay, replay.channel() as channel:
        await ClusterClient(channel, replay.address).status(timeout_s=PATIENCE_S)
        usual = replay.connections
        stub = replay_pb2_grpc.ReplayServiceStub(channel)
        mute = asyncio.gather(*(refusal(call) for call in (stub.Insert(), stub.Sample())))
        with ExitStack() as silent:
            silent.enter_context(stopped_client(replay.address))
            for number in range(200):
                half_open = silent.enter_context(socket.create_connection((replay.host, replay.port)))
                half_open.sendall(PREFACE[: number % 12])
            async with asyncio.timeout(HEADER_S):  # then they are cut off
                while replay.connections <= usual + 150:  # noqa: ASYNC110 - the kernel tells nobody
                    await asyncio.sleep(0.05)
            await replay.goes_on()
            async with asyncio.timeout(PATIENCE_S):
                while replay.connections > usual:  # noqa: ASYNC110 - the kernel tells nobody
                    await asyncio.sleep(0.2)
        for code, sentence in await mute:
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"did not come within {HEADER_S:g} s" in sentence
