"""Takes an agent's files back to a checkpoint: what was written after it is put aside, never lost.

The rest of the interrupted run would be written a second time otherwise. What is put aside lies in
agents/<i>/before-resume-<n>.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.checkpoint import Checkpoint
from dase_grpc.runs.directory import AgentDirectory, checkpoint_paths
from dase_grpc.runs.evaluations import read_evaluations
from dase_grpc.runs.files import replace_file, whole_lines
from dase_grpc.runs.metrics_log import read_metrics

ASIDE: Final = "before-resume"


@dataclass(frozen=True)
class Rewound:
    """What became of an agent's files.

    Attributes:
        elapsed_s: the training time until the checkpoint, as far as its files tell.
        aside: where what was written after it lies now; None if there was nothing.
        lines, checkpoints: how much that is.
    """

    elapsed_s: float
    aside: Path | None
    lines: int
    checkpoints: int


def rewind(agent: AgentDirectory, checkpoint: Checkpoint | None) -> Rewound:
    """Takes evaluations.csv, metrics.jsonl and the checkpoints back to `checkpoint`, or to nothing.

    A line that a run without the break would not have written at that step, the last evaluation of one
    that ended there, goes too. Doing it again changes nothing.

    Raises:
        RunDirectoryError: a file is damaged, or the disk refuses.
    """
    evaluated, logged, step, elapsed_s = -1, -1, -1, 0.0
    curve, records = read_evaluations(agent.evaluations.path), read_metrics(agent.metrics.path)
    if checkpoint is not None:
        counters = checkpoint.training["counters"]
        evaluated, logged, step = counters["evaluated"], counters["logged"], checkpoint.step
        times = [float(each["wall_seconds"]) for each in records if each["step"] <= step]
        elapsed_s = max([0.0, *curve.wall_seconds[curve.step <= step].tolist(), *times])
    aside = _free_folder(agent)
    try:
        lines = _cut(agent.evaluations.path, aside, _step_of_row, last=evaluated, head=1)
        lines += _cut(agent.metrics.path, aside, _step_of_record, last=logged)
        moved = _move_later(agent.checkpoints, aside, step=step)
    except OSError as error:
        raise RunDirectoryError(f"cannot rewind {agent.path}: {error.strerror or error}") from None
    return Rewound(elapsed_s, aside if lines or moved else None, lines, moved)


def _cut(path: Path, aside: Path, step_of: Callable[[str], int], *, last: int, head: int = 0) -> int:
    """Moves the lines after step `last` into `aside`, which has the same head; returns how many."""
    lines = whole_lines(path)
    first, rest = lines[:head], lines[head:]
    later = [line for line in rest if step_of(line) > last]
    if later:
        aside.mkdir(exist_ok=True)
        replace_file(aside / path.name, _text([*first, *later]))
        replace_file(path, _text([*first, *(line for line in rest if step_of(line) <= last)]))
    return len(later)


def _move_later(folder: Path, aside: Path, *, step: int) -> int:
    later = [path for kept, path in checkpoint_paths(folder).items() if kept > step]
    for path in later:
        (aside / folder.name).mkdir(parents=True, exist_ok=True)
        shutil.move(path, aside / folder.name / path.name)
    return len(later)


def _free_folder(agent: AgentDirectory) -> Path:
    taken = {path.name for path in agent.path.glob(f"{ASIDE}-*")}
    number = next(each for each in range(1, len(taken) + 2) if f"{ASIDE}-{each}" not in taken)
    return agent.path / f"{ASIDE}-{number}"


def _step_of_row(line: str) -> int:
    return int(line.partition(",")[0])


def _step_of_record(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except ValueError:  # only the last line may be damaged: read_metrics has looked at the others
        return 2**63


def _text(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
