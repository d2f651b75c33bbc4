"""An evaluator of a replay of two shards: the policies are at the first, whatever order they are named in."""

import pytest
from contracts.sentences import assert_one_sentence
from nodes.sharding_cases import shards_serving
from nodes.test_evaluator_node import Published, evaluate, evaluating, evaluator_options, steps_of
from replay.wire.services import eventually, promptly

from dase_grpc.errors import ConfigError
from dase_grpc.replay.wire.addresses import ReplayPlace


async def test_policies_are_followed_at_the_first_shard_whatever_order_the_shards_are_named_in(tmp_path):
    async with shards_serving(2) as (first, second):
        learner = await Published.joined(first)
        place = ReplayPlace((second.address, first.address))
        async with evaluating(evaluator_options(place, tmp_path / "run")) as (task, _):
            for step in (0, 40, 80):
                await learner.publish(step)
                await eventually(lambda step=step: step in steps_of(tmp_path / "run"))
            await promptly(task)
        assert not second.run.attendance.all(0.0)


async def test_another_shard_alone_is_refused_with_what_to_name(tmp_path):
    async with shards_serving(2) as (_, second):
        options = evaluator_options(second.address, tmp_path / "run")
        with pytest.raises(ConfigError) as refusal:
            await evaluate(options)
    assert_one_sentence(refusal.value, "shard 1/2 of run 'the-run'", "name the addresses of all shards")
