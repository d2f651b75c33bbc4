"""Seconds for a step, as the time left of a run and of an experiment are estimated from it."""

import math
from collections import deque

from dase_grpc.progress import duration


class StepPace:
    """Seconds for a step, from what was observed over the last `horizon_s`, or since the beginning.

    Memory is bounded: of what lies close together only the latest is kept.
    """

    def __init__(self, horizon_s: float = math.inf) -> None:
        self._horizon_s = horizon_s
        self._seen: deque[tuple[float, int]] = deque()

    def observe(self, step: int, now: float) -> None:
        """Takes in how far it is; now is a monotonic clock's reading in seconds."""
        if len(self._seen) > 1 and now - self._seen[-2][0] < self._horizon_s / 60:
            self._seen.pop()
        self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > self._horizon_s:
            self._seen.popleft()

    @property
    def since_s(self) -> float | None:
        """When it was first observed, within the horizon."""
        return self._seen[0][0] if self._seen else None

    @property
    def step(self) -> int:
        """The latest step; -1 before any."""
        return self._seen[-1][1] if self._seen else -1

    @property
    def measured(self) -> tuple[float, int]:
        """The seconds between the first and the latest observation, and the steps made meanwhile."""
        if not self._seen:
            return 0.0, 0
        (since, first), (now, step) = self._seen[0], self._seen[-1]
        return now - since, step - first

    def step_s(self, *, measured_s: float) -> float | None:
        """Seconds for a step; None before it has gone on for `measured_s`."""
        seconds, steps = self.measured
        return seconds / steps if steps > 0 and seconds >= measured_s else None


def left(seconds: float | None) -> str:
    """For example "about 2 min 10 s left"."""
    return "time left not known yet" if seconds is None else f"about {duration(seconds)} left"
