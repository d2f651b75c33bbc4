"""Steps: what one step of an environment gives an agent, and rows of n-step returns, one for each step."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dase_grpc.metrics.nodes import ExplorerMetrics
from dase_grpc.schema import Array, TransitionSchema

Reason = Literal["observation", "reward"]


@dataclass(frozen=True)
class Episode:
    """A finished episode: its undiscounted return in float64 and its length in environment steps."""

    return_: float
    length: int


@dataclass(frozen=True)
class ExploredStep:
    """What one environment step gave.

    Attributes:
        rows: the packed transitions that are whole now, the oldest first, (width,) float32 each, owned by the
            receiver. Of single steps that is this one, or none if it was refused; of n-step returns it may
            be any number.
        reason: what was not finite in float32 where a row was refused, "observation" (this or the next)
            before "reward"; else None.
        episode: the episode this step ended, if it ended one, refused or not.
        restarts: the calls ("step" or "reset") that raised before this step, each a restart.
    """

    rows: tuple[Array, ...]
    reason: Reason | None
    episode: Episode | None
    restarts: tuple[str, ...] = ()


def count(metrics: ExplorerMetrics, explored: ExploredStep) -> None:
    """Counts an environment step in the metrics of whoever explores."""
    metrics.env_steps.inc()
    for call in explored.restarts:
        metrics.restarted(call)
    if explored.reason is not None:
        metrics.refused(explored.reason)
    if explored.episode is not None:
        metrics.episodes.inc()
        metrics.episode_return.set(explored.episode.return_)


class NStep:
    """Holds the latest steps of one episode back until the n-th after each is seen.

    The row of step t becomes that of the k steps from t on, k = n but where the episode ends before:
    its reward is r_t + γ r_{t+1} + ... + γ^(k-1) r_{t+k-1}, its next observation the one after the last of
    them, and its bootstrap γ^(k-1), or 0 if the last one terminated; so r + γ · bootstrap · Q(s', ·) is the
    k-step return (Sutton and Barto 2018, section 7.1). Sums are in float64; a row whose sum float32 cannot
    hold is left out. With n = 1 a row passes as it is.

    Args:
        n: steps of a return, at least 1.
        discount: γ.
    """

    def __init__(self, schema: TransitionSchema, *, n: int, discount: float) -> None:
        self._n, self._discount = n, discount
        columns = schema.columns
        self._next = columns["next_observation"]
        self._reward, self._bootstrap = columns["reward"].start, columns["bootstrap"].start
        self._held: deque[Array] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def after(self, explored: ExploredStep, *, first: bool) -> ExploredStep:
        """What a step gives, made from what it gives by itself: its row, or none if it was refused.

        A refused step ends the returns of those before it. `first` says that its episode began with it: what
        is held then is of one that was broken off, and goes out before its own rows.
        """
        brought = len(self) + len(explored.rows)
        rows = self.cut() if first or explored.reason is not None else []
        for row in explored.rows:
            rows += self.step(row, ended=explored.episode is not None)
        lost = len(rows) + len(self) < brought
        return ExploredStep(tuple(rows), explored.reason or ("reward" if lost else None), explored.episode)

    def step(self, row: Array, *, ended: bool) -> list[Array]:
        """Takes one step's row, (width,) and finite; the rows that are whole now, the oldest first.

        `ended` says that its episode did, by termination (then its bootstrap is 0) or by truncation.
        """
        self._held.append(row)
        if ended:
            return self.cut()
        return self._oldest(1) if len(self._held) == self._n else []

    def cut(self) -> list[Array]:
        """The rows of all steps that are held, as if the episode had been truncated after the last one."""
        return self._oldest(len(self._held))

    def state(self) -> Array:
        """The rows of the steps that are held, (len, width), for `resume`."""
        return np.array(self._held, np.float32)

    def resume(self, rows: Array) -> None:
        """Goes on from what `state` gave."""
        self._held = deque(rows.astype(np.float32))

    def _oldest(self, count: int) -> list[Array]:
        """The rows of the oldest steps, which are not held any more, with the returns up to the latest."""
        rows = [self._whole() for _ in range(count)]
        return [row for row in rows if math.isfinite(row[self._reward])]

    def _whole(self) -> Array:
        count, last, return_ = len(self._held), self._held[-1], 0.0
        for row in reversed(self._held):
            return_ = float(row[self._reward]) + self._discount * return_
        row = self._held.popleft()
        if count > 1:
            row = row.copy()
            row[self._next] = last[self._next]
            with np.errstate(over="ignore"):
                row[self._reward] = return_
            row[self._bootstrap] = last[self._bootstrap] * self._discount ** (count - 1)
        return row
