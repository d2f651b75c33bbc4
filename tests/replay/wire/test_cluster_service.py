"""ClusterService: leases on agent ids, heartbeats, and everything a dashboard shows."""

import math
import socket
from dataclasses import replace
from functools import partial

import grpc
import pytest
from replay.wire.policy_streams import subscribed
from replay.wire.services import (
    SCHEMA,
    acknowledged,
    chunk,
    eventually,
    insert_header,
    refusal,
    rows_of,
    sent,
)

from dase_grpc.errors import (
    AgentTakenError,
    DrainingError,
    MalformedError,
    RunMismatchError,
    SchemaMismatchError,
    StaleLeaseError,
    UnreachableError,
)
from dase_grpc.progress import MAX_PAIRED_AGENTS, Progress
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.service.cluster import MAX_NODE_ID
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.messages import (
    MAX_ENVIRONMENT,
    Membership,
    progress_from_proto,
    progress_to_proto,
    schema_from_proto,
    schema_to_proto,
)
from dase_grpc.replay.wire.v1 import cluster_pb2, cluster_pb2_grpc, replay_pb2

FULL = Progress(
    step=123,
    total_steps=8_000,
    updates=45,
    updates_per_second=67.5,
    episode_return=-1.25,
    first_evaluation_return=-9.0,
    evaluation_return=3.5,
    similarity={0: 0.25, 7: 1.0},
    state="training",
    similarity_weight=0.0,
)


async def test_joining_tells_everything_a_node_needs(service):
    assert await service.join(3) == Membership(
        "the-run",
        agent_id=3,
        epoch=1,
        ttl_s=10.0,
        capacity=1_000,
        min_size=1,
        incarnation=service.run.incarnation,
        buffer_id=service.run.data_id,
    )
    assert service.events == ["node-3 joined as agent 3 (epoch 1)"]


async def test_who_asks_for_no_id_gets_the_lowest_free_one(service):
    assert (await service.join(1)).agent_id == 1
    assert [(await service.join(None)).agent_id for _ in range(3)] == [0, 2, 3]


async def test_a_lease_that_expired_is_replaced_with_a_higher_epoch_and_fences_its_holder_off(service):
    first = await service.join(0)
    service.clock.now = 10.1
    second = await service.join(0)
    assert (first.epoch, second.epoch) == (1, 2)
    with pytest.raises(StaleLeaseError, match=r"epoch 1 is not valid.*; another node acts as the agent"):
        await service.client.heartbeat(first, Progress())
    await service.client.heartbeat(second, Progress())


async def test_the_node_after_one_that_has_ended_does_not_wait_and_what_still_comes_of_that_is_refused(
    service,
):
    named = {"node_name": "n", "schema": SCHEMA, "agent_id": 0}
    dead = await service.client.join(**named, node_id="dead")
    target = StreamTarget(service.channel, str(service.address), dead, SCHEMA)
    late = await sent(service.stub.Insert(), insert_header(target), chunk(1, rows_of(1, 3)))
    await acknowledged(late, 3)
    member = await service.client.join(**named, node_id="next", ended_node_id="dead")
    assert (dead.epoch, member.epoch) == (1, 2)
    assert service.events[-1] == "n joined as agent 0 (epoch 2), whose node of epoch 1 has ended"
    await late.write(chunk(4, rows_of(4, 9)))
    code, why = await refusal(late)
    assert (code, service.stored()) == (grpc.StatusCode.ABORTED, [1, 2, 3])
    assert "another node acts as the agent" in why
    with pytest.raises(StaleLeaseError, match=r"epoch 1 is not valid"):
        await service.client.heartbeat(dead, Progress())
    await service.client.heartbeat(member, Progress())


async def test_a_wrong_claim_does_not_unseat_a_living_node(service):
    named = {"node_name": "n", "schema": SCHEMA, "agent_id": 0}
    before = await service.client.join(**named, node_id="before")
    await service.client.leave(before, reason="done")
    living = await service.client.join(**named, node_id="living")
    for claimed in ("before", "guessed", ""):
        with pytest.raises(AgentTakenError):
            await service.client.join(**named, node_id="third", ended_node_id=claimed)
        await service.client.heartbeat(living, Progress())
    assert service.events[-1] == "n joined as agent 0 (epoch 2)"


async def test_a_heartbeat_keeps_a_lease_alive(service):
    member = await service.join(0)
    for service.clock.now in (9.0, 18.0, 27.0):
        await service.client.heartbeat(member, Progress())
    with pytest.raises(AgentTakenError):
        await service.join(0)


async def test_a_lease_that_was_given_back_is_free_at_once(service):
    member = await service.join(0)
    await service.client.leave(member, reason="finished 8000 steps")
    assert service.events[-1] == "agent 0 left: finished 8000 steps"
    assert (await service.join(0)).epoch == 2
    with pytest.raises(StaleLeaseError):
        await service.client.leave(member, reason="again")


async def test_another_schema_is_refused(service):
    await service.join(0)
    with pytest.raises(SchemaMismatchError, match=r"action_high\[0\] = 1.0.*action_high\[0\] = 2.0"):
        await service.join(1, schema=replace(SCHEMA, action_high=(2.0,)))


async def test_another_run_is_refused_by_every_call(service):
    with pytest.raises(RunMismatchError, match=r"'the-run'.*'another'"):
        await service.client.join(node_name="n", schema=SCHEMA, agent_id=0, run_id="another")
    member = replace(await service.join(0), run_id="another")
    with pytest.raises(RunMismatchError):
        await service.client.heartbeat(member, Progress())
    with pytest.raises(RunMismatchError):
        await service.client.leave(member, reason="x")


async def test_a_join_without_a_schema_is_refused(service):
    stub = cluster_pb2_grpc.ClusterServiceStub(service.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Join(cluster_pb2.JoinRequest(node_name="n"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "names its environment" in caught.value.details()


async def test_an_impossible_schema_is_refused_naming_the_dimension(service):
    message = schema_to_proto(SCHEMA)
    message.action_high[:] = [math.inf]
    with pytest.raises(MalformedError, match="action dimension 0"):
        schema_from_proto(message)
    stub = cluster_pb2_grpc.ClusterServiceStub(service.channel)
    with pytest.raises(grpc.aio.AioRpcError, match="action dimension 0"):
        await stub.Join(cluster_pb2.JoinRequest(node_name="n", schema=message))
    assert not service.run.opened


async def test_a_draining_service_takes_no_new_nodes_but_says_how_it_is(service):
    await service.join(0)
    service.cluster.draining = True
    with pytest.raises(DrainingError, match="shutting down"):
        await service.join(1)
    assert (await service.client.status()).draining


async def test_status_shows_leases_progress_and_the_buffer(service):
    empty = await service.client.status()
    assert (empty.run_id, empty.environment, len(empty.agents)) == ("the-run", "", 0)
    assert empty.buffer == replay_pb2.BufferState(
        min_size=1, incarnation=service.run.incarnation, buffer_id=service.run.data_id, shard_count=1
    )

    members = [await service.join(agent_id) for agent_id in (0, 1, 2)]
    service.fill(5)
    service.clock.now = 8.0
    await service.client.heartbeat(members[0], FULL)
    await service.client.leave(members[1], reason="had enough")
    service.clock.now = 11.0
    status = await service.client.status()
    assert status.environment == "worlds:Small"
    assert (empty.uptime_seconds, status.uptime_seconds) == (0.0, 11.0)
    assert status.buffer.size == 5
    shown = [(agent.agent_id, agent.epoch, agent.node_name, agent.lease) for agent in status.agents]
    assert shown == [(0, 1, "node-0", "live"), (1, 1, "node-1", "left"), (2, 1, "node-2", "expired")]
    assert [agent.seconds_since_heartbeat for agent in status.agents] == [3.0, 11.0, 11.0]
    assert [agent.reason for agent in status.agents] == ["", "had enough", ""]
    assert progress_from_proto(status.agents[0].progress) == FULL


async def test_an_environment_with_an_endless_name_is_refused(service):
    longest = replace(SCHEMA, environment=MAX_ENVIRONMENT * "e")
    with pytest.raises(MalformedError, match=f"1 to {MAX_ENVIRONMENT} characters, not {MAX_ENVIRONMENT + 1}"):
        await service.join(0, schema=replace(longest, environment=longest.environment + "e"))
    await service.join(0, schema=longest)


async def test_similarity_is_kept_of_the_first_agents_alone_whatever_a_node_tells(service):
    member, last = await service.join(0), MAX_PAIRED_AGENTS - 1
    told = {1: 0.5, last: 0.25, last + 1: 0.125, 4_000_000: 1.0}
    progress = cluster_pb2.Progress(similarity=told)
    request = cluster_pb2.HeartbeatRequest(
        run_id="the-run", agent_id=0, epoch=member.epoch, progress=progress
    )
    await cluster_pb2_grpc.ClusterServiceStub(service.channel).Heartbeat(request)
    shown = progress_from_proto((await service.client.status()).agents[0].progress)
    assert shown.similarity == {1: 0.5, last: 0.25}
    assert set(progress_to_proto(Progress(similarity=told)).similarity) == {1, last}


@pytest.mark.parametrize(
    "progress", [Progress(), FULL, Progress(episode_return=0.0, evaluation_return=0.0, state="waiting: x")]
)
def test_progress_survives_the_wire(progress):
    data = progress_to_proto(progress).SerializeToString()
    assert progress_from_proto(cluster_pb2.Progress.FromString(data)) == progress


def test_numbers_that_are_not_finite_are_left_out_of_progress():
    strange = replace(
        FULL,
        updates_per_second=math.inf,
        episode_return=math.nan,
        first_evaluation_return=math.inf,
        evaluation_return=-math.inf,
        similarity={0: math.nan, 1: 0.5},
        similarity_weight=math.nan,
    )
    assert progress_from_proto(progress_to_proto(strange)) == replace(
        FULL,
        updates_per_second=0.0,
        episode_return=None,
        first_evaluation_return=None,
        evaluation_return=None,
        similarity={1: 0.5},
        similarity_weight=None,
    )


def test_a_schema_survives_the_wire():
    schema = replace(SCHEMA, action_size=3, action_low=(-1.0, 0.1, -1e-30), action_high=(1.0, 0.3, 1e30))
    data = schema_to_proto(schema).SerializeToString()
    again = schema_from_proto(replay_pb2.Schema.FromString(data))
    assert again == schema
    assert again.fingerprint == schema.fingerprint


def nobody_listens() -> Address:
    """An address at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", free.getsockname()[1])


async def test_an_address_where_nobody_listens_is_unreachable_when_the_deadline_ends():
    address = nobody_listens()
    async with open_channel(address) as channel:
        with pytest.raises(UnreachableError, match=f"at {address} does not answer"):
            await ClusterClient(channel, str(address)).join(
                node_name="n", schema=SCHEMA, agent_id=0, timeout_s=0.2
            )


async def test_a_heartbeat_to_nobody_fails_at_once():
    address = nobody_listens()
    member = Membership("the-run", 0, 1, ttl_s=10, capacity=0, min_size=0)
    async with open_channel(address) as channel:
        with pytest.raises(UnreachableError, match="UNAVAILABLE"):
            await ClusterClient(channel, str(address)).heartbeat(member, Progress())


async def test_texts_from_the_network_are_kept_short_and_on_one_line(service):
    await service.client.join(node_name="a\nb" + "x" * 10_000, schema=SCHEMA, agent_id=0)
    (agent,) = (await service.client.status()).agents
    assert agent.node_name.startswith("a bxxx")
    assert len(agent.node_name) == 200
    assert all("\n" not in event for event in service.events)


async def test_a_node_that_asks_again_is_given_the_lease_it_has(service):
    join = partial(service.client.join, node_name="n", schema=SCHEMA, agent_id=None)
    first = await join(node_id="a")
    assert await join(node_id="a") == first
    assert (await join(node_id="b")).agent_id == 1


async def test_an_endless_node_id_is_malformed(service):
    join = partial(service.client.join, node_name="n", schema=SCHEMA, agent_id=0)
    with pytest.raises(MalformedError, match=f"up to {MAX_NODE_ID} characters"):
        await join(node_id="x" * (MAX_NODE_ID + 1))
    assert (await join(node_id="x" * MAX_NODE_ID)).node_id == "x" * MAX_NODE_ID


async def test_a_heartbeat_says_how_many_follow_the_agents_policy(service):
    members = [await service.join(agent_id) for agent_id in (0, 1)]

    async def followers():
        return [(await service.client.heartbeat(member, Progress())).followers for member in members]

    assert await followers() == [0, 0]
    async with subscribed(service), subscribed(service, 1):
        await service.round_trips()
        assert await followers() == [1, 2]
    await eventually(lambda: service.policies.streams.open_streams["Subscribe"] == 0)
    assert await followers() == [0, 0]
