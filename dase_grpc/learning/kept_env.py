"""An environment whose calls leave the process as it was."""

from typing import Any

import gymnasium

from dase_grpc.learning.containment import first_call
from dase_grpc.learning.surroundings import SURROUNDINGS
from dase_grpc.schema import Array


class KeptEnv(gymnasium.Wrapper[Array, Array, Array, Array]):
    """An environment that finds in its calls what it has made of the process, while nobody else does.

    Looking at everything takes longer than a step of a small environment. So that is done at its first
    `reset` and `step`; at every later `reset` all is looked at that it may rely on, at a later `step` only
    what has been changed before. What a later `step` is the first to change stays, and our own code has to
    stand it.
    """

    def __init__(self, env: gymnasium.Env[Array, Array]) -> None:
        super().__init__(env)
        self._was_reset = self._has_stepped = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """The environment's own."""
        first, self._was_reset = not self._was_reset, True
        with first_call() if first else SURROUNDINGS.entered():
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Array) -> Any:
        """The environment's own."""
        if self._has_stepped and not SURROUNDINGS.theirs:
            return self.env.step(action)
        first, self._has_stepped = not self._has_stepped, True
        with first_call() if first else SURROUNDINGS.stepping():
            return self.env.step(action)

    def render(self) -> Any:
        """The environment's own."""
        with SURROUNDINGS.entered():
            return self.env.render()

    def close(self) -> None:
        """The environment's own."""
        with first_call():
            self.env.close()
