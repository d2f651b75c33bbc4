"""What a caller of each role may do, and for which agent."""

from dataclasses import replace

import grpc
import pytest
from contracts.sentences import assert_one_sentence, refuses
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from replay.security.credentials import guarded, let_in
from replay.wire.services import SCHEMA, promptly

from dase_grpc.errors import CredentialsError, NotPermittedError
from dase_grpc.inference.v1 import inference_pb2
from dase_grpc.progress import Attendance, Attendant, Progress
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.policies import PolicyPublisher, PolicySubscriber
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.security import door
from dase_grpc.replay.security.door import PERMISSIONS
from dase_grpc.replay.security.identity import Identity, Role
from dase_grpc.replay.service.server import REFLECTION_V1
from dase_grpc.replay.wire.v1 import cluster_pb2, policy_pb2, replay_pb2


async def test_another_agents_certificate_is_refused_by_every_call_that_names_an_agent(keyring):
    async with (
        guarded(keyring.folder("replay")) as guard,
        guard.as_caller(keyring.with_certificate("learner/0")) as victim,
        guard.as_caller(keyring.with_certificate("learner/3")) as caller,
    ):
        member = await victim.join(0)
        target = StreamTarget(caller.channel, caller.address, member, SCHEMA)
        sampler = Sampler(target, batch_size=1)

        async def sample():
            await (await sampler.open(credits=1)).next()

        for attempt in (
            caller.join(0),
            caller.cluster.heartbeat(member, Progress()),
            caller.cluster.leave(member, reason="mischief"),
            Inserter(target, writer_id="w").open(),
            sample(),
            PolicyPublisher(target).publish(1, b"policy"),
        ):
            with pytest.raises(NotPermittedError) as caught:
                await promptly(attempt)
            assert_one_sentence(caught.value, "agent 3", "agent 0")
            assert caught.value.exit_code == 3
        assert guard.door.denied == {"agent": 6}
        assert not guard.run.policies.versions
        await victim.cluster.heartbeat(member, Progress())


async def outcome(channel, method: str) -> grpc.StatusCode:
    """How a call with one empty message ends, which is enough to see whether it is permitted."""
    try:
        async for _ in channel.stream_stream(method)(iter([b""])):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_may_call_what_the_table_says_and_nothing_else(keyring, role):
    async with let_in(keyring, role) as (_, caller):
        denied = {
            method
            for method in PERMISSIONS
            if method.startswith("/dase.v1.")
            and await promptly(outcome(caller.channel, method)) is grpc.StatusCode.PERMISSION_DENIED
        }
    assert denied == {
        method
        for method, roles in PERMISSIONS.items()
        if method.startswith("/dase.v1.") and role not in roles
    }


def test_the_table_gives_no_role_more_than_it_needs():
    allowed = {
        role: {method.rpartition("/")[2] for method, roles in PERMISSIONS.items() if role in roles}
        for role in Role
    }
    health = {"Check", "List", "Watch"}
    assert allowed[Role.LEARNER] == health | {
        *("Insert", "Sample", "Describe", "Join", "Heartbeat", "Leave", "Status", "Publish", "Subscribe")
    }
    assert allowed[Role.ACTOR] == health | {"Insert", "Describe", "Attend", "Status", "Subscribe"}
    assert allowed[Role.EVALUATOR] == health | {"Describe", "Attend", "Status", "Subscribe"}
    assert allowed[Role.OBSERVER] == health | {"Status", "DescribePolicy", "ServerReflectionInfo"}
    assert allowed[Role.CLIENT] == health | {"Act", "ActStream", "DescribePolicy"}
    assert allowed[Role.REPLAY] == health | {"Status"}


def test_every_method_of_every_service_is_in_the_table_and_nothing_else():
    services = [
        service
        for module in (cluster_pb2, inference_pb2, policy_pb2, replay_pb2, health_pb2, reflection_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert set(PERMISSIONS) == methods | {f"/{REFLECTION_V1}/ServerReflectionInfo"}


async def test_an_actor_reads_the_policies_of_its_agent_alone(keyring):
    async with guarded(keyring.folder("replay")) as guard:
        async with guard.as_caller(keyring.with_certificate("learner/3")) as learner:
            await learner.join(3)
        async with guard.as_caller(keyring.with_certificate("actor/3")) as caller:
            for agent_ids in ((), (4,), (3, 4)):
                with pytest.raises(NotPermittedError, match="agent 3"):
                    await promptly(first_policy(subscribed(caller, agent_ids)))
            own = subscribed(caller, (3,))
            await own.open()
            own.cancel()


async def first_policy(subscriber: PolicySubscriber):
    return await (await subscriber.open()).next()


def subscribed(caller, agent_ids) -> PolicySubscriber:
    return PolicySubscriber(
        caller.channel,
        caller.address,
        run_id="the-run",
        schema_fingerprint=SCHEMA.fingerprint,
        agent_ids=agent_ids,
    )


async def test_refusals_of_one_kind_are_logged_once_in_a_while_and_all_counted(keyring, caplog):
    async with let_in(keyring, "learner/3") as (guard, caller):
        for _ in range(20):
            with pytest.raises(NotPermittedError):
                await caller.join(0)
        guard.clock.now += door.SAY_EVERY_S
        with pytest.raises(NotPermittedError):
            await caller.join(0)
        assert guard.door.denied == {"agent": 21}
    said = [record.getMessage() for record in caplog.records if "denied" in record.getMessage()]
    assert len(said) == 2
    assert "learner/3 at ipv4:127.0.0.1" in said[0]
    assert "20 times since" in said[1]


@pytest.mark.parametrize(
    "text", ["", "learner/", "learner/03", "learner/-1", "learner/99999", "king", "observer/1", "learner/3/4"]
)
def test_what_is_no_identity_is_refused(text):
    with refuses(CredentialsError):
        Identity.parse(text)


@pytest.mark.parametrize("text", ["learner/3", "learner", "actor/0", "replay", "evaluator", "observer"])
def test_an_identity_is_read_as_it_is_written(text):
    identity = Identity.parse(text)
    assert str(identity) == text
    assert Identity.parse(identity.uri) == identity


async def test_an_actor_attends_as_an_actor_of_its_agent_alone(keyring):
    actor = Attendant("id", "host", "actor")
    async with let_in(keyring, "actor/3") as (guard, caller):
        await caller.cluster.attend(actor, Attendance())
        (seen,) = guard.run.attendance.all(guard.clock())
        assert seen.node.agent_id == 3
        with pytest.raises(NotPermittedError, match="for agent 3 alone"):
            await caller.cluster.attend(replace(actor, agent_id=2), Attendance())
        with pytest.raises(NotPermittedError, match="role actor, not evaluator"):
            await caller.cluster.attend(replace(actor, role="evaluator"), Attendance())
