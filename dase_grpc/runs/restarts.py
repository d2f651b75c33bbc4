"""restarts.jsonl: which nodes of a local cluster failed and were started again, one JSON object per line."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dase_grpc.config.texts import json_value
from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.files import append_line, whole_lines


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
    """Adds a line.

    Raises:
        RunDirectoryError: the disk refuses.
    """
    append_line(path, json.dumps(asdict(restart), separators=(",", ":")))


def read_restarts(path: Path) -> list[Restart]:
    """All failures in order; a missing file has none, a damaged last line is left out.

    Raises:
        RunDirectoryError: a line before the last is damaged; names it.
    """
    lines, found = whole_lines(path), []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_parsed(line))
        except (ValueError, TypeError):
            if number < len(lines):
                raise RunDirectoryError(f"{path} is damaged: line {number} is no restart of a node") from None
    return found


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


def _parsed(line: str) -> Restart:
    value = json_value(line)
    if not isinstance(value, dict):
        raise TypeError("not an object")
    restart = Restart(**value)
    numbers = (restart.from_step, restart.pause_s)
    if not all(isinstance(each, str) for each in (restart.time, restart.node, restart.why)):
        raise TypeError("not a text")
    if not all(each is None or isinstance(each, (int, float)) for each in numbers):
        raise TypeError("not a number")
    return restart
