"""Streams of the policy service that a test opens."""

import hashlib
from contextlib import asynccontextmanager

from replay.wire.services import SCHEMA, eventually, sent

from dase_grpc.replay.client.policies import PolicySubscriber
from dase_grpc.replay.wire.v1 import policy_pb2, policy_pb2_grpc

BIG = bytes(range(256)) * (5 * 2**12) + b"5 MiB and one sentence"


def stub_of(service) -> policy_pb2_grpc.PolicyServiceStub:
    return policy_pb2_grpc.PolicyServiceStub(service.channel)


def subscriber_of(service, *agent_ids, **changes) -> PolicySubscriber:
    right = {"run_id": "the-run", "schema_fingerprint": SCHEMA.fingerprint}
    return PolicySubscriber(
        service.channel, str(service.address), **{**right, **changes}, agent_ids=agent_ids
    )


@asynccontextmanager
async def subscribed(service, *agent_ids):
    """An open subscriber, cancelled with the block."""
    subscriber = await subscriber_of(service, *agent_ids).open()
    try:
        yield subscriber
    finally:
        subscriber.cancel()


def header(target, payload, *, version=1, stream=None, **changes) -> policy_pb2.PublishRequest:
    """The first message of a Publish stream; `stream` changes fields of its StreamHeader."""
    said = target.header()
    for name, value in (stream or {}).items():
        setattr(said, name, value)
    right = {"size": len(payload), "sha256": hashlib.sha256(payload).digest(), "version": version}
    return policy_pb2.PublishRequest(header=policy_pb2.PublishHeader(stream=said, **{**right, **changes}))


async def half_way(service, target, *, version=1):
    """A Publish stream of b"policy" of which half has arrived."""
    said = header(target, b"policy", version=version), piece(b"pol")
    call = await sent(stub_of(service).Publish(), *said)
    await eventually(lambda: service.run.policies.incoming_bytes == 3)
    return call


def piece(data) -> policy_pb2.PublishRequest:
    return policy_pb2.PublishRequest(chunk=data)
