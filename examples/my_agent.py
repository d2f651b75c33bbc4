"""An algorithm of one's own: TD3 whose exploration drifts, and less so the more it has learned.

From this folder (its modules can be named there), about a minute on two cores:

    dase train --algo my_agent:DriftingTD3 --env Pendulum-v1 --steps 5000 --set agent.start_steps=1000
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.td3 import TD3
from dase_grpc.learning.envs.noise import Noise
from dase_grpc.schema import Array, TransitionSchema

RETURN = 0.15
"""The share of the way back to 0 that the noise goes in each step."""

HALF_LIFE = 5_000
"""Updates of the policy after which the noise is half as large."""


class Drift(Noise):
    """Ornstein-Uhlenbeck: x ← (1 − RETURN) x + σ 2^(−updates / HALF_LIFE) N(0, I), from 0 in each episode."""

    def __init__(self, deviation: float, size: int) -> None:
        self._deviation = deviation
        self._x = np.zeros(size, np.float32)

    def __call__(self, action: Array, *, version: int, length: int, rng: np.random.Generator) -> Array:
        """The policy's action, and x."""
        if length == 0:
            self._x[:] = 0
        deviation = self._deviation * 0.5 ** (version / HALF_LIFE)
        self._x += deviation * rng.standard_normal(len(action), np.float32) - RETURN * self._x
        return action + self._x

    def state_dict(self) -> Mapping[str, Any]:
        """What a resumed run goes on with."""
        return {"x": self._x}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with it."""
        self._x[:] = state["x"]


class DriftingTD3(TD3):
    """TD3 with that noise."""

    @staticmethod
    def exploration(config: AgentConfig, schema: TransitionSchema) -> Noise:
        """A noise for one environment."""
        return Drift(config.exploration_noise, schema.action_size)
