"""evaluations.csv: one row per evaluation of one agent."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.files import append_line, whole_lines

MAX_COUNT: Final = 2**53
"""Steps and episodes are below it, so that float64 holds each of them exactly."""

COLUMNS: Final = ("step", "return_mean", "return_std", "episodes", "wall_seconds")

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Evaluations:
    """The columns of evaluations.csv, each (N,), in the order they were written."""

    step: Ints
    return_mean: Floats
    return_std: Floats
    episodes: Ints
    wall_seconds: Floats

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class EvaluationsFile:
    """Appends evaluations to a CSV file; opens it for each row, so a restart simply goes on.

    One writer per file. Floats are written so that reading gives the same number back, and
    wall_seconds is the only column that differs between two identical runs.
    """

    path: Path

    def append(
        self, *, step: int, return_mean: float, return_std: float, episodes: int, wall_seconds: float
    ) -> None:
        """Adds one row, visible to readers as a whole or not at all."""
        values = (
            str(int(step)),
            repr(float(return_mean)),
            repr(float(return_std)),
            str(int(episodes)),
            f"{wall_seconds:.3f}",
        )
        append_line(self.path, ",".join(values), header=",".join(COLUMNS))


def read_evaluations(path: Path) -> Evaluations:
    """Reads evaluations.csv; a missing file has no rows, an unfinished last line is left out.

    Raises:
        RunDirectoryError: it cannot be read, has another header, or a row that is not five numbers;
            names the line.
    """
    lines = whole_lines(path)
    if lines and lines[0] != ",".join(COLUMNS):
        raise RunDirectoryError(f"{path} is damaged: its first line is not {','.join(COLUMNS)!r}")
    rows = [_row(path, number, line) for number, line in enumerate(lines[1:], start=2)]
    table = np.array(rows, np.float64).reshape(-1, len(COLUMNS))
    return Evaluations(
        step=table[:, 0].astype(np.int64),
        return_mean=table[:, 1],
        return_std=table[:, 2],
        episodes=table[:, 3].astype(np.int64),
        wall_seconds=table[:, 4],
    )


def _row(path: Path, number: int, line: str) -> tuple[float, ...]:
    try:
        step, mean, std, episodes, wall = line.split(",")
        counts = int(step), int(episodes)
        if not all(0 <= count < MAX_COUNT for count in counts):
            raise ValueError
        return counts[0], float(mean), float(std), counts[1], float(wall)
    except ValueError:
        raise RunDirectoryError(f"{path} is damaged: line {number} is not {len(COLUMNS)} numbers") from None
