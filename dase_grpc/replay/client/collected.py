"""The environment steps that a learner's actors collect, as it sees them, and the pace it asks for."""

import threading
from collections.abc import Callable
from typing import Final

from dase_grpc.config.sections import TrainConfig
from dase_grpc.errors import Halted
from dase_grpc.pace import Origin, Pace
from dase_grpc.replay.client.connection import Connection
from dase_grpc.replay.client.handoff import Waited
from dase_grpc.replay.client.sample import Pacing

LOOK_S: Final = 0.1
"""How long `reach` waits at most, so that a learner without steps still publishes its policy."""


class CollectedSteps:
    """ActorSteps (learning/training/parts.py) as the replay counts them, and what its Sample streams state.

    `reach` belongs to the compute thread; everything else belongs to the event loop, but for `origin`, from
    where the steps are counted. `used` batches were taken by updates since.

    Attributes:
        missing: since when the compute thread has been without a new step that it needs.
        on_wait: called on that thread whenever it waits for steps.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        train: TrainConfig,
        first_steps: int,
        origin: Origin | None = None,
        used: int = 0,
    ) -> None:
        self._connection = connection
        self._train = train
        self._first_steps = first_steps
        self._used_before = used
        self._taken_before = 0
        self._closed = threading.Event()
        self.missing = Waited(connection.timing)
        self._reached = 0
        self.on_wait: Callable[[], None] = lambda: None
        self.origin = self._here() if origin is None else origin

    @property
    def collected(self) -> int:
        """Environment steps since the origin, as the replay said last."""
        return max(0, self._here().collected - self.origin.collected)

    def begin_anew(self, taken: int) -> None:
        """Counts from now on, the buffer having been lost; `taken` batches were taken by this process."""
        self.origin = self._here()
        self._used_before, self._taken_before = 0, taken

    def reach(self, steps: int) -> int:
        """See ActorSteps."""
        if self.collected < steps:
            self.missing.begin()
            self.on_wait()
            if self._closed.wait(LOOK_S):
                raise Halted
        collected = self.collected
        if collected > self._reached:
            self.missing.end()
        self._reached = collected
        return collected

    @property
    def waiting(self) -> bool:
        """Whether the compute thread is without steps it needs."""
        return self.missing.since is not None

    def close(self) -> None:
        """Ends the waits of the compute thread, for good."""
        self._closed.set()

    def pacing(self, taken: int, held: int) -> Pacing:
        """What a Sample stream states that begins when so many batches were taken, and so many are held."""
        train = self._train
        pace = Pace(
            train.updates_per_step,
            train.step_error_buffer,
            first_steps=self._first_steps,
            collected_before=self.origin.collected,
        )
        return Pacing(pace, self._used_before + taken - self._taken_before, held)

    def _here(self) -> Origin:
        member = self._connection.target.member
        inserted = self._connection.inserted_of(member.agent_id)
        return Origin(member.buffer_id, inserted)
