"""Pace: updates per environment step, the limiter and the schedule that keep it; pauses between attempts."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from dase_grpc.errors import MalformedError

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0


@dataclass(frozen=True)
class Pace:
    """How many updates an agent makes for each environment step that its actors collect.

    Numbers that make no sense, or by which steps and updates could wait for each other, are a MalformedError.

    Attributes:
        step_error_buffer: how many environment steps the actors may be ahead of the updates.
        first_steps: how many are collected before the first update; it follows the last of these.
        collected_before: transitions of the agent that do not count, for they were there before.
    """

    updates_per_step: float
    step_error_buffer: int
    first_steps: int = 1
    collected_before: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.updates_per_step) and self.updates_per_step > 0):
            raise MalformedError(f"{self.updates_per_step:g} updates per environment step are no pace")
        if min(self.first_steps, self.step_error_buffer) < 1 or self.collected_before < 0:
            raise MalformedError(
                f"a pace has at least 1 step before updates and 1 of error buffer, not {self.first_steps} "
                f"and {self.step_error_buffer}"
            )
        if problem := deadlock(self.updates_per_step, self.step_error_buffer):
            raise MalformedError(problem)

    @property
    def ratio(self) -> Fraction:
        """Updates per step, as the decimal number that was written: 0.1 is a tenth."""
        return Fraction(str(self.updates_per_step))


def deadlock(updates_per_step: float, step_error_buffer: int) -> str | None:
    """Why with these settings steps and updates could wait for each other; None where they cannot.

    A step that waits leaves at least step_error_buffer - 1 whole steps that no update has followed, and
    these have to allow for the next update.
    """
    needed = 1 + math.ceil(1 / Fraction(str(updates_per_step)))
    if step_error_buffer >= needed:
        return None
    return (
        f"step_error_buffer = {step_error_buffer} is too small for updates_per_step = {updates_per_step:g}: "
        f"an update takes the steps of {needed - 1}, so steps and updates would wait for each other; "
        f"set it to at least {needed}"
    )


class StepLimiter:
    """Counts for one agent how many transitions may be stored, and what a batch still lacks to be sent.

    `collected` are the transitions of the agent that were stored ever.

    Attributes:
        used: batches that updates have taken.
        drawn: these, and those that are on their way to an update.
        own_rows_only: whether the agent draws from its own transitions alone.
    """

    def __init__(self, pace: Pace, *, used: int = 0, held: int = 0, own_rows_only: bool = False) -> None:
        self.pace = pace
        self.used = used
        self.drawn = used + held
        self.own_rows_only = own_rows_only
        self._ratio = pace.ratio

    def room(self, collected: int) -> int:
        """How many more transitions may be stored now; the actors are then as far ahead as they may be."""
        pace = self.pace
        most = pace.first_steps - 1 + math.floor(self.used / self._ratio) + pace.step_error_buffer
        return max(0, most - self._counted(collected))

    def missing(self, collected: int) -> int:
        """How many more environment steps the next batch takes, so that updates are never ahead."""
        enough = self.pace.first_steps - 1 + math.ceil((self.drawn + 1) / self._ratio)
        return max(0, enough - self._counted(collected))

    def draw(self) -> None:
        """Notes that a batch was sent."""
        self.drawn += 1

    def charge(self, batches: int) -> None:
        """Notes that updates have taken batches; more than were sent are a MalformedError."""
        if not 0 <= batches <= self.drawn - self.used:
            raise MalformedError(
                f"updates cannot have taken {batches} batches of the {self.drawn - self.used} that were sent"
            )
        self.used += batches

    def _counted(self, collected: int) -> int:
        return max(0, collected - self.pace.collected_before)


@dataclass(frozen=True)
class Schedule:
    """When a learner without steps of its own updates.

    Attributes:
        first_steps: collected before the first update, which follows the last of them.
        total: environment steps of the run.
        marks: at multiples of these many steps something is due, so none is passed over; first what counts
            most where an update stands for so many steps that it passes several.
    """

    ratio: Fraction
    first_steps: int
    total: int
    marks: Sequence[int]

    def next_mark(self, steps: int) -> int:
        """The next number of steps after this one at which something is due."""
        return min([self.total, *(steps // every * every + every for every in self.marks)])

    def stop(self, steps: int, target: int) -> int:
        """Where to count to, from these steps to the target: to a mark that lies between, if there is one."""
        if target >= self.total:
            return self.total
        passed = (target // every * every for every in self.marks)
        return next((mark for mark in passed if mark > steps), target)


@dataclass(frozen=True)
class Origin:
    """From where an agent's environment steps are counted: the buffer, and how many it had stored by then."""

    buffer_id: str
    collected: int


def pause_s(failures: int, *, first_s: float, cap_s: float) -> float:
    """The pause after so many failures before the last one, all in a row: doubled by each, up to a cap."""
    doubled_s: float = first_s * 2 ** min(failures, 64)
    return min(doubled_s, cap_s)


class Backoff:
    """Pauses between attempts that are never in step with others': drawn uniformly below `pause_s`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._failures = 0

    def next_s(self) -> float:
        """The pause after one more failure."""
        bound_s = pause_s(self._failures, first_s=FIRST_PAUSE_S, cap_s=LONGEST_PAUSE_S)
        self._failures += 1
        return self._rng.uniform(0.0, bound_s)

    def reset(self) -> None:
        """Begins anew, after a success."""
        self._failures = 0
