"""Messages that are wrong: each is answered with the documented refusal, and stores nothing."""

import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from fuzz.attacked import EXAMPLES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nodes.running import joined, replay_node
from patience import PATIENCE_S
from replay.wire.services import SCHEMA, chunk, insert_header, rows_of, sample_header, serving

from dase_grpc.errors import (
    BufferGoneError,
    CapacityError,
    MalformedError,
    RefusalError,
    RunMismatchError,
    SchemaMismatchError,
    SequenceGapError,
    StaleLeaseError,
    TooManyWritersError,
)
from dase_grpc.replay.buffer.policies import MAX_BOARD_BYTES, MAX_POLICY_BYTES, IncomingPolicy
from dase_grpc.replay.buffer.store import MAX_AGENT_WRITERS
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget
from dase_grpc.replay.service.server import MAX_HEADERS_BYTES
from dase_grpc.replay.wire.addresses import MAX_MESSAGE_BYTES
from dase_grpc.replay.wire.messages import schema_to_proto
from dase_grpc.replay.wire.status import REFUSAL_KEY, STATUS
from dase_grpc.replay.wire.v1 import cluster_pb2, policy_pb2, replay_pb2

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(3_600 if EXAMPLES else 600)]

DOC = Path(__file__).parents[2] / "docs" / "reliability.md"
METHODS = [
    f"/{service.full_name}/{method.name}"
    for module in (replay_pb2, cluster_pb2, policy_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
] + [
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/List",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]
INT64, UINT32 = 2**63 - 1, 2**32 - 1

Call = tuple[str, list[Any]]


def insert(target: StreamTarget, *messages: Any, writer: str = "bad", **changes: Any) -> Call:
    return "ReplayService/Insert", [insert_header(target, writer, **changes), *messages]


def sample(target: StreamTarget, size: int, credits: int = 1) -> Call:
    return "ReplayService/Sample", [sample_header(target, batch_size=size, credits=credits)]


def publish(target: StreamTarget, payload: bytes = b"x", **changes: Any) -> Call:
    header = policy_pb2.PublishHeader(stream=target.header(), version=1, size=1, sha256=bytes(32))
    for name, value in changes.items():
        setattr(header, name, value)
    first = policy_pb2.PublishRequest(header=header)
    return "PolicyService/Publish", [first, policy_pb2.PublishRequest(chunk=payload)]


def join(**changes: Any) -> Call:
    schema = schema_to_proto(SCHEMA)
    for name, value in changes.items():
        setattr(schema, name, value)
    return "ClusterService/Join", [cluster_pb2.JoinRequest(node_name="bad", schema=schema)]


def heartbeat(target: StreamTarget, **changes: Any) -> Call:
    request = cluster_pb2.HeartbeatRequest(run_id=target.member.run_id, agent_id=1, epoch=1)
    for name, value in changes.items():
        setattr(request, name, value)
    return "ClusterService/Heartbeat", [request]


ROW = rows_of(1, 1, agent_id=1).tobytes()
OTHER = rows_of(1, 1, agent_id=3).tobytes()

CASES: dict[str, tuple[type[RefusalError], Callable[[StreamTarget], Call]]] = {
    "bytes that are no message": (MalformedError, lambda t: ("ClusterService/Join", [b"\xff" * 40])),
    "an empty first message": (MalformedError, lambda t: ("ReplayService/Sample", [b""])),
    "a chunk before the header": (MalformedError, lambda t: ("ReplayService/Insert", [chunk(1, ROW)])),
    "a second header": (MalformedError, lambda t: insert(t, insert_header(t))),
    "another run": (RunMismatchError, lambda t: insert(t, run_id="another")),
    "another fingerprint": (SchemaMismatchError, lambda t: insert(t, schema_fingerprint="0" * 64)),
    "another buffer": (BufferGoneError, lambda t: insert(t, buffer_id="another")),
    "another epoch": (StaleLeaseError, lambda t: insert(t, lease_epoch=INT64)),
    "an agent id that nobody holds": (StaleLeaseError, lambda t: heartbeat(t, agent_id=UINT32)),
    "a writer id of 129 characters": (MalformedError, lambda t: insert(t, writer="w" * 129)),
    "no writer id": (MalformedError, lambda t: insert(t, writer="")),
    "rows of another width": (MalformedError, lambda t: insert(t, chunk(1, ROW + b"\0" * 4))),
    "half a row": (MalformedError, lambda t: insert(t, chunk(1, ROW[:-2]))),
    "rows of another agent": (MalformedError, lambda t: insert(t, chunk(1, OTHER))),
    "row 0": (MalformedError, lambda t: insert(t, chunk(0, ROW))),
    "a row number that jumps ahead": (SequenceGapError, lambda t: insert(t, chunk(3, ROW))),
    "row number 2^64 - 1": (SequenceGapError, lambda t: insert(t, chunk(2**64 - 1, ROW))),
    "batch_size 0": (MalformedError, lambda t: sample(t, 0)),
    "batch_size 2^31": (MalformedError, lambda t: sample(t, 2**31)),
    "batch_size -1 (2^32 - 1)": (MalformedError, lambda t: sample(t, UINT32)),
    "credits 2^31": (MalformedError, lambda t: sample(t, 4, 2**31)),
    "credits -1 (2^32 - 1)": (MalformedError, lambda t: sample(t, 4, UINT32)),
    "a policy of 2^64 - 1 bytes": (MalformedError, lambda t: publish(t, size=2**64 - 1)),
    "a policy of 0 bytes": (MalformedError, lambda t: publish(t, size=0)),
    "a policy with another digest": (MalformedError, publish),
    "a policy larger than it was announced": (MalformedError, lambda t: publish(t, b"xyz")),
    "a policy version of 2^64 - 1": (MalformedError, lambda t: publish(t, version=2**64 - 1)),
    "a schema of 2^32 - 1 components": (MalformedError, lambda t: join(observation_size=UINT32)),
    "another schema": (SchemaMismatchError, lambda t: join(observation_size=3)),
    "an environment's name that cannot be printed": (MalformedError, lambda t: join(environment="a\x1b[2J")),
}


async def answer(
    channel: grpc.aio.Channel, call: Call, *, timeout_s: float = 10.0
) -> grpc.aio.AioRpcError | None:
    """How a call ended: None is well."""
    method, messages = call
    path = method if method.startswith("/") else f"/dase.v1.{method}"

    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            yield message if isinstance(message, bytes) else message.SerializeToString()

    try:
        async for _ in channel.stream_stream(path)(requests(), timeout=timeout_s):
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return None


def refused_as(error: grpc.aio.AioRpcError | None) -> str:
    """The name of the refusal that a call ended with, checked against its status."""
    assert error is not None, "the call ended well"
    name = dict(error.trailing_metadata() or ()).get(REFUSAL_KEY)
    assert isinstance(name, str), error
    status = {refusal.__name__: code for refusal, code in STATUS.items()}
    assert error.code() is status[name]
    sentence = error.details() or ""
    assert sentence
    assert sentence.isprintable()
    return name


def assert_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """None but that of grpc's thread that polls for an event loop of an earlier test, which is closed."""
    traced = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert all(str(error) == "Event loop is closed" for error in traced), traced


@pytest.mark.parametrize("what", CASES)
async def test_each_bad_message_is_refused_as_documented_and_stores_nothing(what, caplog):
    refusal, make = CASES[what]
    async with serving() as service:
        service_target = await service.target(1)
        assert refused_as(await answer(service.channel, make(service_target))) == refusal.__name__
        assert service.run.store.ring.total == 0
        assert not service.run.policies.agents()
    assert_no_traceback(caplog)


def test_the_documented_table_is_the_tested_one():
    section = (
        DOC.read_text(encoding="utf-8").split("## What malformed messages do\n", 1)[1].split("\n## ", 1)[0]
    )
    rows = re.findall(r"^\| (.+?) \| (\w+) \| (\w+) \|$", section, flags=re.MULTILINE)
    assert rows[1:] == [
        (what, refusal.__name__, STATUS[refusal].name) for what, (refusal, _) in CASES.items()
    ]


def examples(count: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=EXAMPLES or count,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


KNOWN = {*STATUS.values(), grpc.StatusCode.DEADLINE_EXCEEDED}


def is_documented(error: grpc.aio.AioRpcError | None) -> bool:
    """Whether a call ended well, with a refusal, by its deadline, or because this client still wrote."""
    if error is None or error.code() in KNOWN:
        return True
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"


@examples(25)
@given(
    st.lists(st.tuples(st.sampled_from(METHODS), st.lists(st.binary(max_size=200), max_size=4)), max_size=6)
)
@pytest.mark.slow
async def test_random_bytes_to_every_method(caplog, calls):
    async with replay_node() as replay, joined(replay.address, agent_id=0) as target:
        for call in calls:
            error = await answer(target.channel, call, timeout_s=0.2)
            assert is_documented(error), error
        await ClusterClient(target.channel, target.address).status()
    assert_no_traceback(caplog)


async def test_bytes_that_are_no_message_are_refused_by_every_method_alike(replay, caplog):
    async with joined(replay.address) as target:
        for method in METHODS:
            error = await answer(target.channel, (method, [b"\xff" * 40]))
            assert refused_as(error) == MalformedError.__name__, method
    assert_no_traceback(caplog)


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    cut, flips = (
        draw(st.floats(0, 1)),
        draw(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=3)),
    )
    tail, truncate = draw(st.binary(max_size=8)), draw(st.booleans())

    def mutate(data: bytes) -> bytes:
        changed = bytearray(data[: int(cut * len(data))] if truncate else data)
        for place, value in flips:
            if changed:
                changed[min(int(place * len(changed)), len(changed) - 1)] = value
        return bytes(changed) + tail

    return mutate


VALID: list[Callable[[StreamTarget], Call]] = [
    lambda t: insert(t, chunk(1, rows_of(1, 5, agent_id=1)), chunk(6, rows_of(6, 9, agent_id=1))),
    lambda t: sample(t, 4, 2),
    publish,
    lambda t: join(),
    heartbeat,
]


@examples(25)
@given(st.lists(st.tuples(st.sampled_from(VALID), st.integers(0, 2), mutations()), min_size=1, max_size=5))
async def test_valid_messages_with_some_bytes_changed_or_missing(caplog, calls):
    async with serving() as service:
        target = await service.target(1)
        await service.target(0)
        service.fill(50)
        before = service.stored(agent_id=0)
        for make, which, mutate in calls:
            method, messages = make(target)
            raw = [message.SerializeToString() for message in messages]
            raw[which % len(raw)] = mutate(raw[which % len(raw)])
            error = await answer(service.channel, (method, raw), timeout_s=0.3)
            assert is_documented(error), error
        assert service.stored(agent_id=0) == before
        assert service.run.store.committed("bad", agent_id=1) <= 9
    assert_no_traceback(caplog)


NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 2**31 - 1, 2**31, UINT32, UINT32 + 1, INT64, INT64 + 1, 2**64 - 1]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 30),
)


@examples(25)
@given(st.lists(st.tuples(NUMBERS, st.integers(0, 6)), min_size=1, max_size=12))
async def test_row_numbers_that_go_back_jump_and_overflow_store_each_row_once(chunks):
    async with serving() as service:
        target = await service.target(1)
        for first, count in chunks:
            numbers = chunk(
                first, rows_of(first, first + count - 1, agent_id=1) if first < 100 else ROW * count
            )
            error = await answer(service.channel, insert(target, numbers))
            assert error is None or refused_as(error) in {"MalformedError", "SequenceGapError"}
        stored = service.stored(agent_id=1)
        assert stored == list(range(1, len(stored) + 1))
        assert service.run.store.committed("bad", agent_id=1) == len(stored)


@pytest.mark.parametrize("what", ["message", "bomb"])
async def test_what_is_too_large_never_reaches_a_method(what):
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    compression = grpc.Compression.Gzip if what == "bomb" else None
    size = 64 * 2**20 if what == "bomb" else MAX_MESSAGE_BYTES + 1
    async with (
        serving() as service,
        grpc.aio.insecure_channel(str(service.address), options=options, compression=compression) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/dase.v1.ClusterService/Leave")(bytes(size), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await service.client.status()


async def test_metadata_beyond_the_limit_is_refused():
    async with serving() as service:
        call = service.channel.unary_unary("/dase.v1.ClusterService/Status")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", metadata=(("x", "y" * 2 * MAX_HEADERS_BYTES),), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await service.client.status()


async def test_an_agent_cannot_fill_the_table_of_writers(service):
    target = await service.target(1)
    for number in range(MAX_AGENT_WRITERS + 50):  # names alone are not kept
        service.run.store.append(f"w{number}", 1, rows_of(1, 0), agent_id=1)
    for number in range(MAX_AGENT_WRITERS):
        service.run.store.append(f"w{number}", 1, rows_of(1, 1, 1), agent_id=1)
    service.run.store.watch.began = time.monotonic()  # as if all had just ended
    error = await answer(service.channel, insert(target, chunk(1, ROW), writer="one more"))
    assert refused_as(error) == TooManyWritersError.__name__
    assert f"agent 1 has {MAX_AGENT_WRITERS} writers" in (error.details() if error else "")
    assert await answer(service.channel, insert(await service.target(0), chunk(1, rows_of(1, 1)))) is None


async def test_policies_beyond_the_room_for_all_are_refused(service):
    target, board = await service.target(1), service.run.policies
    with board.arriving(
        IncomingPolicy(agent_id=0, epoch=1, version=1, size=MAX_POLICY_BYTES, sha256=bytes(32))
    ):
        board._max_bytes = MAX_POLICY_BYTES  # the real one would take a while to fill
        assert refused_as(await answer(service.channel, publish(target))) == CapacityError.__name__
    assert MAX_BOARD_BYTES >= 2 * MAX_POLICY_BYTES
    assert refused_as(await answer(service.channel, publish(target))) == MalformedError.__name__
