"""Tiny pairs of every algorithm, and a board that a test puts the peer's policies on."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from learning.agent_cases import make, noises, update_by
from learning.td3_cases import B, columns, weights

from dase_grpc.config.algorithms import AgentConfig, DpdConfig
from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.dpd import DPD, Pairing, terms
from dase_grpc.learning.agents.policy import Published
from dase_grpc.learning.training.parts import LocalPolicies

PEER_ID = 1


class Board:
    """What the two agents have shown."""

    def __init__(self) -> None:
        self.table: dict[int, Published] = {}

    def policies(self, agent_id: int) -> LocalPolicies:
        return LocalPolicies(agent_id, self.table)

    def show(self, agent: ActorCritic, version: int = 1, **changed: torch.Tensor) -> None:
        """Publishes an agent's networks as the peer's, some tensors replaced."""
        tensors = {name: tensor.detach().clone() for name, tensor in agent.judgement.items()}
        tensors |= terms(agent.config)
        self.table[PEER_ID] = Published(version, {**tensors, **changed})


def dpd_of(
    own: ActorCritic,
    board: Board,
    *,
    peer_config: AgentConfig | None = None,
    agent_id: int = 0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> DPD:
    peer_id, peer_config = 1 - agent_id, peer_config or own.config
    place = make(peer_config, seed=99, agent_id=peer_id, dtype=dtype)
    return DPD(
        own,
        place,
        pairing=Pairing(peer_id, peer_config, board.policies(agent_id)),
        config=DpdConfig(**{"publish_every": 10**6, **settings}),
    )


def trained(config: AgentConfig, *, steps: int = 3) -> ActorCritic:
    """An agent in float64 that has had a few updates, so that its normaliser knows something."""
    agent: ActorCritic = make(config, seed=5, agent_id=PEER_ID, dtype=torch.float64)
    for step in range(20, 20 + steps):
        update_by(agent, columns(step), weights(step), noises(config, step))
    return agent


@torch.no_grad()
def shift_values(agent: Any, config: AgentConfig, by: float) -> None:
    """Raises an agent's values of all states and actions by as much, in the environment's rewards."""
    list(agent._critic.bias)[-1] += by * config.reward_scale


@torch.no_grad()
def advantage_of(peer: ActorCritic, own: ActorCritic, observation: torch.Tensor) -> torch.Tensor:
    """By how much the peer's value of each state is higher."""
    values = [agent.value(observation, agent.policy_actions(observation)) for agent in (peer, own)]
    return values[0] - values[1]


def with_noise(agent: Any, noise: list[np.ndarray]) -> None:
    """Makes the agent's next updates use this noise instead of drawing it."""
    tensors = [torch.from_numpy(values) for values in noise]
    if tensors:
        agent.update = lambda batch, weight, **given: agent.update_with(batch, weight, *tensors, **given)


def numbers(state: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in state.items()}


ONES = torch.ones(B)
