"""An environment that notes when it makes its first step; startup.py reads the notes."""

import os
import time
from pathlib import Path
from typing import Any, Final

import gymnasium
from gymnasium import Env, Wrapper

VARIABLE: Final = "DASE_FIRST_STEPS"
"""Names the file of the notes: of each environment the process and the time of the monotonic clock."""


class NotedEnv(Wrapper[Any, Any, Any, Any]):
    """The quick start's environment, which notes its first step."""

    def __init__(self) -> None:
        env: Env[Any, Any] = gymnasium.make("InvertedDoublePendulum-v5", disable_env_checker=True)
        super().__init__(env)
        self._noted = False

    def step(self, action: Any) -> Any:
        """The environment's own."""
        if not self._noted:
            self._noted = True
            with Path(os.environ[VARIABLE]).open("a", encoding="ascii") as file:
                file.write(f"{os.getpid()} {time.monotonic()}\n")
        return self.env.step(action)
