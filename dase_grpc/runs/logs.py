"""evaluations.csv, metrics.jsonl, restarts.jsonl and scores.jsonl: the logs of a run, one line per event."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from dase_grpc.config.texts import could_be_agent_id, json_value
from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.files import append_line, whole_lines

MAX_COUNT: Final = 2**53
"""Steps and episodes are below it, so that float64 holds each of them exactly."""

COLUMNS: Final = ("step", "return_mean", "return_std", "episodes", "wall_seconds")

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_BY_REASON: Final = ("refused", "env_restarts")
_BY_SOURCE: Final = ("similarity", "divergence_covariance_by_source", "divergence_mean_by_source")
_TABLES: Final = (*_BY_REASON, *_BY_SOURCE)
_T = TypeVar("_T")


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


class EvaluationRow(TypedDict):
    """One row of evaluations.csv."""

    step: int
    return_mean: float
    return_std: float
    episodes: int
    wall_seconds: float


@dataclass(frozen=True)
class EvaluationsFile:
    """Appends evaluations to a CSV file; opens it for each row, so a restart simply goes on.

    One writer per file. Floats are written so that reading gives the same number back, and
    wall_seconds is the only column that differs between two identical runs.
    """

    path: Path

    def append(self, **row: Unpack[EvaluationRow]) -> None:
        """Adds one row, visible to readers as a whole or not at all."""
        step, episodes = int(row["step"]), int(row["episodes"])
        mean, std = float(row["return_mean"]), float(row["return_std"])
        line = f"{step},{mean!r},{std!r},{episodes},{row['wall_seconds']:.3f}"
        append_line(self.path, line, header=",".join(COLUMNS))


def read_evaluations(path: Path) -> Evaluations:
    """Reads evaluations.csv; a missing file has no rows, an unfinished last line is left out."""
    lines = whole_lines(path)
    if lines and lines[0] != ",".join(COLUMNS):
        raise RunDirectoryError(f"{path} is damaged: its first line is not {','.join(COLUMNS)!r}")
    rows = [_sound_row(path, number, line) for number, line in enumerate(lines[1:], start=2)]
    table = np.array(rows, np.float64).reshape(-1, len(COLUMNS))
    return Evaluations(
        step=table[:, 0].astype(np.int64),
        return_mean=table[:, 1],
        return_std=table[:, 2],
        episodes=table[:, 3].astype(np.int64),
        wall_seconds=table[:, 4],
    )


def evaluation_row(line: str) -> EvaluationRow:
    """What a line of evaluations.csv stands for; a ValueError where it is none that `append` writes."""
    step, mean, std, episodes, wall = line.split(",")
    counts, seconds = (int(step), int(episodes)), float(wall)
    if not all(map(_is_count, counts)) or not 0 <= seconds < math.inf:
        raise ValueError("a count or a time that there is not")
    return EvaluationRow(
        step=counts[0],
        return_mean=float(mean),
        return_std=float(std),
        episodes=counts[1],
        wall_seconds=seconds,
    )


def _sound_row(path: Path, number: int, line: str) -> tuple[Any, ...]:
    try:
        return tuple(evaluation_row(line).values())
    except ValueError:
        raise RunDirectoryError(f"{path} is damaged: line {number} is not {len(COLUMNS)} numbers") from None


@dataclass(frozen=True)
class MetricsLog:
    """Appends records to a JSON-lines file; opens it for each record, so a restart simply goes on.

    One writer per file. JSON has no NaN and no infinity: both are written as null.
    """

    path: Path

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one record: numbers, None, and mappings of them; a TypeError for what JSON cannot hold."""
        append_line(self.path, json.dumps(_plain(record), separators=(",", ":"), allow_nan=False))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records in order; a missing file has none, a damaged last line is left out, another is refused."""
    return _parsed(path, metrics_record, "no record of numbers")


def _parsed(path: Path, parse: Callable[[str], _T], is_not: str) -> list[_T]:
    """What each line of a JSON-lines file stands for; the refusal names the line."""
    lines, found = whole_lines(path), []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(parse(line))
        except (ValueError, TypeError):
            if number < len(lines):
                raise RunDirectoryError(f"{path} is damaged: line {number} is {is_not}") from None
    return found


def metrics_record(line: str) -> dict[str, Any]:
    """What a line of metrics.jsonl stands for; a ValueError or TypeError where it is no learner's."""
    value = json_value(line)
    if not isinstance(value, dict) or not _is_count(value.get("step")):
        raise TypeError("no record of a step")
    if not all(map(_fits, value, value.values())):
        raise TypeError("not of numbers")
    return value


def _fits(key: str, value: Any) -> bool:
    """Whether a value is what a learner writes: a number, or a table of numbers where it is known as one."""
    if value is None:
        return True
    if key not in _TABLES:
        return _is_number(value) and (key != "wall_seconds" or value >= 0)
    if not isinstance(value, dict):
        return False
    if key in _BY_REASON:
        return all(map(_is_count, value.values()))
    return all(map(could_be_agent_id, value)) and all(
        each is None or _is_number(each) for each in value.values()
    )


def _is_number(value: Any) -> bool:
    """Whether it is one that float64 holds."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return known and bool(abs(value) < sys.float_info.max)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return value


@dataclass(frozen=True)
class Restart:
    """One failure of a node.

    Attributes:
        time: when, in UTC.
        node: which, as `learner-1` or `replay`.
        why: how its process ended.
        from_step: the checkpoint that a learner goes on from, 0 without any; None for the replay.
        pause_s: seconds until it is started again; None where it is given up.
    """

    time: str
    node: str
    why: str
    from_step: int | None
    pause_s: float | None

    @property
    def given_up(self) -> bool:
        """Whether the node is not started again."""
        return self.pause_s is None


def append_restart(path: Path, restart: Restart) -> None:
    """Adds a line."""
    append_line(path, json.dumps(asdict(restart), separators=(",", ":")))


def read_restarts(path: Path) -> list[Restart]:
    """All failures in order; as `read_metrics` takes damage."""
    return _parsed(path, _restart, "no restart of a node")


def told(restarts: Sequence[Restart]) -> dict[str, str]:
    """How often each node was started again and why, in a sentence without its subject."""
    sentences = {}
    for node in dict.fromkeys(each.node for each in restarts):
        failures = [each for each in restarts if each.node == node]
        again = sum(not each.given_up for each in failures)
        reasons = "; ".join(dict.fromkeys(each.why for each in failures))
        times = "once" if again == 1 else f"{again} times"
        given_up = "given up" if failures[-1].given_up else ""
        started = f"started again {times}" if again else ""
        sentences[node] = f"{' and then '.join(filter(None, (started, given_up)))} ({reasons})"
    return sentences


def _restart(line: str) -> Restart:
    restart = Restart(**json_value(line))
    numbers = (restart.from_step, restart.pause_s)
    if not all(isinstance(each, str) for each in (restart.time, restart.node, restart.why)):
        raise TypeError("not a text")
    if not all(each is None or _is_number(each) for each in numbers):
        raise TypeError("not a number")
    return restart


@dataclass(frozen=True)
class Score:
    """One line of scores.jsonl: an evaluation of a policy that came out of the run, by `dase evaluate`.

    policy is "best" or "ensemble"; agent the agent's id, None for all together; step the environment steps of
    the agent that was least far; seed that of the first episode.
    """

    policy: str
    agent: int | None
    step: int
    seed: int
    episodes: int
    return_mean: float
    return_std: float


def append_score(path: Path, score: Score) -> None:
    """Adds a line."""
    append_line(path, json.dumps(asdict(score)))


def read_scores(path: Path) -> list[Score]:
    """All scores in order; as `read_metrics` takes damage."""
    return _parsed(path, _score, "no score of a policy")


def _score(line: str) -> Score:
    score = Score(**json_value(line))
    counts = (score.step, score.episodes, 0 if score.agent is None else score.agent)
    numbers = (score.seed, score.return_mean, score.return_std)
    if not isinstance(score.policy, str) or not all(map(_is_count, counts)):
        raise TypeError("a field of another kind")
    if not all(map(_is_number, numbers)):
        raise TypeError("not a number")
    return score
