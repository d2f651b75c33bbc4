"""Rewinding an agent's files to a checkpoint of the same run; nothing is lost.

The rest of the interrupted run would be written a second time otherwise. What is put aside lies in
agents/<i>/before-resume-<n>.
"""

import codecs
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import ConfigError
from dase_grpc.runs.checkpoint import Checkpoint
from dase_grpc.runs.directory import AgentDirectory, changed_settings, checkpoint_path, checkpoint_paths
from dase_grpc.runs.files import disk_refusal, replace_file
from dase_grpc.runs.logs import COLUMNS, evaluation_row, metrics_record

ASIDE: Final = "before-resume"

MAY_DIFFER: Final = frozenset(
    {"train.steps", "metrics.port", "replay.storage", "replay.in_place", "env.max_restarts", "env.timeout_s"}
)


@dataclass(frozen=True)
class Rewound:
    """What became of an agent's files.

    Attributes:
        elapsed_s: the training time until the checkpoint, as far as its files tell.
        aside: where what was written after it lies now; None if there was nothing.
        lines, checkpoints: how much that is.
        damaged: how many of the lines are damaged, so that nobody knows from when they are.
    """

    elapsed_s: float
    aside: Path | None
    lines: int
    checkpoints: int
    damaged: int

    @property
    def counted(self) -> str:
        """How much was put aside, in words."""
        damaged = f"{self.damaged} of them damaged, " if self.damaged else ""
        return f"lines: {self.lines}, {damaged}checkpoints: {self.checkpoints}"


def rewind(agent: AgentDirectory, checkpoint: Checkpoint | None, *, evaluations: bool = True) -> Rewound:
    """Takes evaluations.csv, metrics.jsonl and the checkpoints back to `checkpoint`, or to nothing.

    A line that a run without the break would not have written at that step, as the last evaluation of one
    that ended there, goes too, and so does a damaged line. Doing it again changes nothing.

    Without `evaluations`, evaluations.csv is another's and stays as it is.
    """
    evaluated, logged, step = -1, -1, -1
    if checkpoint is not None:
        counters = checkpoint.training["counters"]
        evaluated, logged, step = counters["evaluated"], counters["logged"], checkpoint.step
    aside = _free_folder(agent)
    try:
        path = agent.evaluations.path
        rows = _Lines.read(path, _row, head=",".join(COLUMNS)) if evaluations else _Lines(path, "", ())
        records = _Lines.read(agent.metrics.path, _record)
        elapsed_s = max(rows.seconds_until(step), records.seconds_until(step))
        lines = rows.cut(last=evaluated, aside=aside) + records.cut(last=logged, aside=aside)
        moved = _move_later(agent.checkpoints, aside, step=step)
    except OSError as error:
        raise disk_refusal(f"cannot rewind {agent.path}, of which nothing is lost", error) from None
    return Rewound(elapsed_s, aside if lines or moved else None, lines, moved, rows.damaged + records.damaged)


@dataclass(frozen=True)
class _Lines:
    """The finished lines of a file with the step and wall_seconds of each; None for a damaged one."""

    path: Path
    head: str
    lines: tuple[tuple[str, tuple[int, float] | None], ...]

    @classmethod
    def read(cls, path: Path, parse: Callable[[str], tuple[int, float]], *, head: str = "") -> Self:
        data = (path.read_bytes() if path.is_file() else b"").removeprefix(codecs.BOM_UTF8)
        texts = data[: data.rfind(b"\n") + 1].decode(errors="surrogateescape").split("\n")[:-1]
        if head and texts[:1] in ([head], [f"{head}\r"]):  # a spreadsheet's line end
            texts = texts[1:]
        return cls(path, head, tuple((text, _parsed(parse, text)) for text in texts))

    @property
    def damaged(self) -> int:
        return sum(found is None for _, found in self.lines)

    def seconds_until(self, step: int) -> float:
        return max([0.0, *(found[1] for _, found in self.lines if found is not None and found[0] <= step)])

    def cut(self, *, last: int, aside: Path) -> int:
        """Moves the lines after step `last`, and damaged ones, into `aside`; returns how many."""
        kept = [text for text, found in self.lines if found is not None and found[0] <= last]
        later = [text for text, found in self.lines if found is None or found[0] > last]
        if later:
            aside.mkdir(exist_ok=True)
            replace_file(aside / self.path.name, self._data(later))
            replace_file(self.path, self._data(kept))
        return len(later)

    def _data(self, texts: Sequence[str]) -> bytes:
        lines = [self.head, *texts] if self.head else texts
        return "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")


def _parsed(parse: Callable[[str], tuple[int, float]], text: str) -> tuple[int, float] | None:
    try:
        return parse(text)
    except (ValueError, KeyError, TypeError):
        return None


def _row(line: str) -> tuple[int, float]:
    row = evaluation_row(line)
    return row["step"], row["wall_seconds"]


def _record(line: str) -> tuple[int, float]:
    record = metrics_record(line)
    return record["step"], float(record["wall_seconds"])


def _move_later(folder: Path, aside: Path, *, step: int) -> int:
    later = {kept: path for kept, path in checkpoint_paths(folder).items() if kept > step}
    for kept, path in later.items():
        (aside / folder.name).mkdir(parents=True, exist_ok=True)
        shutil.move(path, checkpoint_path(aside / folder.name, kept))
    return len(later)


def _free_folder(agent: AgentDirectory) -> Path:
    taken = {path.name for path in agent.path.glob(f"{ASIDE}-*")}
    number = next(each for each in range(1, len(taken) + 2) if f"{ASIDE}-{each}" not in taken)
    return agent.path / f"{ASIDE}-{number}"


def require_same_settings(before: RunConfig, now: RunConfig, *, of: str) -> None:
    """Checks that a run goes on with the settings of a checkpoint; `of` says whose they were.

    Raises:
        ConfigError: naming every setting that differs and may not, with both values.
    """
    changed = (each for each in changed_settings(before, now) if each[0] not in MAY_DIFFER)
    found = [f"{key}: {old!r} then, {new!r} now" for key, old, new in changed]
    if found:
        raise ConfigError(
            f"{of} learned with other settings ({'; '.join(found)}); a resumed run keeps its settings, so "
            f"put them back, or start a new run"
        )


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """What decides numbers and is of another version now, in one sentence; None where nothing is."""
    names = [name for name in before if before[name] != now.get(name)]
    if not names:
        return None
    found = ", ".join(f"{name} {before[name]} then, {now.get(name, 'none')} now" for name in names)
    return f"the run began with other versions ({found}), so it will not go on to the same last bit"
