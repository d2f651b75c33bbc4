"""ClusterService.Attend: actors and evaluators, which hold no lease."""

import math
from dataclasses import replace

import pytest
from replay.wire.services import SCHEMA, rows_of

from dase_grpc.errors import MalformedError, RunMismatchError, SchemaMismatchError
from dase_grpc.progress import MAX_AGENT_ID, Attendance, Attendant, Progress
from dase_grpc.replay.service.cluster import MAX_NODE_ID
from dase_grpc.replay.wire.messages import attendance_from_proto, attendance_to_proto
from dase_grpc.replay.wire.v1 import cluster_pb2

ACTOR = Attendant("n1", "host-a", "actor", 3)
EVALUATOR = Attendant("n2", "host-b", "evaluator")
FULL = Attendance(
    envs=4,
    env_steps=1_000,
    env_steps_per_second=250.5,
    policy_version=77,
    policy_lag_updates=3.5,
    state="exploring",
)


async def test_an_actor_is_told_the_lease_of_its_agent_once_there_is_one(service):
    client = service.client
    assert not (await client.attend(ACTOR, FULL)).HasField("lease")
    member = await service.join(3)
    answer = await client.attend(ACTOR, FULL, run_id="the-run", fingerprint=SCHEMA.fingerprint)
    assert (answer.run_id, answer.lease.agent_id, answer.lease.epoch) == ("the-run", 3, member.epoch)
    assert answer.buffer.buffer_id == service.run.data_id
    assert answer.ttl_seconds == service.run.attendance.ttl_s
    await client.leave(member, reason="done")
    assert not (await client.attend(ACTOR, FULL)).HasField("lease")


async def test_an_actor_is_told_once_its_agent_has_finished_and_until_it_goes_on(service):
    client, member = service.client, await service.join(3)
    await client.heartbeat(member, Progress(step=8, total_steps=8, state="finished"))
    assert not (await client.attend(ACTOR, FULL)).agent_finished
    await client.leave(member, reason="finished 8 steps")
    assert (await client.attend(ACTOR, FULL)).agent_finished
    member = await service.join(3)
    assert not (await client.attend(ACTOR, FULL)).agent_finished
    await client.heartbeat(member, Progress(step=3, total_steps=8, state="stopped"))
    await client.leave(member, reason="stopped")
    assert not (await client.attend(ACTOR, FULL)).agent_finished


async def test_a_new_holder_of_the_agent_shows_as_a_new_epoch(service):
    first = await service.join(3)
    await service.client.leave(first, reason="done")
    await service.join(3)
    assert (await service.client.attend(ACTOR, FULL)).lease.epoch == first.epoch + 1


async def test_status_shows_who_attends_until_it_leaves(service):
    await service.client.attend(ACTOR, FULL)
    await service.client.attend(EVALUATOR, Attendance(state="evaluating"))
    nodes = (await service.client.status()).nodes
    assert [(node.node_name, node.role, node.HasField("agent_id")) for node in nodes] == [
        ("host-a", "actor", True),
        ("host-b", "evaluator", False),
    ]
    assert attendance_from_proto(nodes[0].attendance) == FULL
    await service.client.attend(ACTOR, FULL, leaving=True)
    assert [node.role for node in (await service.client.status()).nodes] == ["evaluator"]
    assert service.events == [
        "host-a attends as actor of agent 3",
        "host-b attends as evaluator",
        "host-a, actor of agent 3, left",
    ]


async def test_an_actor_that_leaves_gives_its_place_in_the_table_of_writers_back_and_no_others(service):
    await service.join(3)
    store, other = service.run.store, replace(ACTOR, node_id="n4")
    for writer in (ACTOR.writer_id, other.writer_id, "learner-3"):
        store.append(writer, 1, rows_of(1, 2, 3), agent_id=3)
    await service.client.attend(ACTOR, FULL, leaving=True)
    keys = [(3, name) for name in (ACTOR.writer_id, other.writer_id, "learner-3")]
    assert store.watch.gone(keys, 1.0) == [(3, ACTOR.writer_id)]
    assert [store.committed(name, agent_id=3) for _, name in keys] == [2, 2, 2]


def test_what_is_not_finite_or_not_known_is_left_out():
    odd = replace(FULL, env_steps_per_second=math.nan, policy_version=None, policy_lag_updates=math.inf)
    sent = attendance_from_proto(attendance_to_proto(odd))
    assert sent == replace(FULL, env_steps_per_second=0.0, policy_version=None, policy_lag_updates=None)
    hostile = cluster_pb2.Attendance(env_steps_per_second=math.inf, policy_lag_updates=math.nan, state="a\nb")
    assert attendance_from_proto(hostile) == Attendance(state="a b")


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (replace(ACTOR, role="learner"), "attends as one of actor, evaluator, not as 'learner'"),
        (replace(ACTOR, node_id=""), "1 to 128 characters, not 0"),
        (replace(ACTOR, node_id="x" * (MAX_NODE_ID + 1)), "1 to 128 characters, not 129"),
        (replace(ACTOR, agent_id=None), "give it an agent id with --agent"),
        (replace(ACTOR, agent_id=MAX_AGENT_ID + 1), "agent id 1024 is outside 0..1023"),
    ],
)
async def test_a_malformed_attendance_is_refused_and_shows_nowhere(service, node, says):
    with pytest.raises(MalformedError, match=says):
        await service.client.attend(node, FULL)
    assert not (await service.client.status()).nodes


async def test_another_run_and_another_schema_are_refused(service):
    await service.join(3)
    with pytest.raises(RunMismatchError):
        await service.client.attend(ACTOR, FULL, run_id="another")
    with pytest.raises(SchemaMismatchError):
        await service.client.attend(ACTOR, FULL, fingerprint="0" * 64)
