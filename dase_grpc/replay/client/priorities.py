"""Priorities at the client: how a batch was drawn by them, and the TD errors that go back."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from dase_grpc.replay.buffer.priorities import Side
from dase_grpc.replay.buffer.sampling import Sampling
from dase_grpc.replay.buffer.shares import OTHERS, OWN
from dase_grpc.replay.wire.packed import ROWS_BYTES
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.schema import Array

Told = deque[replay_pb2.Priorities]
"""TD errors on their way to one service: compute threads add, the event loop takes."""


@dataclass(frozen=True)
class Drawing:
    """How a batch was drawn by priorities.

    Attributes:
        numbers: of its transitions at the service, (B,) int64.
        probabilities: of one draw from the side that each was drawn from, (B,) float32.
        sides: how many transitions were present and their masses' sum: of all, or of the agent's own and of
            all others'.
        incarnation: of the service, to which the numbers mean something.
        largest: the agent's largest mass so far.
        ignored: how many priorities the agent has told in vain.
    """

    numbers: npt.NDArray[np.int64]
    probabilities: Array
    sides: tuple[Side, ...]
    incarnation: str
    largest: float
    ignored: int

    @classmethod
    def read(cls, told: replay_pb2.Drawing) -> Self:
        """What a frame says."""
        whole = len(told.numbers) // 8 * 8, len(told.probabilities) // 4 * 4
        return cls(
            np.frombuffer(told.numbers[: whole[0]], "<i8"),
            np.frombuffer(told.probabilities[: whole[1]], "<f4"),
            tuple(map(Side, told.present, told.masses)),
            told.incarnation,
            told.largest_mass,
            told.ignored,
        )

    def fits(self, rows: int, sides: int) -> bool:
        """Whether it says something of so many rows and sides."""
        return len(self.numbers) == len(self.probabilities) == rows and len(self.sides) == sides

    def part(self, which: slice) -> Self:
        """That of these rows alone."""
        return replace(self, numbers=self.numbers[which], probabilities=self.probabilities[which])

    def likelihood(self, own: npt.NDArray[np.bool_], scales: Sequence[float] | None = None) -> Array:
        """How many times as likely as by uniform draws from its side each transition was, (B,) float32.

        Args:
            own: which of them, (B,), are the agent's own.
            scales: how many transitions each side has, times the probability that this service was drawn
                from; None where it is alone, 0 of a side that was thought to be empty.
        """
        present = [side.present for side in self.sides]
        each = (
            present
            if scales is None
            else [scale or here for scale, here in zip(scales, present, strict=True)]
        )
        if len(each) == 1:
            return self.probabilities * np.float32(each[0])
        return self.probabilities * np.where(own, each[OWN], each[OTHERS]).astype(np.float32)

    def message(self, errors: Array) -> replay_pb2.Priorities:
        """What tells the service the TD errors, (B,), of the transitions."""
        return replay_pb2.Priorities(
            incarnation=self.incarnation,
            numbers=self.numbers.tobytes(),
            errors=errors.astype("<f4").tobytes(),
        )


@dataclass(frozen=True)
class Prioritised:
    """What a learner knows of a batch that was drawn by priorities.

    Attributes:
        likelihood: how many times as likely as by uniform draws each transition was drawn, (B,) float32.
        largest, mean: of the agent's masses.
        ignored: how many priorities the agent has told in vain.
    """

    likelihood: Array
    largest: float
    mean: float
    ignored: int
    _parts: tuple[tuple[Drawing, Told], ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[Drawing, Told]], likelihood: Array, *, ignored: int) -> Self:
        """Of a batch put together from these, in their order."""
        sides = [side for drawing, _ in parts for side in drawing.sides]
        return cls(
            likelihood,
            max(drawing.largest for drawing, _ in parts),
            sum(side.mass for side in sides) / sum(side.present for side in sides),
            ignored,
            tuple(parts),
        )

    def tell(self, errors: Array) -> None:
        """Gives the TD errors of the transitions, (B,) float32, back; never blocks."""
        start = 0
        for drawing, told in self._parts:
            end = start + len(drawing.numbers)
            told.append(drawing.message(errors[start:end]))
            start = end


def taken(told: Told) -> Iterator[list[replay_pb2.Priorities]]:
    """Takes what is there, in portions for one request each, of about `ROWS_BYTES` at most."""
    while told:
        portion = [told.popleft()]
        size = len(portion[0].numbers)
        while told and size + len(told[0].numbers) <= ROWS_BYTES // 2:  # errors take half as much again
            size += len(told[0].numbers)
            portion.append(told.popleft())
        yield portion


def prioritisation_message(sampling: Sampling) -> replay_pb2.Prioritisation | None:
    """What a Sample stream states of priorities; None where it has none."""
    how = sampling.prioritisation
    if how is None:
        return None
    return replay_pb2.Prioritisation(alpha=how.alpha, epsilon=how.epsilon, uniform_share=how.uniform)
