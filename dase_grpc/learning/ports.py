"""What a learner is connected to: where transitions go, where batches come from, where results are written.

The networked learner node and lockstep differ in these alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

from dase_grpc.learning.agents.agent import Policy
from dase_grpc.learning.envs.explorer import require_finite_action
from dase_grpc.learning.training.state import Saved
from dase_grpc.schema import Array


class Halted(Exception):
    """The driver closed the sink or the source: training shall end."""


class TransitionSink(Protocol):
    """Where an agent's transitions go."""

    def store(self, row: Array) -> None:
        """Takes one (width,) packed transition; may block.

        Raises:
            Halted: training shall end.
        """
        ...


class BatchSource(Protocol):
    """Where batches come from."""

    def next(self) -> tuple[Array, int] | None:
        """A (B, width) batch, read-only, and the number of transitions in the buffer; may block.

        None where the buffer holds too little and waiting would not change that: the update is left out.

        Raises:
            Halted: training shall end.
        """
        ...


@dataclass(frozen=True)
class Origin:
    """From where an agent's environment steps are counted: the buffer, and how many it had stored by then."""

    buffer_id: str
    collected: int


class ActorSteps(Protocol):
    """The environment steps that an agent's actors collect.

    Attributes:
        origin: from where they are counted; another one where the buffer was lost.
    """

    @property
    def origin(self) -> Origin:
        """From where they are counted now."""
        ...

    def reach(self, steps: int) -> int:
        """How many there are since the origin; waits a moment where there are fewer than `steps`.

        Raises:
            Halted: training shall end.
        """
        ...


class Journal(Protocol):
    """Where results are written."""

    def evaluation(
        self, *, step: int, return_mean: float, return_std: float, episodes: int, wall_seconds: float
    ) -> None:
        """Notes one evaluation."""
        ...

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Notes one line of metrics."""
        ...

    def checkpoint(self, *, step: int, saved: Saved, scores: Mapping[str, Any]) -> None:
        """Keeps the learner's state."""
        ...


@dataclass(frozen=True)
class StoppablePolicy:
    """A policy that raises Halted once `halt` is set, so that no evaluation outlives its run."""

    policy: Policy
    halt: Event
    name: str

    def act(self, observation: Array) -> Array:
        """The policy's actions.

        Raises:
            Halted: training shall end.
            DivergedError: an action is not finite.
        """
        if self.halt.is_set():
            raise Halted
        actions = self.policy.act(observation)
        require_finite_action(actions, of=self.name)
        return actions
