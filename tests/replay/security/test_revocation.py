"""Certificates that are withdrawn: refused in every role, their open calls ended, others left alone."""

import asyncio
import shutil
import sys
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import grpc
import pytest
from contracts.sentences import assert_one_sentence, refuses
from cryptography.x509.name import _ASN1Type
from grpc_health.v1 import health_pb2, health_pb2_grpc
from replay.security.revoking import listed, refused, withdraw
from replay.wire.policy_streams import subscriber_of
from replay.wire.services import SCHEMA, promptly

from dase_grpc.errors import CredentialsError, UnauthenticatedError
from dase_grpc.nodes.listener import DOOR_LOOK_S
from dase_grpc.progress import Progress
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.security.certificates import issue
from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.security.door import Door
from dase_grpc.replay.security.identity import Identity, Role

PRINTABLE = _ASN1Type.PrintableString
"""Another encoding than that of the names which the library makes by itself."""

NOBODY_OF_A_RUN = Role.CLIENT
"""Who may call a policy server alone, see tests/inference/test_policy_server_security.py."""


@pytest.mark.parametrize("role", sorted(set(Role) - {NOBODY_OF_A_RUN}))
async def test_a_node_of_every_role_is_refused_from_the_next_look_on(ring, role, caplog):
    async with listed(ring) as guard, guard.as_caller(ring.with_certificate(role)) as caller:
        await caller.cluster.status()
        withdraw(ring, role)
        guard.door.look()
        await refused(caller.cluster.status(), guard, 1)
        async with guard.as_caller(ring.with_certificate(role)) as again:  # on a connection of its own
            await refused(again.cluster.status(), guard, 2)
    assert f"denied (revoked): spiffe://dase/{role} at" in caplog.text


async def test_health_is_refused_too(ring):
    async with listed(ring) as guard, guard.as_caller(ring.with_certificate("client")) as caller:
        health = health_pb2_grpc.HealthStub(caller.channel)
        await health.Check(health_pb2.HealthCheckRequest())
        withdraw(ring, "client")
        guard.door.look()
        with pytest.raises(grpc.aio.AioRpcError, match="is withdrawn") as caught:
            await health.Check(health_pb2.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_streams_that_are_open_and_idle_end_and_those_of_others_go_on(ring):
    async with AsyncExitStack() as open_now:
        guard = await open_now.enter_async_context(listed(ring))
        enter = open_now.enter_async_context
        callers = [await enter(guard.as_caller(ring.with_certificate(f"learner/{each}"))) for each in (3, 4)]
        inserting, sampling = [], []
        for agent_id, caller in zip((3, 4), callers, strict=True):
            target = StreamTarget(caller.channel, caller.address, await caller.join(agent_id), SCHEMA)
            inserting.append(await Inserter(target, writer_id="w").open())
            sampling.append(await Sampler(target, batch_size=1).open(credits=0))
        withdraw(ring, "learner/3")
        guard.door.look()
        for ended in (inserting[0].receive(), sampling[0].next()):
            with refuses(UnauthenticatedError, "is withdrawn"):
                await promptly(ended)
        assert guard.door.denied == {"revoked": 2}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(inserting[1].receive())
            rows = SCHEMA.empty(1)
            rows[:] = 0
            SCHEMA.agent_ids(rows)[:] = 4
            await inserting[1].append(rows)
            await promptly(inserting[1].finish())
        assert inserting[1].acknowledged_seq == 1
        sampling[1].cancel()


async def test_a_subscription_and_a_watch_that_only_wait_end(ring):
    async with listed(ring) as guard, guard.as_caller(ring.with_certificate("learner/0")) as learner:
        await learner.join(0)
        async with guard.as_caller(ring.with_certificate("evaluator")) as caller:
            subscriber = await subscriber_of(caller).open()
            health = health_pb2_grpc.HealthStub(caller.channel).Watch(health_pb2.HealthCheckRequest())
            await promptly(health.read())
            withdraw(ring, "evaluator")
            guard.door.look()
            with refuses(UnauthenticatedError, "is withdrawn"):
                await promptly(subscriber.next())
            with pytest.raises(grpc.aio.AioRpcError, match="is withdrawn"):
                await promptly(health.read())
        await learner.cluster.status()


async def test_a_stream_that_is_looked_at_again_before_it_has_ended_is_told_why_it_ends(ring):
    """As where the service has much to do just then: gRPC would never tell the caller that it has ended."""
    async with listed(ring) as guard, guard.as_caller(ring.with_certificate("learner/3")) as caller:
        target = StreamTarget(caller.channel, caller.address, await caller.join(3), SCHEMA)
        inserter = await Inserter(target, writer_id="w").open()
        withdraw(ring, "learner/3")
        for _ in range(3):
            guard.door.look()
        await refused(inserter.receive(), guard, 1)


async def test_a_node_with_a_new_certificate_goes_on_where_the_old_one_was_withdrawn(ring, tmp_path):
    folder = shutil.copytree(ring.folder("learner/3"), tmp_path / "own")
    async with listed(ring) as guard, guard.as_caller(Credentials(folder)) as caller:
        member = await caller.join(3)
        withdraw(ring, "learner/3")
        guard.door.look()
        await refused(caller.cluster.heartbeat(member, Progress()), guard, 1)
        new = issue(ring.authority, Identity.parse("learner/3"), [], now=datetime.now(UTC), replace=True)
        shutil.copytree(new, folder, dirs_exist_ok=True)
        await caller.cluster.heartbeat(member, Progress())


async def test_every_certificate_of_an_identity_is_withdrawn_those_before_its_renewal_too(ring, tmp_path):
    stolen = shutil.copytree(ring.folder("learner/3"), tmp_path / "stolen")
    ring.folder("learner/3", replace=True)
    withdraw(ring, "learner/3")
    async with listed(ring) as guard, guard.as_caller(Credentials(stolen)) as caller:
        await refused(caller.cluster.status(), guard, 1)


def test_whoever_is_withdrawn_is_refused_within_5_seconds_as_the_page_says():
    assert DOOR_LOOK_S < 5


def test_without_the_cryptography_library_a_service_says_how_to_get_it(ring, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "dase_grpc.replay.security.revocation", raising=False)
    with pytest.raises(CredentialsError) as caught:
        Door(ring.folder("replay"), crl=ring.authority / "ca.crl")
    assert_one_sentence(caught.value, "--crl needs the cryptography library", "dase-grpc[certs]")
