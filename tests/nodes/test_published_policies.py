"""A learner shows its policy to whoever follows it, from its start to its last step, and to nobody else."""

from itertools import pairwise

import pytest
import torch
from nodes.learning_cases import FOREVER, learner_options, tiny_config, train, training
from nodes.running import ended
from replay.wire.policy_streams import subscriber_of
from replay.wire.services import promptly

from dase_grpc.learning.agents.registry import load_policy
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.learning.training.parts import from_bytes
from dase_grpc.runs.checkpoint import latest, load_checkpoint


def follower_of(service, *agent_ids):
    return subscriber_of(service, *agent_ids, schema_fingerprint=service.run.store.schema.fingerprint)


async def test_a_learner_that_nobody_follows_publishes_nothing(service, tmp_path):
    await train(learner_options(service.address, tmp_path / "run"))
    assert service.run.policies.versions == {}


async def test_a_follower_gets_policies_from_now_to_the_last_with_the_step_of_each(service, tmp_path):
    options = learner_options(
        service.address, tmp_path / "run", train__steps=FOREVER, policy__publish_every=30, eval__every=1_000
    )
    async with training(options) as (task, stop):
        assert service.run.policies.versions == {}
        follower = await follower_of(service).open()
        policies = [await promptly(follower.next()) for _ in range(3)]
        await ended(task, stop)
        follower.cancel()
    steps = [policy.step for policy in policies]
    assert steps == sorted(set(steps))
    assert [policy.version for policy in policies] == [step - 19 for step in steps]
    assert all(later - earlier >= 30 or later % 1_000 == 0 for earlier, later in pairwise(steps))


@pytest.mark.slow
async def test_the_last_policy_is_published_before_the_learner_leaves(service, tmp_path):
    options = learner_options(
        service.address, tmp_path / "run", train__steps=600, policy__publish_every=10_000
    )
    env = make_env("worlds:PointGoal", {})
    await service.join(1, schema=schema_of(env, "worlds:PointGoal"))
    env.close()
    follower = await follower_of(service, 0).open()
    await train(options)
    follower.cancel()
    published = service.run.policies.latest(0)
    assert (published.step, published.version) == (600, 581)
    kept = load_checkpoint(latest(tmp_path / "run/agents/0/checkpoints"))
    config, schema = tiny_config().agent, service.run.store.schema
    policies = [
        load_policy(config, schema, tensors, torch.device("cpu"))
        for tensors in (from_bytes(published.payload), kept.tensors)
    ]
    seen = torch.linspace(-1, 1, 9).reshape(-1, 1).numpy()
    assert (policies[0].act(seen) == policies[1].act(seen)).all()
