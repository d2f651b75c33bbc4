"""Many agents: what the service tells, keeps and wakes does not grow with their pairs."""

import asyncio
from dataclasses import replace

import pytest
from nodes.learning_cases import QUICK
from replay.wire.services import eventually, promptly, rows_of, serving

from dase_grpc.progress import MAX_PAIRED_AGENTS, Attendance, Attendant, Progress
from dase_grpc.replay.client.cluster import open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.membership import ASK_OF_ALL_EVERY, FEW_AGENTS, LearnerConnection
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.service.cluster import AGENTS_AT_ONCE, BEATS_PER_S
from dase_grpc.replay.service.server import MAX_CONNECTION_STREAMS
from dase_grpc.replay.service.streams import Changes
from dase_grpc.replay.wire.addresses import MAX_MESSAGE_BYTES
from dase_grpc.replay.wire.messages import MAX_TEXT, progress_from_proto, progress_to_proto

MANY = 1_000


def fill_by(service, agents):
    """Stores a row of each of these agents past the wire."""
    for agent in agents:
        service.fill(1, agent_id=agent)


@pytest.fixture
async def crowd():
    """A service with very many agents, each of which tells similarities of all."""
    async with serving(capacity=2 * MANY) as service:
        await service.join(0)
        similar = dict.fromkeys(range(MANY), 0.5)
        told = Progress(step=2**40, total_steps=2**40, similarity=similar, state="s" * MAX_TEXT)
        kept = progress_from_proto(progress_to_proto(told))
        for agent in range(1, MANY):
            lease = service.run.leases.join("n" * MAX_TEXT, agent, 0.0, node_id=str(agent))
            service.run.leases.renew(agent, lease.epoch, 0.0, progress=kept)
        fill_by(service, range(MANY))
        yield service


@pytest.mark.slow
async def test_the_status_of_a_thousand_agents_fits_a_message(crowd):
    status = await crowd.client.status()
    assert len(status.agents) == MANY
    assert status.ByteSize() < MAX_MESSAGE_BYTES / 2
    similarity = progress_from_proto(status.agents[-1].progress).similarity
    assert set(similarity) == set(range(MAX_PAIRED_AGENTS))


@pytest.mark.slow
async def test_status_tells_of_named_agents_alone(crowd):
    await crowd.client.attend(Attendant("a", "a", "actor", 7), Attendance())
    status = await crowd.client.status(agent_ids=(7, 9))
    assert [agent.agent_id for agent in status.agents] == [7, 9]
    assert dict(status.buffer.inserted_by_agent) == {7: 1, 9: 1}
    assert not status.nodes
    assert (await crowd.client.status()).nodes


@pytest.mark.slow
async def test_others_go_on_while_status_tells_of_many(crowd):
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    going_on = asyncio.ensure_future(others())
    told = [agent async for agent in crowd.cluster._agents(0.0, ())]
    going_on.cancel()
    assert len(told) == MANY
    assert turns >= MANY // AGENTS_AT_ONCE


async def test_a_heartbeat_is_answered_with_the_agents_own_counts_where_it_asks_for_them(service):
    member = await service.join(1)
    fill_by(service, (0, 1, 2))
    own = (await service.client.heartbeat(member, Progress(), own_counts=True)).buffer
    assert dict(own.inserted_by_agent) == dict(own.size_by_agent) == {1: 1}
    every = (await service.client.heartbeat(member, Progress())).buffer
    assert dict(every.inserted_by_agent) == {0: 1, 1: 1, 2: 1}
    attends = await service.client.attend(Attendant("a", "a", "actor", 2), Attendance())
    assert dict(attends.buffer.inserted_by_agent) == {2: 1}
    assert not (
        await service.client.attend(Attendant("e", "e", "evaluator"), Attendance())
    ).buffer.size_by_agent


async def test_counts_of_all_agents_are_asked_for_seldom_where_there_are_many(service):
    target = await service.target(0)
    fill_by(service, range(FEW_AGENTS + 1))
    connection = LearnerConnection(target, asks_of_all=True)
    await connection._report(Progress())
    assert len(connection.inserted_by_agent) == FEW_AGENTS + 1
    fill_by(service, [FEW_AGENTS + 1])
    for _ in range(ASK_OF_ALL_EVERY - 1):
        answer = await connection._report(Progress())
        assert dict(answer.buffer.inserted_by_agent) == {0: 1}
        assert len(connection.inserted_by_agent) == FEW_AGENTS + 1
    await connection._report(Progress())
    assert len(connection.inserted_by_agent) == FEW_AGENTS + 2


async def test_the_more_nodes_the_fewer_heartbeats_of_each(service):
    member = await service.join(0)
    assert (await service.client.heartbeat(member, Progress())).beat_seconds == 1 / BEATS_PER_S
    for agent in range(1, 50):
        await service.join(agent)
    await service.client.attend(Attendant("a", "a", "actor", 0), Attendance())
    assert (await service.client.heartbeat(member, Progress())).beat_seconds == 51 / BEATS_PER_S
    answer = await service.client.attend(Attendant("a", "a", "actor", 0), Attendance())
    assert answer.beat_seconds == 51 / BEATS_PER_S


async def test_a_node_beats_as_seldom_as_its_replay_asks_but_within_its_lease(service):
    connection = LearnerConnection(await service.target(0), timing=QUICK)
    assert connection.beat_s(0.0) == QUICK.beat_s
    assert connection.beat_s(2.0) == 2.0
    assert connection.beat_s(60.0) == connection.target.member.ttl_s / 4


async def test_a_change_wakes_those_of_its_agent_alone():
    changes = Changes()
    with changes.of({1}) as one, changes.of({1, 2}) as both, changes.of(()) as any_:
        changes.tell(2)
        assert (one.is_set(), both.is_set(), any_.is_set()) == (False, True, True)
        changes.tell_all()
        assert one.is_set()
        one.clear()
    changes.tell(1)
    assert not one.is_set()


async def test_streams_that_wait_for_enough_rows_are_woken_by_the_row_that_makes_them_enough(monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.service.sample.WAITING_EVERY_S", 600.0)
    async with serving(min_size=3) as service:
        waiting = await Sampler(await service.target(1), batch_size=2).open(credits=1)
        inserter = await Inserter(await service.target(0), writer_id="w").open()
        batch = asyncio.ensure_future(waiting.next())
        await inserter.append(rows_of(1, 2))
        await eventually(lambda: waiting.waiting is not None)
        await inserter.append(rows_of(3, 3))
        assert len((await promptly(batch)).rows) == 2
        waiting.cancel()
        inserter.cancel()


async def test_nodes_of_one_process_share_no_connection(service):
    nodes = MAX_CONNECTION_STREAMS + 1
    target = await service.target(0)
    channels = [open_channel(service.address) for _ in range(nodes)]
    inserters = [
        Inserter(
            replace(target, member=replace(target.member, agent_id=agent), channel=channel), writer_id="w"
        )
        for agent, channel in enumerate(channels)
    ]
    for agent in range(1, nodes):
        await service.join(agent)
    await asyncio.gather(*(promptly(each.open()) for each in inserters))
    assert service.replay.streams.open_streams["Insert"] == nodes
    for each in inserters:
        each.cancel()
    await asyncio.gather(*(channel.close() for channel in channels))
