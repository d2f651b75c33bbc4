"""Keeps an agent's updates and the environment steps of its actors in proportion: samples per insert.

An update counts when it has taken its batch, not when the batch was drawn ahead for it. Whichever of the two
sides is ahead waits for the other; only settings with which both might wait at once are refused.
"""

import math

from dase_grpc.errors import MalformedError
from dase_grpc.pace import Pace


class StepLimiter:
    """Says how many transitions may be stored, and whether a batch may be sent, for one agent.

    Plain counting, which nothing blocks. `collected` are the transitions of the agent that were stored ever.

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

    def allowed(self, collected: int) -> int:
        """How many updates these environment steps are enough for."""
        steps = self._counted(collected) - (self.pace.first_steps - 1)
        return max(0, math.floor(self._ratio * steps))

    def may_draw(self, collected: int) -> bool:
        """Whether one more batch may be drawn: if all that are drawn get used, updates are not ahead."""
        return not self.missing(collected)

    def missing(self, collected: int) -> int:
        """How many more environment steps the next batch takes."""
        enough = self.pace.first_steps - 1 + math.ceil((self.drawn + 1) / self._ratio)
        return max(0, enough - self._counted(collected))

    def draw(self) -> None:
        """Notes that a batch was sent."""
        self.drawn += 1

    def charge(self, batches: int) -> None:
        """Notes that updates have taken batches.

        Raises:
            MalformedError: more than were sent.
        """
        if not 0 <= batches <= self.drawn - self.used:
            raise MalformedError(
                f"updates cannot have taken {batches} batches of the {self.drawn - self.used} that were sent"
            )
        self.used += batches

    def _counted(self, collected: int) -> int:
        return max(0, collected - self.pace.collected_before)
