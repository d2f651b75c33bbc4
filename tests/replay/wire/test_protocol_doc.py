"""docs/protocol.md says what the code does: its tables are compared."""

import re
from pathlib import Path

import pytest
from replay.wire.services import SCHEMA

from dase_grpc import schema
from dase_grpc.nodes import replay_options
from dase_grpc.progress import MAX_AGENT_ID, MAX_PAIRED_AGENTS
from dase_grpc.replay.buffer.policies import MAX_BOARD_BYTES, MAX_POLICY_BYTES, MAX_VERSION
from dase_grpc.replay.buffer.store import MAX_AGENT_WRITERS, MAX_WRITERS
from dase_grpc.replay.client import cluster as client_cluster
from dase_grpc.replay.client import insert as client_insert
from dase_grpc.replay.client import link
from dase_grpc.replay.client import policies as client_policies
from dase_grpc.replay.client.handoff import USUAL
from dase_grpc.replay.service import cluster, interceptors, policies, sample, server, streams
from dase_grpc.replay.service import insert as service_insert
from dase_grpc.replay.wire import addresses, messages, packed
from dase_grpc.replay.wire.status import REFUSAL_KEY, STATUS
from dase_grpc.replay.wire.v1 import cluster_pb2, policy_pb2, replay_pb2

TEXT = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")


def table(section: str) -> list[list[str]]:
    """The rows of the first table of a section, without its head."""
    body = TEXT.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_error_table_is_the_one_of_the_code_in_its_order():
    documented = [(name, status) for name, status, *_ in table("Errors")]
    assert documented == [(error.__name__, status.name) for error, status in STATUS.items()]
    assert f"`{REFUSAL_KEY}`" in TEXT


def test_the_row_is_the_one_of_the_code():
    sizes = {"m": SCHEMA.observation_size, "n": SCHEMA.action_size, "1": 1}
    documented = {name: (sizes[count], kind) for name, count, kind, _ in table("The packed row")}
    fields = {
        name: (column.stop - column.start, SCHEMA.dtype[name].base.name)
        for name, column in SCHEMA.columns.items()
    }
    assert list(documented.items()) == list(fields.items())


def test_the_limits_are_those_of_the_code():
    documented = [int(re.match(r"\d+", limit)[0]) for _, limit in table("Limits")]
    assert documented == [
        packed.ROWS_BYTES,
        addresses.MAX_MESSAGE_BYTES,
        schema.MAX_ROW_BYTES,
        sample.MAX_BATCH_SIZE,
        sample.MAX_BATCH_BYTES,
        sample.MAX_CREDITS,
        service_insert.MAX_WRITER_ID,
        cluster.MAX_NODE_ID,
        MAX_WRITERS,
        MAX_AGENT_WRITERS,
        MAX_AGENT_ID,
        MAX_PAIRED_AGENTS,
        MAX_POLICY_BYTES,
        MAX_BOARD_BYTES,
        MAX_VERSION,
        addresses.MAX_CHUNK_BYTES,
        messages.MAX_ENVIRONMENT,
        messages.MAX_TEXT,
        streams.MAX_AGENT_STREAMS,
        streams.MAX_AGENT_HELD_BYTES,
        streams.MAX_HELD_BYTES,
        interceptors.MAX_CALLS,
        server.MAX_CONNECTION_STREAMS,
        server.MAX_CONNECTIONS,
        server.MAX_HEADERS_BYTES,
        interceptors.MAX_QUESTION_BYTES,
        interceptors.HEADER_S,
        policies.PUBLISH_IDLE_S,
        server.HANDSHAKE_MS / 1_000,
        server.IDLE_MS / 1_000,
    ]
    assert addresses.CHUNK_BYTES <= addresses.MAX_CHUNK_BYTES


@pytest.mark.parametrize(
    ("sentence", "value", "scale"),
    [
        (r"at most (\d+) rows unacknowledged", client_insert.WINDOW_ROWS, 1),
        (r"come at least (\d+) ms apart", service_insert.ACK_EVERY_S, 1_000),
        (r"at once for (\d+) rows", service_insert.ACK_ROWS, 1),
        (r"the start of a stream, (\d+) s", client_cluster.UNARY_TIMEOUT_S, 1),
        (r"gives one policy (\d+) s", client_policies.PUBLISH_TIMEOUT_S, 1),
        (r"keepalive ping after (\d+) s", addresses.KEEPALIVE_TIME_MS, 1e-3),
        (r"does not answer one within (\d+) s", addresses.KEEPALIVE_TIMEOUT_MS, 1e-3),
        (r"made again after (\d+\.\d+) s", addresses.RECONNECT_MS[0], 1e-3),
        (r"longer pauses, at most (\d+) s", addresses.RECONNECT_MS[1], 1e-3),
        (r"or (\d+) MiB of them, and then waits", link.KEPT_BYTES, 2**-20),
        (r"`--replay-timeout` seconds \((\d+)\)", addresses.REPLAY_TIMEOUT_S, 1),
        (r"`ttl_seconds` \((\d+)\)", replay_options.LEASE_TTL_S, 1),
        (r"its lease ends after (\d+) s", replay_options.LEASE_TTL_S, 1),
        (r"Learners send one every (\d+\.\d+) s", USUAL.beat_s, 1),
        (r"does not take within (\d+) s", USUAL.drain_s, 1),
    ],
)
def test_the_numbers_in_the_text_are_those_of_the_code(sentence, value, scale):
    found = re.findall(sentence, TEXT)
    assert [float(number) for number in found] == [pytest.approx(value * scale)]


def test_every_call_is_named():
    for module in (replay_pb2, cluster_pb2, policy_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            assert f"`{service.name}`" in TEXT
            for method in service.methods:
                assert re.search(rf"\b{method.name}\b", TEXT), method.name


def test_every_field_that_is_named_exists():
    fields = {
        field.name
        for module in (replay_pb2, cluster_pb2, policy_pb2)
        for message in module.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    }
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", TEXT))
    assert named - fields <= set()
    assert {"committed_seq", "first_seq", "refused_rows", "writer_id", "batch_size"} <= named
