"""PeerPolicies: what both implementations promise, in one process and over the network."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import torch
from learning.td3_cases import assert_same
from replay.wire.services import eventually, serving

from dase_grpc.learning.agents.policy import PeerPolicies, Published
from dase_grpc.learning.training.parts import LocalPolicies
from dase_grpc.nodes.followed import tensor_exchange
from dase_grpc.replay.client.membership import LearnerConnection

Views = list[PeerPolicies]


@asynccontextmanager
async def in_one_process() -> AsyncIterator[Views]:
    table: dict[int, Published] = {}
    yield [LocalPolicies(agent_id, table) for agent_id in range(2)]


@asynccontextmanager
async def over_the_network() -> AsyncIterator[Views]:
    async with serving() as service, asyncio.TaskGroup() as tasks:
        exchanges = [
            tensor_exchange(LearnerConnection(await service.target(own)), follow=[1 - own]) for own in (0, 1)
        ]
        running = [tasks.create_task(exchange.run()) for exchange in exchanges]
        yield list(exchanges)
        for task in running:
            task.cancel()


@pytest.fixture(params=[in_one_process, over_the_network])
async def views(request) -> AsyncIterator[Views]:
    """The views of agents 0 and 1."""
    opened: Callable[[], AbstractAsyncContextManager[Views]] = request.param
    async with opened() as made:
        yield made


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"actor.weight.0": torch.full((2, 3), value), "normaliser.count": torch.tensor(value).double()}


async def seen(view: PeerPolicies, agent_id: int, version: int) -> Published:
    """The policy of that version, once it has come."""
    await eventually(lambda: (found := view.latest(agent_id)) is not None and found.version == version)
    published = view.latest(agent_id)
    assert published is not None
    return published


async def test_before_the_first_policy_there_is_none(views):
    assert [views[0].latest(1), views[1].latest(0)] == [None, None]


async def test_what_one_publishes_the_other_sees(views):
    views[0].publish(0, tensors(1.0))
    views[1].publish(7, tensors(2.0))
    assert_same((await seen(views[1], 0, 0)).tensors, tensors(1.0))
    assert_same((await seen(views[0], 1, 7)).tensors, tensors(2.0))


async def test_a_newer_policy_takes_the_place_of_the_one_before(views):
    for version in (1, 2, 30):
        views[0].publish(version, tensors(float(version)))
    assert_same((await seen(views[1], 0, 30)).tensors, tensors(30.0))


async def test_a_policy_does_not_change_when_its_agent_goes_on_training(views):
    weights = tensors(1.0)
    views[0].publish(1, weights)
    for weight in weights.values():
        weight.zero_()
    assert_same((await seen(views[1], 0, 1)).tensors, tensors(1.0))


async def test_it_is_the_same_object_until_a_newer_one_comes(views):
    views[0].publish(1, tensors(1.0))
    first = await seen(views[1], 0, 1)
    assert views[1].latest(0) is first
    views[0].publish(2, tensors(2.0))
    second = await seen(views[1], 0, 2)
    assert second is not first
    assert_same(first.tensors, tensors(1.0))


async def test_the_version_last_published_again_changes_nothing(views):
    views[0].publish(1, tensors(1.0))
    first = await seen(views[1], 0, 1)
    views[0].publish(1, tensors(2.0))
    views[0].publish(1, tensors(3.0))
    assert views[1].latest(0) is first
    views[0].publish(2, tensors(4.0))
    assert_same((await seen(views[1], 0, 2)).tensors, tensors(4.0))


async def test_a_lower_version_is_an_error(views):
    views[0].publish(5, tensors(5.0))
    with pytest.raises(ValueError, match="policy 4 cannot be published after policy 5"):
        views[0].publish(4, tensors(4.0))
    assert_same((await seen(views[1], 0, 5)).tensors, tensors(5.0))


async def test_parameters_come_without_their_gradients(views):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.sum().backward()
    views[0].publish(1, {"actor.weight": weight})
    (arrived,) = (await seen(views[1], 0, 1)).tensors.values()
    assert (type(arrived), arrived.requires_grad, arrived.grad) == (torch.Tensor, False, None)


async def test_what_is_seen_lies_on_the_cpu_in_memory_of_its_own(views):
    base = torch.arange(12.0).reshape(3, 4)
    views[0].publish(1, {"transposed": base.T, "part": base[1]})
    arrived = (await seen(views[1], 0, 1)).tensors
    assert_same(arrived, {"transposed": base.T, "part": base[1]})
    assert {each.device.type for each in arrived.values()} == {"cpu"}
    assert arrived["part"].untyped_storage().nbytes() == 16
