"""Counts the updates whose steps were left out as not finite, and finds that an agent cannot go on."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Final

from torch import Tensor

from dase_grpc.learning.agents.agent import Agent
from dase_grpc.learning.envs.explorer import diverged
from dase_grpc.learning.training.statistics import Window
from dase_grpc.metrics.nodes import LearnerMetrics

DIVERGED_AFTER: Final = 100
"""So many steps in a row that had to be left out mean that an agent learns nothing any more."""

_log = logging.getLogger("dase")


class Health:
    """How an agent's updates went; asks the agent, which waits for the device."""

    def __init__(self, agent: Agent, metrics: LearnerMetrics) -> None:
        self._agent = agent
        self._metrics = metrics
        self._in_a_row: Counter[str] = Counter()
        self._said = False
        self.finding: str | None = None

    def count(self, window: Window) -> None:
        """Adds what was left out since the last call; `finding` says if it has been everything for long."""
        for part, steps in self._agent.take_steps().items():
            if not steps.tried:
                continue
            if steps.left_out:
                window.skipped += steps.left_out
                self._metrics.skipped(f"{part}_not_finite", steps.left_out)
                self._say(part, steps.left_out)
            every_one = steps.left_out == steps.tried
            self._in_a_row[part] = self._in_a_row[part] + steps.tried if every_one else 0
            if self._in_a_row[part] >= DIVERGED_AFTER:
                self.finding = (
                    f"the last {self._in_a_row[part]} updates of its {part} had a loss or a gradient that is "
                    f"not finite and were left out"
                )

    def _say(self, part: str, count: int) -> None:
        if not self._said:
            _log.warning(
                "%d updates of the %s are left out because their loss or gradient is not finite, and so is "
                "every later one that is not (they are counted in metrics.jsonl)",
                count,
                part,
            )
        self._said = True


def require_finite(state: Mapping[str, Tensor], *, of: str) -> None:
    """Checks every number of an agent's state; waits for the device.

    Raises:
        DivergedError: one is not finite.
    """
    for name, tensor in state.items():
        if not bool(tensor.isfinite().all()):
            raise diverged(of, f"{name} is not finite")
