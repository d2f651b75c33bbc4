"""Rounds of a run in one process on disk: checkpoints and rows of the buffer that belong together.

A round's file is written last, after all that it names, so it stands for a state that is whole. The last
two are kept, as the agents' checkpoints are.
"""

import hashlib
import io
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.checkpoint import KEEP, Checkpoint, load_checkpoint, seal_of
from dase_grpc.runs.directory import RunDirectory, checkpoint_path, checkpoint_paths, round_paths
from dase_grpc.runs.files import (
    STAGING_PREFIX,
    checked_bytes,
    json_text,
    read_document,
    replace_file,
    require_seal,
    sealed,
    sync_directory,
    written,
)
from dase_grpc.schema import Array

FORMAT_VERSION: Final = 1

_log = logging.getLogger("dase")

ROWS: Final = "rows-*.npy"
PRIORITIES: Final = "priorities-*.npy"


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

    def read(self, folder: Path) -> Array:
        """Its rows."""
        return _read_array(folder / self.name, self.sha256)


@dataclass(frozen=True)
class Masses:
    """One agent's priorities at a round, the checksum of their file, and the largest mass so far.

    total is the number of the transition that comes next.
    """

    total: int
    agent_id: int
    sha256: str
    largest: float

    @property
    def name(self) -> str:
        """The file's name."""
        return f"priorities-{self.total:012d}-{self.agent_id}.npy"

    def read(self, folder: Path) -> Array:
        """The mass of each transition present, the oldest first."""
        return _read_array(folder / self.name, self.sha256)


@dataclass(frozen=True)
class Round:
    """A whole state of a lockstep run.

    Attributes:
        steps: how many environment steps each agent has done, by id.
        seals: the checksums of their checkpoints.
        sampling: where each agent's generator for drawing batches stands.
        first, total: the numbers of the oldest transition in the buffer, and of the next one.
        segments: the files that hold them.
        priorities: of each agent that has some.
    """

    steps: tuple[int, ...]
    seals: tuple[str, ...]
    sampling: tuple[Mapping[str, Any], ...]
    first: int
    total: int
    segments: tuple[Segment, ...]
    priorities: tuple[Masses, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads one round's file."""
        document = read_document(path)
        version = document.get("format_version", FORMAT_VERSION)  # without one it is damaged: see the seal
        if version != FORMAT_VERSION:
            raise RunDirectoryError(
                f"{path} has format {version!r}, this version of dase reads format {FORMAT_VERSION}"
            )
        require_seal(document, f"{path} is damaged: it")
        lists = {key: tuple(document[key]) for key in ("steps", "seals", "sampling")}
        segments = tuple(Segment(**each) for each in document["segments"])
        priorities = tuple(Masses(**each) for each in document.get("priorities", ()))
        first, total = document["first"], document["total"]
        return cls(first=first, total=total, segments=segments, priorities=priorities, **lists)

    @property
    def files(self) -> set[str]:
        """The names of the files beside its own that it needs."""
        return {each.name for each in self.segments} | {each.name for each in self.priorities}

    def write(self, folder: Path) -> Path:
        """Writes the round's file, all at once."""
        document = {"format_version": FORMAT_VERSION, **asdict(self)}
        path = folder / f"round-{max(self.steps):09d}.json"
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json_text(sealed(document)).encode())
        sync_directory(folder)
        return path


@dataclass(frozen=True)
class WholeRound:
    """A round all of whose files were read and are sound, and what was wrong with newer ones."""

    path: Path
    round: Round
    checkpoints: tuple[Checkpoint, ...]
    passed_over: tuple[str, ...]


class RoundLog:
    """Keeps a lockstep run's rounds. One writer per run.

    It goes on from `resumed`; the files of later ones are removed by the next `keep`.
    """

    def __init__(self, directory: RunDirectory, resumed: Round | None = None) -> None:
        self._directory = directory
        self._rows = RowLog(directory.replay, () if resumed is None else resumed.segments)

    def keep(
        self,
        steps: Sequence[int],
        sampling: Sequence[Mapping[str, Any]],
        *,
        rows: tuple[Array, Array],
        total: int,
        priorities: Mapping[int, tuple[Array, float]] = MappingProxyType({}),
    ) -> None:
        """Keeps a round whose agents' checkpoints are on disk: rows are all transitions present, in order.

        priorities are the masses of these and the largest so far, by agent id.
        """
        folder = self._directory.replay
        with written(f"the buffer to {folder}"):
            segments = self._rows.append(rows, total=total)
            folders = [self._directory.agent(agent_id).checkpoints for agent_id in range(len(steps))]
            seals = tuple(map(seal_of, map(checkpoint_path, folders, steps)))
            first = total - sum(map(len, rows))
            masses = tuple(_write_masses(folder, total, *each) for each in priorities.items())
            kept = Round(tuple(steps), seals, tuple(sampling), first, total, segments, masses)
            kept.write(folder)
            self._prune(kept.files, newest=max(steps))

    def _prune(self, needed: set[str], *, newest: int) -> None:
        paths = round_paths(self._directory.replay)
        kept = [step for step in paths if step <= newest][-KEEP:]
        for step, path in paths.items():
            if step not in kept:
                path.unlink()
            elif step != newest:
                try:
                    needed |= Round.read(path).files
                except RunDirectoryError as error:
                    _log.warning("%s", error)
        self._rows.keep(needed)


def newest_whole_round(directory: RunDirectory) -> WholeRound:
    """The newest round all of whose files are sound.

    Raises:
        RunDirectoryError: there is none; says what is wrong with each that there is.
    """
    passed_over: list[str] = []
    for path in reversed(round_paths(directory.replay).values()):
        try:
            return _read_whole(directory, path, tuple(passed_over))
        except RunDirectoryError as error:
            passed_over.append(str(error))
    if passed_over:
        raise RunDirectoryError(
            f"nothing in {directory.path} can be resumed: {'; '.join(passed_over)}; "
            f"{directory.how_to_begin_anew}"
        )
    raise RunDirectoryError(
        f"{directory.path} has no checkpoint to resume from; a {directory.run['mode']} run keeps one every "
        f"train.checkpoint_every steps and when it ends; {directory.how_to_begin_anew}"
    )


def _read_whole(directory: RunDirectory, path: Path, passed_over: tuple[str, ...]) -> WholeRound:
    found = Round.read(path)
    checkpoints = []
    for agent_id, (step, seal) in enumerate(zip(found.steps, found.seals, strict=True)):
        folder = directory.agent(agent_id).checkpoints
        checkpoint = load_checkpoint(checkpoint_paths(folder).get(step, checkpoint_path(folder, step)))
        if checkpoint.seal != seal:
            raise RunDirectoryError(f"{path} does not belong to the checkpoint {checkpoint.path}")
        checkpoints.append(checkpoint)
    for segment in found.segments:
        segment.read(directory.replay)
    for masses in found.priorities:
        masses.read(directory.replay)
    return WholeRound(path, found, tuple(checkpoints), passed_over)


class RowLog:
    """Writes a buffer's new rows to a folder; `segments` are there already. One writer per folder.

    An OSError of the disk is the caller's, who knows what could not be written.
    """

    def __init__(self, folder: Path, segments: Sequence[Segment] = ()) -> None:
        self._folder = folder
        self._segments = list(segments)

    def append(self, parts: tuple[Array, Array], *, total: int) -> tuple[Segment, ...]:
        """Writes what was added since the last call; returns where all rows present lie, in order.

        parts are all rows present, the oldest first; the last is number total - 1.
        """
        present = sum(map(len, parts))
        written = self._segments[-1].end if self._segments else 0
        first = max(written, total - present)
        if first < total:
            rows = _last(parts, total - first)
            self._segments.append(self._write(rows, first=first, end=total))
        self._segments = [each for each in self._segments if each.end > total - present]
        return tuple(self._segments)

    def keep(self, names: Collection[str]) -> None:
        """Removes all files of rows and priorities but these, and what a killed writer left unfinished."""
        for pattern in (ROWS, PRIORITIES, f"{STAGING_PREFIX}*"):
            for path in self._folder.glob(pattern):
                if path.name not in names:
                    path.unlink()

    def _write(self, rows: Array, *, first: int, end: int) -> Segment:
        name = Segment(first, end, "").name
        return Segment(first, end, _write_array(self._folder / name, rows))


def _write_masses(folder: Path, total: int, agent_id: int, state: tuple[Array, float]) -> Masses:
    masses, largest = state
    name = Masses(total, agent_id, "", largest).name
    return Masses(total, agent_id, _write_array(folder / name, masses), largest)


def _write_array(path: Path, array: Array) -> str:
    """Writes an array all at once; the checksum of its file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    data = stream.getbuffer()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)
    sync_directory(path.parent)
    return hashlib.sha256(data).hexdigest()


def _read_array(path: Path, sha256: str) -> Array:
    data = checked_bytes(path, sha256, damaged=f"{path} is damaged: its checksum does not match")
    array: Array = np.load(io.BytesIO(data), allow_pickle=False)
    return array


def read_rows(folder: Path, segments: Sequence[Segment], *, first: int) -> Iterator[Array]:
    """The rows from number `first` on, file by file."""
    for segment in segments:
        yield segment.read(folder)[max(0, first - segment.first) :]


def _last(parts: tuple[Array, Array], count: int) -> Array:
    older, newer = parts
    if count <= len(newer):
        return newer[len(newer) - count :]
    return np.concatenate((older[len(older) - (count - len(newer)) :], newer))
