"""CSV files of what benchmarks measured: a line for each value of a dataclass of texts and numbers."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from dase_grpc.errors import DaseError

R = TypeVar("R")


class ResultsError(DaseError):
    """A file is no results of this benchmark."""


def write_lines(path: Path, names: Sequence[str], lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes lines under these names, and makes the folder.

    Raises:
        ResultsError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    except OSError as error:
        raise ResultsError(f"cannot write {path}: {error.strerror or error}") from None


def read_lines(path: Path, kind: type[R]) -> list[R]:
    """A `kind` from each line, at least one; its fields are of type str, int, float or float | None.

    Raises:
        ResultsError: it is no such file.
    """
    types = get_type_hints(kind)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        found = [kind(**{name: _parsed(line[name], each) for name, each in types.items()}) for line in lines]
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror or error}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise ResultsError(f"{path} holds no results of this benchmark: {error}") from None
    if not found:
        raise ResultsError(f"{path} holds no line of results")
    return found


def _parsed(text: str, kind: Any) -> Any:
    if kind in (str, int, float):
        return kind(text)
    return float(text) if text else None
