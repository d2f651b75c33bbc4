"""In what proportion an agent's updates and the environment steps of its actors are kept."""

import math
from dataclasses import dataclass
from fractions import Fraction

from dase_grpc.errors import MalformedError


@dataclass(frozen=True)
class Pace:
    """How many updates an agent makes for each environment step that its actors collect.

    Attributes:
        updates_per_step: what is kept.
        step_error_buffer: how many environment steps the actors may be ahead of the updates.
        first_steps: how many are collected before the first update; it follows the last of these.
        collected_before: transitions of the agent that do not count, for they were there before.

    Raises:
        MalformedError: the numbers make no sense, or steps and updates could wait for each other.
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
