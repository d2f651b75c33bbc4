"""PolicyExchange: latest only in both directions, never blocking the compute thread, errors out of `run`."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
from contracts.sentences import assert_one_sentence
from nodes.running import joined, replay_node
from replay.wire.services import eventually, promptly, serving

from dase_grpc.errors import DaseError, DrainingError, StaleLeaseError, UnreachableError
from dase_grpc.learning.training.parts import from_bytes, to_bytes
from dase_grpc.nodes.followed import tensor_exchange
from dase_grpc.replay.client.membership import LearnerConnection
from dase_grpc.replay.client.policies import PolicyPublisher


def tensors(value):
    return {"actor.weight.0": torch.full((4,), float(value))}


def packed(value):
    return to_bytes(tensors(value))


async def exchange_of(service, agent_id=0, *, follow=()):
    return tensor_exchange(LearnerConnection(await service.target(agent_id)), follow=follow)


@asynccontextmanager
async def running(exchange):
    """Runs the exchange; it ends with the block."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(exchange.run())
        yield task
        task.cancel()


async def test_policies_of_a_thread_arrive_and_flush_waits_for_the_last(service):
    exchange = await exchange_of(service)
    async with running(exchange):
        await promptly(exchange.flush())
        for version in (1, 2, 5):
            await asyncio.to_thread(exchange.publish, version, tensors(version))
            await promptly(exchange.flush())
            assert service.run.policies.versions == {0: version}
    payload = service.run.policies.latest(0).payload
    assert torch.equal(from_bytes(payload)["actor.weight.0"], torch.full((4,), 5.0))


async def test_what_is_published_before_the_exchange_runs_goes_out_too_but_only_the_latest(service):
    exchange = await exchange_of(service)
    for version in range(1_000):
        exchange.publish(version, tensors(version))
    calls = []
    publish = exchange._publish

    async def counted(target, policy):
        calls.append(policy.version)
        return await publish(target, policy)

    exchange._publish = counted
    async with running(exchange):
        await promptly(exchange.flush())
    assert calls == [999]
    assert service.run.policies.versions == {0: 999}


async def test_the_same_policy_goes_out_again_once_the_agent_has_had_more_steps(service):
    exchange, sent = await exchange_of(service), []
    async with running(exchange):
        for step in (0, 0, 1_000, 1_000):
            exchange.steps = lambda step=step: step
            exchange.publish(0, tensors(0))
            await promptly(exchange.flush())
            sent.append(service.run.policies.latest(0).step)
    assert sent == [0, 0, 1_000, 1_000]


async def test_policies_published_while_one_is_sent_wait_as_one(service):
    exchange, calls, go_on = await exchange_of(service), [], asyncio.Event()

    async def slow(target, policy):
        calls.append(policy.version)
        await go_on.wait()

    exchange._publish = slow
    async with running(exchange):
        exchange.publish(0, tensors(0))
        await eventually(lambda: calls == [0])
        for version in range(1, 100):
            exchange.publish(version, tensors(version))
        flushing = asyncio.ensure_future(exchange.flush())
        await service.round_trips()
        assert not flushing.done()
        go_on.set()
        await promptly(flushing)
    assert calls == [0, 99]


async def test_a_flush_that_waits_for_the_last_is_not_woken_for_good_by_one_before(service):
    exchange, calls = await exchange_of(service), []
    gates = [asyncio.Event(), asyncio.Event()]

    async def gated(target, policy):
        calls.append(policy.version)
        await gates[len(calls) - 1].wait()

    exchange._publish = gated
    async with running(exchange):
        exchange.publish(1, tensors(1))
        await eventually(lambda: calls == [1])
        exchange.publish(2, tensors(2))
        flushing = asyncio.ensure_future(exchange.flush())
        gates[0].set()
        await eventually(lambda: calls == [1, 2])
        assert not flushing.done()
        gates[1].set()
        await promptly(flushing)


async def test_peers_that_join_later_are_followed(service):
    exchange = await exchange_of(service, follow=[1, 5])
    async with running(exchange):
        for agent_id in (5, 1):
            other = await exchange_of(service, agent_id)
            async with running(other):
                other.publish(3, tensors(agent_id))
                await eventually(lambda agent_id=agent_id: exchange.latest(agent_id) is not None)
            assert exchange.latest(agent_id).tensors["actor.weight.0"][0] == agent_id


async def test_an_agent_that_is_not_followed_is_a_mistake(service):
    exchange = await exchange_of(service, follow=[2, 1])
    with pytest.raises(KeyError, match=r"agent 0 is not among those followed: \[1, 2\]"):
        exchange.latest(0)


async def test_who_follows_nobody_opens_no_subscription(service):
    await PolicyPublisher(await service.target(1)).publish(1, b"of nobody's interest")
    exchange = await exchange_of(service)
    async with running(exchange):
        exchange.publish(1, tensors(1))
        await promptly(exchange.flush())
    assert exchange._arrived == {}


async def test_a_peer_that_starts_again_is_seen_with_its_lower_version(service):
    exchange = await exchange_of(service, follow=[1])
    async with running(exchange):
        first = await service.target(1)
        await PolicyPublisher(first).publish(500, packed(1.0))
        await eventually(lambda: exchange.latest(1) is not None)
        await service.client.leave(first.member, reason="restart")
        await PolicyPublisher(await service.target(1)).publish(2, packed(2.0))
        await eventually(lambda: exchange.latest(1).version == 2)
        assert exchange.latest(1).tensors["actor.weight.0"][0] == 2.0


async def test_a_policy_that_is_none_is_an_error_in_one_sentence_for_who_looks_at_it(service):
    exchange = await exchange_of(service, follow=[1])
    publisher = PolicyPublisher(await service.target(1))
    async with running(exchange):
        await publisher.publish(3, b"no tensors")
        await eventually(lambda: exchange._arrived != {})
        for _ in range(2):
            with pytest.raises(DaseError) as refusal:
                exchange.latest(1)
            assert_one_sentence(refusal.value, "policy 3 of agent 1 cannot be read", "safetensors")
        await publisher.publish(4, packed(1.0))
        await eventually(lambda: exchange._arrived[1].version == 4)
        assert exchange.latest(1).version == 4


async def test_a_lost_lease_comes_out_of_run(service):
    target = await service.target()
    exchange = tensor_exchange(LearnerConnection(target), follow=[1])
    run = asyncio.ensure_future(exchange.run())
    await service.client.leave(target.member, reason="test")
    exchange.publish(1, tensors(1))
    with pytest.raises(ExceptionGroup) as caught:
        await promptly(run)
    assert caught.group_contains(StaleLeaseError)
    exchange.publish(2, tensors(2))
    assert exchange.latest(1) is None


async def test_a_draining_replay_comes_out_of_run_although_nothing_is_sent():
    async with replay_node() as replay, joined(replay.address) as target:
        other = PolicyPublisher(target)
        exchange = tensor_exchange(LearnerConnection(target), follow=[0])
        run = asyncio.ensure_future(exchange.run())
        await other.publish(1, packed(1.0))
        await eventually(lambda: exchange.latest(0) is not None)
        await replay.end()
        with pytest.raises(ExceptionGroup) as caught:
            await promptly(run)
        assert caught.group_contains((DrainingError, UnreachableError))
        assert exchange.latest(0).version == 1


async def test_a_cancelled_exchange_leaves_no_task_and_no_stream():
    async with serving() as service:
        target, before = await service.target(), len(asyncio.all_tasks())
        exchange = tensor_exchange(LearnerConnection(target), follow=[1])
        async with running(exchange):
            exchange.publish(1, tensors(1))
            await promptly(exchange.flush())
        await eventually(lambda: len(asyncio.all_tasks()) <= before)
