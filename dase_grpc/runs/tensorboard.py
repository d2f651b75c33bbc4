"""Scalars for TensorBoard, where the extra `tensorboard` is installed; silently nothing elsewhere.

Writes event files with TensorBoard's own writer and messages, so torch is not needed, and nothing is
imported until a writer is opened.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from dase_grpc.runs.files import written


class ScalarWriter(Protocol):
    """Takes numbers to show over environment steps; every call may be ignored."""

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Records numbers at one step; a mapping becomes `name/key`, None is left out."""
        ...

    def close(self) -> None:
        """Writes what is pending; nothing may follow. Blocks for the disk."""
        ...


class NoScalars:
    """A ScalarWriter for machines without TensorBoard."""

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class EventFileScalars:
    """A ScalarWriter into one event file. Owns the file and its thread until `close`."""

    def __init__(self, directory: Path, writer: Any, event: Any, summary: Any) -> None:
        self._directory = directory
        self._writer = writer
        self._event = event
        self._summary = summary

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Starts an event file in `directory`, which is made if it is missing.

        Raises:
            ImportError: TensorBoard is not installed.
            RunDirectoryError: the disk refuses.
        """
        # TensorBoard ships no types.
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import (  # type: ignore[import-untyped]
            EventFileWriter,
        )

        with written(directory):
            return cls(directory, EventFileWriter(str(directory)), Event, Summary)

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Queues one event with all numbers; a thread writes the file, every two minutes.

        Raises:
            RunDirectoryError: the disk refused what was queued before.
        """
        numbers = [self._summary.Value(tag=tag, simple_value=number) for tag, number in flattened(values)]
        if numbers:
            summary = self._summary(value=numbers)
            with written(self._directory):
                self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Writes what is pending and closes the file.

        Raises:
            RunDirectoryError: the disk refuses.
        """
        with written(self._directory):
            self._writer.close()


def open_tensorboard(directory: Path) -> ScalarWriter:
    """A writer into `directory`, or one that does nothing where TensorBoard is not installed."""
    try:
        return EventFileScalars.open(directory)
    except ImportError:
        return NoScalars()


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of nested mappings under slash-separated names; whatever else is there is left out."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, f"{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)
