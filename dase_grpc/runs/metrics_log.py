"""metrics.jsonl: what one agent's training looked like, one JSON object per line."""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dase_grpc.config.texts import json_value
from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.files import append_line, whole_lines

_TABLES: Final = ("similarity", "refused")
_COUNTS: Final = ("step", "wall_seconds")


@dataclass(frozen=True)
class MetricsLog:
    """Appends records to a JSON-lines file; opens it for each record, so a restart simply goes on.

    One writer per file. JSON has no NaN and no infinity: both are written as null.
    """

    path: Path

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one record: numbers, None, and mappings of them.

        Raises:
            TypeError: a value that JSON cannot hold.
        """
        append_line(self.path, json.dumps(_plain(record), separators=(",", ":"), allow_nan=False))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records in order; a missing file has none, a damaged last line is left out.

    Raises:
        RunDirectoryError: a line before the last is no record, a JSON object of numbers; names the line.
    """
    lines = whole_lines(path)
    records = []
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise RunDirectoryError(f"{path} is damaged: line {number} is no record of numbers")
    return records


def _record(line: str) -> dict[str, Any] | None:
    try:
        value = json_value(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and all(map(_fits, value, value.values())) else None


def _fits(key: str, value: Any) -> bool:
    """Whether a value is what `append` writes: numbers, none negative where it counts, and tables of them."""
    if isinstance(value, dict):
        known = (each.isdecimal() for each in value) if key == "similarity" else (True,)
        return all(known) and all(map(_is_number, value.values()))
    if key in _TABLES or (key in _COUNTS and isinstance(value, (int, float)) and value < 0):
        return value is None
    return _is_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value is None
    return abs(value) < sys.float_info.max


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return value
