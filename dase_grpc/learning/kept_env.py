"""An environment whose calls leave the process as it was."""

from typing import Any

import gymnasium

from dase_grpc.learning.surroundings import SURROUNDINGS
from dase_grpc.process.containment import kept_call
from dase_grpc.schema import Array


class KeptEnv(gymnasium.Wrapper[Array, Array, Array, Array]):
    """An environment that finds in its calls what it has made of the process, while nobody else does.

    Looking at everything takes longer than a step of a small environment. So that is done at its first
    `reset` and `step`, and at later ones where something had to be put back; else only what was changed
    before is looked at. What a later call is the first to change stays, and our own code has to stand it.
    """

    def __init__(self, env: gymnasium.Env[Array, Array]) -> None:
        super().__init__(env)
        self._good_resets = self._good_steps = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """The environment's own."""
        if self._good_resets:
            if not SURROUNDINGS.theirs:
                return self.env.reset(seed=seed, options=options)
            with SURROUNDINGS.as_before():
                return self.env.reset(seed=seed, options=options)
        with kept_call() as changed:
            returned = self.env.reset(seed=seed, options=options)
        self._good_resets = not changed
        return returned

    def step(self, action: Array) -> Any:
        """The environment's own."""
        if self._good_steps:
            if not SURROUNDINGS.theirs:
                return self.env.step(action)
            with SURROUNDINGS.as_before():
                return self.env.step(action)
        with kept_call() as changed:
            returned = self.env.step(action)
        self._good_steps = not changed
        return returned

    def render(self) -> Any:
        """The environment's own."""
        with SURROUNDINGS.entered():
            return self.env.render()

    def close(self) -> None:
        """The environment's own."""
        with kept_call():
            self.env.close()
