"""Trial of a class of agents: made-up batches, agents that have learned from them, and comparisons of two."""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.errors import AlgorithmError
from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.batch import Batch, made_up_rows
from dase_grpc.learning.agents.registry import Agent, exploration, make_agent
from dase_grpc.learning.envs.answers import kind
from dase_grpc.learning.envs.noise import Noise
from dase_grpc.schema import Array, TransitionSchema

ROWS: Final = 32
"""Rows of the batches that an agent is tried out with; every fourth has terminated."""

UPDATES: Final = 4
"""Of each agent that is compared with another."""

CPU: Final = torch.device("cpu")


class Trial:
    """A class of agents and the settings with which it is tried out."""

    def __init__(self, algorithm: type[Any], config: AgentConfig, schema: TransitionSchema) -> None:
        self.algorithm = algorithm
        self.config = config
        self.schema = schema

    @property
    def has_values(self) -> bool:
        """Whether it is an `ActorCritic`, which promises more."""
        return issubclass(self.algorithm, ActorCritic)

    def make(self, *, seed: int = 1, agent_id: int = 0, **more: Any) -> Agent:
        """A new agent, on the CPU."""
        make = partial(make_agent, self.config, self.schema, algorithm=self.algorithm, device=CPU)
        return make(seed=seed, agent_id=agent_id, **more)

    def noise(self) -> Noise:
        """A new noise of its agents' exploration."""
        return exploration(self.config, self.schema, algorithm=self.algorithm)

    def batch(self, number: int = 0, **columns: Any) -> Batch:
        """A batch of that number, with other values in some columns."""
        rows = made_up_rows(self.schema, ROWS, np.random.default_rng(number))
        named = self.schema.named(rows)
        named["bootstrap"] = np.arange(ROWS) % 4 > 0
        for name, values in columns.items():
            named[name] = values
        return Batch.from_rows(self.schema, torch.from_numpy(rows))

    def trained(self, updates: int = UPDATES, **more: Any) -> Agent:
        """An agent that has had so many updates, each with a batch of its own."""
        agent = self.make(**more)
        for number in range(updates):
            agent.update(self.batch(number), self.ones)
        return agent

    @cached_property
    def observation(self) -> Array:
        """(ROWS, m), some of them far out."""
        rng = np.random.default_rng(0)
        drawn = (
            rng.standard_normal((ROWS, self.schema.observation_size)) * np.geomspace(0.1, 50, ROWS)[:, None]
        )
        return drawn.astype(np.float32)

    @cached_property
    def ones(self) -> Tensor:
        """The weights of rows that are all the agent's own."""
        return torch.ones(ROWS)


def broken(finding: str) -> NoReturn:
    """Says what a promise was found to be broken by."""
    raise AlgorithmError(finding)


def require_same(first: Mapping[str, Tensor], second: Mapping[str, Tensor], finding: str) -> None:
    """Checks that two states are the same to the bit; `finding` goes on with the name of what is not."""
    if first.keys() != second.keys():
        broken(f"{finding} the names in its state")
    for name, value in first.items():
        if not torch.equal(value, second[name]):
            broken(f"{finding} {name}")


def require_near(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], finding: str, *, tolerance: float = 1e-4
) -> None:
    """As `require_same`, but for rounding."""
    if first.keys() != second.keys():
        broken(f"{finding} the names {sorted(first.keys() ^ second.keys())}")
    for name, value in first.items():
        if not torch.allclose(value.double(), second[name].double(), rtol=tolerance, atol=tolerance / 100):
            broken(f"{finding} {name}")


def described(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return kind(value)
