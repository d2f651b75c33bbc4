"""Sampling: which transitions an agent's batches are drawn from, and how."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from dase_grpc.config.resolve import RunConfig
from dase_grpc.replay.buffer.priorities import Drawn, Priorities, Prioritisation
from dase_grpc.replay.buffer.ring import Numbers, RingBuffer
from dase_grpc.replay.buffer.shares import OwnShare
from dase_grpc.replay.buffer.store import ReplayStore
from dase_grpc.schema import Array


@dataclass(frozen=True)
class Sampling:
    """How the batches of an agent are drawn: uniformly from the whole buffer, unless this says otherwise.

    Attributes:
        own_rows_only: from what the agent collected itself, and nothing else.
        own_share: this share of each batch from what it collected itself, the rest from all others';
            where one side is empty the other fills in. None draws from all alike.
        prioritisation: in proportion to the agent's priorities; None draws uniformly.
    """

    own_rows_only: bool = False
    own_share: float | None = None
    prioritisation: Prioritisation | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """How a run's agents draw."""
        if not config.shares_experience:
            return cls(own_rows_only=True)
        share, chosen = config.replay.own_share, config.priorities
        weighed = Prioritisation(chosen.alpha, chosen.epsilon, chosen.uniform_share)
        return cls(
            own_share=None if share == "uniform" else share,
            prioritisation=weighed if config.replay.sampling == "prioritised" else None,
        )


UNIFORM = Sampling()


class Source:
    """What one agent draws its batches from; single-threaded, nothing blocks."""

    def __init__(self, store: ReplayStore, agent_id: int, sampling: Sampling = UNIFORM) -> None:
        self._ring, self._traffic = store.ring, store.traffic
        self._agent_id, self._own_rows_only = agent_id, sampling.own_rows_only
        share = sampling.own_share
        self.priorities = store.priorities_of(agent_id, sampling.prioritisation, own_share=share)
        self._chosen: OwnShare | Priorities | None = self.priorities
        if self._chosen is None and share is not None:
            self._chosen = OwnShare(store.ring, agent_id, share)
        self._has_sides = share is not None

    @property
    def present(self) -> int:
        """Transitions that a batch can be drawn from now."""
        return self._ring.count_of(self._agent_id) if self._own_rows_only else len(self._ring)

    @property
    def told(self) -> int:
        """How many transitions a client is told of: those it is drawn from; with an own share, its own."""
        return self._ring.count_of(self._agent_id) if self._has_sides else self.present

    def shortage(self, min_size: int) -> str | None:
        """See `shortage`, for the agent."""
        return shortage(self._ring, min_size, agent_id=self._agent_id, own_rows_only=self._own_rows_only)

    def draw(
        self,
        batch_size: int,
        rng: np.random.Generator,
        *,
        batches: int = 1,
        own: int | None = None,
        out: Array | None = None,
    ) -> tuple[Array, Drawn | None]:
        """Draws batches with replacement, one after the other: (batches · batch_size, width), new or `out`.

        With priorities it says how. With an own share `own` says how many of each are the agent's own, else
        that is drawn. An IndexError where there is nothing to draw from.
        """
        count, drawn = batches * batch_size, None
        if isinstance(self._chosen, Priorities):
            drawn = self._chosen.draw(batches, batch_size, rng, own=own)
            rows = self._ring.rows_at(drawn.slots, out=out)
        elif self._chosen is not None:
            rows = self._ring.rows_at(self._chosen.draw(batches, batch_size, rng, own=own), out=out)
        elif self._own_rows_only:
            rows = self._ring.sample_of(self._agent_id, count, rng, out=out)
        else:
            rows = self._ring.sample(count, rng, out=out)
        self._traffic.count_sampled(self._agent_id, self._ring.schema.agent_ids(rows))
        return rows, drawn

    def draw_numbers(
        self, batch_size: int, rng: np.random.Generator, *, batches: int = 1, own: int | None = None
    ) -> tuple[Numbers, Drawn | None]:
        """Draws what `draw` does, but gives the numbers of the transitions instead of their rows."""
        ring, count, drawn = self._ring, batches * batch_size, None
        if isinstance(self._chosen, Priorities):
            drawn = self._chosen.draw(batches, batch_size, rng, own=own)
            numbers = drawn.numbers
        elif self._chosen is not None:
            numbers = ring.numbers_at(self._chosen.draw(batches, batch_size, rng, own=own))
        else:
            oldest = ring.total - len(ring)
            own_only = self._own_rows_only
            numbers = oldest + (
                ring.draw_of(self._agent_id, count, rng) if own_only else ring.draw(count, rng)
            )
        self._traffic.count_sampled(self._agent_id, ring.ids_at(numbers))
        return numbers, drawn


def shortage(ring: RingBuffer, min_size: int, *, agent_id: int, own_rows_only: bool) -> str | None:
    """What a batch for an agent has to wait for, in a few words; None if it can be drawn.

    Batches are drawn once `min_size` transitions of whichever agents are present, and one of the agent's own
    where they hold nothing else.
    """
    size = len(ring)
    if size < min_size:
        return f"{min_size - size} more transitions ({size} of {min_size})"
    if own_rows_only and not ring.count_of(agent_id):
        return f"a transition of agent {agent_id} ({size} of others are present)"
    return None
