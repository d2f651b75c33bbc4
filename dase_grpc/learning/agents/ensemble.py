"""EnsemblePolicy: the policy of all agents of a run, by the critics of all."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.registry import as_actor_critic, make_agent
from dase_grpc.schema import Array, TransitionSchema


class EnsemblePolicy:
    """Acts by that one of K proposed actions which has the highest mean Q over the K agents' critics.

    Each agent proposes π(s), and judges all proposals by its Q as its actor's loss has it, in the
    environment's rewards; of equal ones the first agent's is taken. One thread's.
    """

    def __init__(self, agents: Sequence[ActorCritic]) -> None:
        self._agents = agents

    @classmethod
    def load(
        cls,
        states: Sequence[tuple[AgentConfig, Mapping[str, Any]]],
        schema: TransitionSchema,
        device: torch.device,
    ) -> Self:
        """The policy out of what each agent's `state_dict` gave, a distilling one's, too.

        Raises:
            AlgorithmError: an algorithm of the user's is missing, or has no critics to ask.
            KeyError: a tensor is missing; a policy alone is not enough.
            ValueError: one has another shape or dtype.
        """
        agents = []
        for config, state in states:
            made = make_agent(config, schema, seed=0, agent_id=0, device=device)
            agent = as_actor_critic(made, use="an ensemble")
            agent.judge_as(state)
            agents.append(agent)
        return cls(agents)

    def act(self, observation: Array) -> Array:
        """Noise-free actions in [-1, 1]; (B, m) float32 -> (B, n) float32, a new array."""
        proposed = np.stack([agent.act(observation) for agent in self._agents])  # (K, B, n)
        best = self._values(observation, proposed).argmax(0)  # (B,)
        chosen: Array = proposed[best, np.arange(len(observation))]
        return chosen

    def _values(self, observation: Array, proposed: Array) -> Array:
        """Each proposal's mean Q over the critics, (K, B)."""
        agents, rows, size = proposed.shape
        device = next(iter(self._agents)).policy.flat.values.device
        repeated = torch.from_numpy(np.tile(observation, (agents, 1))).to(device)
        actions = torch.from_numpy(proposed.reshape(-1, size)).to(device)
        total = torch.zeros(agents * rows, dtype=torch.float64, device=device)
        for agent in self._agents:
            total += agent.value(repeated, actions)
        means: Tensor = total.view(agents, rows) / agents
        return means.cpu().numpy()
