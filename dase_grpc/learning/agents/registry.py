"""The table of learning algorithms: from the configuration's name to an agent or a policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents import policy
from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.ddpg import DDPG
from dase_grpc.learning.agents.memory import OWN, Memory
from dase_grpc.learning.agents.sac import SAC
from dase_grpc.learning.agents.td3 import TD3
from dase_grpc.learning.envs.explorer import Policy
from dase_grpc.schema import TransitionSchema


class MakeAgent(Protocol):
    """Builds an agent from the run's seed."""

    def __call__(
        self,
        config: AgentConfig,
        schema: TransitionSchema,
        *,
        seed: int,
        agent_id: int,
        device: torch.device,
        memory: Memory = OWN,
        autograd: bool | None = None,
    ) -> ActorCritic:
        """An agent that has not learned anything yet."""
        ...


class LoadPolicy(Protocol):
    """Builds a policy from an agent's saved state."""

    def __call__(
        self, config: AgentConfig, schema: TransitionSchema, state: Mapping[str, Any], device: torch.device
    ) -> Policy:
        """The policy alone."""
        ...


@dataclass(frozen=True)
class Algorithm:
    """What one learning algorithm brings."""

    agent: MakeAgent
    policy: LoadPolicy


ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    "td3": Algorithm(agent=TD3, policy=policy.load_policy),
    "ddpg": Algorithm(agent=DDPG, policy=policy.load_policy),
    "sac": Algorithm(agent=SAC, policy=policy.load_policy),
}


def make_agent(
    config: AgentConfig,
    schema: TransitionSchema,
    *,
    seed: int,
    agent_id: int,
    device: torch.device,
    memory: Memory = OWN,
    autograd: bool | None = None,
) -> ActorCritic:
    """A new agent of the configured algorithm; `seed` is the run's, agents differ by `agent_id`."""
    make = ALGORITHMS[config.algorithm].agent
    return make(config, schema, seed=seed, agent_id=agent_id, device=device, memory=memory, autograd=autograd)


def load_policy(
    config: AgentConfig, schema: TransitionSchema, state: Mapping[str, Any], device: torch.device
) -> Policy:
    """The policy in an agent's saved state, for evaluation; its `policy_tensors` are enough.

    Raises:
        KeyError: a tensor is missing.
        ValueError: one too many, or one of another shape or dtype.
    """
    return ALGORITHMS[config.algorithm].policy(config, schema, state, device)
