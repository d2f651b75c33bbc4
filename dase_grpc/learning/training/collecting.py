"""The sources of a learner's environment steps: its own, or those of its agent's actors."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import floor
from typing import Protocol

from dase_grpc.errors import EnvironmentFailedError
from dase_grpc.learning.envs.explorer import Episode, ExploredStep, Explorer, count
from dase_grpc.learning.training.parts import ActorSteps, LearnerParts
from dase_grpc.learning.training.state import Counters
from dase_grpc.learning.training.statistics import Window
from dase_grpc.pace import Schedule

_log = logging.getLogger("dase")


class Collecting(Protocol):
    """Counts the environment steps of a learner, and says when an update is due."""

    @property
    def may_update(self) -> bool:
        """Whether what was collected is enough for updates."""
        ...

    @property
    def refilling(self) -> bool:
        """Whether `refill` was called and what it asks for has not begun."""
        ...

    def step(self) -> Episode | None:
        """Comes by the next environment step, if one is due before the next update; the episode it ended.

        Raises:
            EnvironmentFailedError: the environment raised too often; the step was not taken.
            Halted: training shall end.
        """
        ...

    def took_batch(self) -> None:
        """Notes that a batch was taken for an update."""
        ...

    def refill(self) -> None:
        """Has as many transitions collected before the next update as before the first; any thread."""
        ...


class OwnSteps:
    """A learner that explores: one environment step, and from `start_steps` stored on an update after each.

    Args:
        at: counts, shared with the learner.
        window: what is counted since the last line of metrics.
    """

    def __init__(
        self, parts: LearnerParts, explorer: Explorer, at: Counters, window: Callable[[], Window]
    ) -> None:
        self._parts = parts
        self._explorer = explorer
        self._guide = parts.acts_by
        self._at = at
        self._window = window
        self._refill, self._stored_before = False, 0
        self._refused: Counter[str] = Counter()

    @property
    def may_update(self) -> bool:
        """See Collecting."""
        due = self._stored_before + self._parts.config.agent.stored_before_updates
        return self._at.stored >= due and not self._refill

    @property
    def refilling(self) -> bool:
        """See Collecting."""
        return self._refill

    def step(self) -> Episode | None:
        """See Collecting."""
        parts, at = self._parts, self._at
        if self._refill:
            self._refill, self._stored_before = False, at.stored
        try:
            behaviour = self._guide.behaviour()
            explored = self._explorer.step(behaviour.policy, behaviour.version)
        except EnvironmentFailedError:
            count_restarts(parts, self._window(), self._explorer.restarts)
            raise
        at.steps += 1
        self._note(explored)
        if explored.row is not None:
            parts.sink.store(explored.row)
            at.stored += 1
        return explored.episode

    def took_batch(self) -> None:
        """See Collecting."""

    def refill(self) -> None:
        """See Collecting."""
        self._refill = True

    def _note(self, explored: ExploredStep) -> None:
        window = self._window()
        count(self._parts.metrics, explored)
        window.restarts.update(explored.restarts)
        if explored.reason is not None:
            self._refuse(explored.reason)
        if explored.episode is not None:
            window.episodes += 1
            window.episode_returns.add(explored.episode.return_)

    def _refuse(self, reason: str) -> None:
        self._window().refused[reason] += 1
        if not self._refused[reason]:
            _log.warning(
                "agent %d at step %s: a transition is left out because its %s is not finite in float32, and "
                "so is every later one; make the environment return finite numbers (they are counted in "
                "metrics.jsonl)",
                self._parts.agent_id,
                f"{self._at.steps:,}",
                reason,
            )
        self._refused[reason] += 1


class ActorsSteps:
    """A learner whose agent's actors explore: environment steps are theirs, as the replay counts them.

    Before the first update the steps are those collected so far. From then on they are those that the
    updates made so far stand for, `1 / ratio` each, so that the same updates come before the same step
    whatever the actors' speed; the replay lets the actors be ahead of that by the error buffer at most.
    """

    def __init__(self, schedule: Schedule, source: ActorSteps, at: Counters) -> None:
        self._schedule = schedule
        self._source = source
        self._at = at

    @property
    def may_update(self) -> bool:
        """See Collecting."""
        return not self.refilling and self._at.steps >= self._at.base_steps + self._schedule.first_steps - 1

    @property
    def refilling(self) -> bool:
        """See Collecting."""
        origin = self._source.origin
        return (origin.buffer_id, origin.collected) != (self._at.buffer_id, self._at.collected_before)

    def step(self) -> Episode | None:
        """See Collecting; returns after a while without a step where none was collected."""
        at, schedule = self._at, self._schedule
        if self.refilling:
            origin = self._source.origin
            at.buffer_id, at.collected_before = origin.buffer_id, origin.collected
            at.base_steps, at.used = at.steps, 0
        if not self.may_update:
            until = min(schedule.next_mark(at.steps), at.base_steps + schedule.first_steps - 1)
            collected = self._source.reach(until - at.base_steps)
            self._count(at.base_steps + min(collected, until - at.base_steps))
        return None

    def took_batch(self) -> None:
        """See Collecting."""
        at, schedule = self._at, self._schedule
        at.used += 1
        self._count(at.base_steps + schedule.first_steps - 1 + floor(at.used / schedule.ratio))

    def refill(self) -> None:
        """Nothing: the source has another origin then, which is noticed."""

    def _count(self, steps: int) -> None:
        self._at.steps = self._at.stored = max(self._at.steps, steps)


def make_collecting(parts: LearnerParts, at: Counters, window: Callable[[], Window]) -> Collecting:
    """How this learner comes by its environment steps; `window` is what it counts in."""
    if parts.explorer is not None:
        return OwnSteps(parts, parts.explorer, at, window)
    if parts.actor_steps is None:
        raise ValueError("a learner that does not explore needs actors' steps")
    config = parts.config
    schedule = Schedule(
        Fraction(str(config.train.updates_per_step)),
        config.agent.stored_before_updates,
        config.train.steps,
        (config.eval.every, config.train.log_every, config.train.checkpoint_every),
    )
    return ActorsSteps(schedule, parts.actor_steps, at)


def count_restarts(parts: LearnerParts, window: Window, calls: Sequence[str]) -> None:
    """Counts environments that were made anew, by what raised."""
    window.restarts.update(calls)
    for call in calls:
        parts.metrics.restarted(call)
