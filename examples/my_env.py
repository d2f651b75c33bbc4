"""A small environment of one's own, and how to train in it.

From this folder (its modules can be named there), about a minute on two cores:

    dase train --env my_env:Cart --steps 5000 --set agent.start_steps=1000 --name cart
    python use_policy.py runs/cart
"""

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

Array = npt.NDArray[np.float32]


class Cart(gymnasium.Env[Array, Array]):
    """Brings a cart to rest at the origin: observes position and velocity, chooses a force in [-2, 2].

    What an agent here needs: Box spaces, action bounds that are finite, and an end of the episode.
    """

    def __init__(self, steps: int = 100) -> None:
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = Box(-2.0, 2.0, (1,), np.float32)
        self._steps = steps
        self._position, self._velocity, self._time = 0.0, 0.0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Starts somewhere, at rest."""
        super().reset(seed=seed)
        self._position, self._velocity, self._time = float(self.np_random.uniform(-1, 1)), 0.0, 0
        return self._observe(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Pushes for a tenth of a second; the episode is cut (truncated) after `steps`."""
        force = float(action[0])
        self._velocity += 0.1 * force
        self._position += 0.1 * self._velocity
        self._time += 1
        reward = -abs(self._position) - 0.1 * abs(self._velocity) - 0.01 * force**2
        return self._observe(), reward, False, self._time >= self._steps, {}

    def _observe(self) -> Array:
        return np.array([self._position, self._velocity], np.float32)
