"""metrics.jsonl: what one agent's training looked like, one JSON object per line."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.files import append_line, whole_lines


@dataclass(frozen=True)
class MetricsLog:
    """Appends records to a JSON-lines file; opens it for each record, so a restart simply goes on.

    One writer per file. JSON has no NaN and no infinity: both are written as null.
    """

    path: Path

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one record of numbers, texts, None, and mappings or lists of them.

        Raises:
            TypeError: a value that JSON cannot hold.
        """
        append_line(self.path, json.dumps(_plain(record), separators=(",", ":"), allow_nan=False))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records in order; a missing file has none, a damaged last line is left out.

    Raises:
        RunDirectoryError: a line before the last is not a JSON object; names the line.
    """
    try:
        lines = whole_lines(path)
    except UnicodeDecodeError:
        raise RunDirectoryError(f"{path} is damaged: it is not text") from None
    records = []
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise RunDirectoryError(f"{path} is damaged: line {number} is not a JSON object")
    return records


def _record(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value
