"""Actors that cost next to nothing, and a learner for them that only holds the lease and publishes."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from nodes.learning_cases import QUICK, tiny_config
from nodes.running import in_this_loop
from replay.wire.services import Service, promptly

from dase_grpc.learning.agents.policy import policy_tensors
from dase_grpc.learning.agents.registry import Agent, make_agent
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.learning.training.parts import to_bytes
from dase_grpc.nodes.actor import run_actor
from dase_grpc.nodes.options import ActorOptions
from dase_grpc.progress import Progress
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.policies import PolicyPublisher
from dase_grpc.replay.wire.addresses import Address, ReplayPlace
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.schema import Array, TransitionSchema

POINT_GOAL = "worlds:PointGoal"


def point_goal() -> TransitionSchema:
    env = make_env(POINT_GOAL, {})
    env.close()
    return schema_of(env, POINT_GOAL)


@dataclass
class FakeLearner:
    """Holds agent 0's lease and publishes what an untrained agent acts by."""

    service: Service
    member: Membership
    schema: TransitionSchema

    @classmethod
    async def join(cls, service: Service, agent_id: int = 0) -> "FakeLearner":
        schema = point_goal()
        return cls(service, await service.join(agent_id, schema=schema), schema)

    @classmethod
    async def publishing(cls, service: Service, version: int, **settings: Any) -> "FakeLearner":
        learner = await cls.join(service)
        await learner.publish(version, **settings)
        return learner

    @property
    def target(self) -> StreamTarget:
        return StreamTarget(self.service.channel, str(self.service.address), self.member, self.schema)

    async def publish(self, version: int, **settings: Any) -> Agent:
        """Publishes a policy, and returns the agent whose it is."""
        config = tiny_config(**settings).agent
        agent = make_agent(config, agent_id=0, schema=self.schema, seed=version, device=torch.device("cpu"))
        payload = to_bytes(policy_tensors(agent.state_dict()))
        await PolicyPublisher(self.target).publish(version, payload, step=version)
        return agent

    async def finish(self) -> None:
        """Leaves with all steps done."""
        await self.service.client.heartbeat(self.member, Progress(step=9, total_steps=9, state="finished"))
        await self.leave()

    async def leave(self) -> None:
        await self.service.client.leave(self.member, reason="test")

    async def join_again(self) -> None:
        """Another learner takes the agent: a new epoch."""
        self.member = await self.service.join(self.member.agent_id, schema=self.schema)


def actor_options(address: Address, **changes: Any) -> ActorOptions:
    """Options of an actor of a tiny run; settings are given as `section__key=value`."""
    settings = {key: changes.pop(key) for key in list(changes) if "__" in key}
    options = {"replay": ReplayPlace.at(address), "agent_id": 0, "timing": QUICK, **changes}
    return ActorOptions(config=tiny_config(**settings), **options)


acting = partial(in_this_loop, run_actor)


async def act(options: ActorOptions) -> None:
    await promptly(run_actor(options, asyncio.Event()))


def rows_in(service: Service) -> Array:
    """All rows present, the oldest first."""
    return np.ascontiguousarray(service.run.store.ring.ordered())


def assert_unbroken(rows: Array, schema: TransitionSchema) -> None:
    """The rows of one PointGoal, episodes of 20 steps: none is missing, none doubled, all in order."""
    named = schema.named(rows)
    within = np.arange(len(rows) - 1) % 20 != 19
    assert (named["next_observation"][:-1] == named["observation"][1:])[within].all()
    whole = rows[:, : schema.float_width]  # one column alone has the same number twice now and then
    assert len(np.unique(whole, axis=0)) == len(rows)
