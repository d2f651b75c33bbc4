"""A buffer's rows on disk, written as they come: one file for what was added since the last one.

Each file is a NumPy array of packed rows with a name that says their numbers, counted from 0 over the
run's whole life. So a checkpoint of a large buffer costs what was added to it, not what it holds.
"""

import hashlib
import io
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.files import STAGING_PREFIX, replace_file, sync_directory
from dase_grpc.schema import Array

PATTERN: Final = "rows-*.npy"


@dataclass(frozen=True)
class Segment:
    """Rows first, ..., end - 1 of a buffer, and the checksum of their file."""

    first: int
    end: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name."""
        return f"rows-{self.first:012d}-{self.end:012d}.npy"

    def numbers(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    def read(self, folder: Path) -> Array:
        """Its rows.

        Raises:
            RunDirectoryError: the file is missing or damaged.
        """
        path = folder / self.name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RunDirectoryError(f"cannot read {path}: {error.strerror or error}") from None
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise RunDirectoryError(f"{path} is damaged: its checksum does not match")
        rows: Array = np.load(io.BytesIO(data), allow_pickle=False)
        return rows


class RowLog:
    """Writes a buffer's new rows. One writer per folder.

    Args:
        folder: where the files lie.
        segments: what is there already of the same buffer, in order.
    """

    def __init__(self, folder: Path, segments: Sequence[Segment] = ()) -> None:
        self._folder = folder
        self._segments = list(segments)

    def append(self, parts: tuple[Array, Array], *, total: int) -> tuple[Segment, ...]:
        """Writes what was added since the last call; returns where all rows present lie, in order.

        parts are all rows present, the oldest first; the last is number total - 1.

        Raises:
            OSError: the disk refuses.
        """
        present = sum(map(len, parts))
        written = self._segments[-1].end if self._segments else 0
        first = max(written, total - present)
        if first < total:
            rows = _last(parts, total - first)
            self._segments.append(self._write(rows, first=first, end=total))
        self._segments = [each for each in self._segments if each.end > total - present]
        return tuple(self._segments)

    def keep(self, segments: Collection[Segment]) -> None:
        """Removes all files of rows but those of `segments`, and what a killed writer left unfinished."""
        names = {each.name for each in segments}
        for path in (*self._folder.glob(PATTERN), *self._folder.glob(f"{STAGING_PREFIX}*")):
            if path.name not in names:
                path.unlink()

    def _write(self, rows: Array, *, first: int, end: int) -> Segment:
        stream = io.BytesIO()
        np.save(stream, rows, allow_pickle=False)
        data = stream.getbuffer()
        segment = Segment(first, end, hashlib.sha256(data).hexdigest())
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._folder / segment.name, data)
        sync_directory(self._folder)
        return segment


def read_rows(folder: Path, segments: Sequence[Segment], *, first: int) -> Iterator[Array]:
    """The rows from number `first` on, file by file.

    Raises:
        RunDirectoryError: a file is missing or damaged.
    """
    for segment in segments:
        yield segment.read(folder)[max(0, first - segment.first) :]


def _last(parts: tuple[Array, Array], count: int) -> Array:
    older, newer = parts
    if count <= len(newer):
        return newer[len(newer) - count :]
    return np.concatenate((older[len(older) - (count - len(newer)) :], newer))
