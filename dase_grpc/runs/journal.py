"""Results on disk as they come: an agent's, an evaluator's, and TensorBoard where that is installed."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, Self, Unpack

from dase_grpc.config.resolve import RunConfig
from dase_grpc.runs.checkpoint import Tensors, best, describe, load_checkpoint, save_checkpoint
from dase_grpc.runs.directory import AgentDirectory
from dase_grpc.runs.files import FolderLock, require_utf8, sync_file, written
from dase_grpc.runs.logs import EvaluationRow, read_evaluations
from dase_grpc.schema import TransitionSchema


class LearnerAtRest(Protocol):
    """What a checkpoint keeps of a learner."""

    @property
    def agent(self) -> Tensors:
        """The agent's state."""

    @property
    def numbers(self) -> Mapping[str, Any]:
        """What else training goes on from, as far as JSON holds it."""

    @property
    def tensors(self) -> Tensors:
        """The rest of it."""


@dataclass(frozen=True)
class EventFileScalars:
    """Numbers over environment steps in one event file. Owns the file and its thread until `close`."""

    directory: Path
    writer: Any
    event: Any
    summary: Any

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Queues one event with all numbers; a thread writes the file, every two minutes."""
        numbers = [self.summary.Value(tag=tag, simple_value=number) for tag, number in flattened(values)]
        if numbers:
            summary = self.summary(value=numbers)
            with written(self.directory):
                self.writer.add_event(self.event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Writes what is pending and closes the file."""
        with written(self.directory):
            self.writer.close()


def open_tensorboard(directory: Path) -> EventFileScalars | None:
    """Starts an event file in `directory`, which is made if it is missing; None without TensorBoard.

    RunDirectoryError if the directory's path is not UTF-8.
    """
    try:
        # TensorBoard ships no types.
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import (  # type: ignore[import-untyped]
            EventFileWriter,
        )
    except ImportError:
        return None
    require_utf8(directory)
    with written(directory):
        return EventFileScalars(directory, EventFileWriter(str(directory)), Event, Summary)


@dataclass(eq=False)
class _Journal:
    """Writes evaluations.csv and scalars of one agent; one thread at a time.

    Attributes:
        config: the whole run's.
        lock: makes a folder its own until it is closed.
    """

    directory: AgentDirectory
    _: KW_ONLY
    config: RunConfig
    schema: TransitionSchema
    tensorboard: EventFileScalars | None
    lock: FolderLock | None = None

    @classmethod
    def _locked(
        cls, folder: Path, directory: AgentDirectory, config: RunConfig, schema: TransitionSchema
    ) -> Self:
        lock = FolderLock.acquire(folder)
        try:
            tensorboard = open_tensorboard(directory.tensorboard)
            return cls(directory, config=config, schema=schema, tensorboard=tensorboard, lock=lock)
        except BaseException:
            lock.close()
            raise

    def evaluation(self, **row: Unpack[EvaluationRow]) -> None:
        """Appends one line to evaluations.csv."""
        self.directory.evaluations.append(**row)
        shown = {f"evaluation/{key}": row[key] for key in ("return_mean", "return_std")}
        self._show(row["step"], shown)

    def close(self) -> None:
        """Flushes and closes TensorBoard's file; another process may write then."""
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.lock is not None:
            self.lock.close()

    def _show(self, step: int, values: Mapping[str, Any]) -> None:
        if self.tensorboard is not None:
            self.tensorboard.scalars(step, values)

    def _described(self, **more: Any) -> dict[str, Any]:
        return describe(self.config, self.schema, agent_id=self.directory.agent_id, **more)


class AgentJournal(_Journal):
    """Writes metrics.jsonl and checkpoints, too."""

    last_checkpoint: Path | None = None

    @classmethod
    def open(cls, directory: AgentDirectory, *, config: RunConfig, schema: TransitionSchema) -> Self:
        """The journal of an agent, whose folder is its own until it is closed; config is the whole run's.

        Raises:
            RunDirectoryError: another process writes there.
        """
        return cls._locked(directory.path, directory, config, schema)

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Appends one line to metrics.jsonl."""
        self.directory.metrics.append(values)
        self._show(int(values["step"]), values)

    def checkpoint(self, *, step: int, saved: LearnerAtRest, scores: Mapping[str, Any]) -> None:
        """Keeps the learner's state, atomically; the results until then are on the disk before it."""
        for path in (self.directory.evaluations.path, self.directory.metrics.path):
            sync_file(path)
        self.last_checkpoint = save_checkpoint(
            self.directory.checkpoints,
            step=step,
            tensors=saved.agent,
            training_tensors=saved.tensors,
            metadata=self._described(training=saved.numbers, **scores),
        )


@dataclass(eq=False)
class EvaluationJournal(_Journal):
    """Keeps the best policy of one agent, too, and goes on where an earlier one has ended.

    The agent's own folder may be its learner's at the same time, who then leaves evaluations.csv alone.

    Attributes:
        last_step: the step of the last evaluation there is, None before the first.
        seconds: the time in evaluation until then.
    """

    def __post_init__(self) -> None:
        rows, kept = read_evaluations(self.directory.evaluations.path), best(self.directory.evaluator)
        self.last_step = int(rows.step.max()) if len(rows) else None
        self.seconds = float(rows.wall_seconds.max()) if len(rows) else 0.0
        self._best = None if kept is None else float(load_checkpoint(kept).metadata["evaluation"])

    @classmethod
    def open(cls, directory: AgentDirectory, *, config: RunConfig, schema: TransitionSchema) -> Self:
        """The journal of an agent, no other evaluator's until it is closed; config is the whole run's.

        Raises:
            RunDirectoryError: another does already, or a file is damaged.
        """
        return cls._locked(directory.evaluator, directory, config, schema)

    def note(self, tensors: Tensors, *, version: int, **row: Unpack[EvaluationRow]) -> None:
        """Appends one evaluation; keeps the policy if none before it was better. Blocks for the disk.

        version is the number of updates that the policy had had.
        """
        self.evaluation(**row)
        self.last_step, mean = row["step"], row["return_mean"]
        if not isfinite(mean) or (self._best is not None and mean < self._best):
            return
        told = {"evaluation": mean, "evaluation_step": row["step"], "policy_version": version}
        save_checkpoint(
            self.directory.evaluator,
            step=row["step"],
            tensors=tensors,
            metadata=self._described(**told),
            keep=1,
        )
        self._best = mean

    def close(self) -> None:
        """Lets another evaluator write; what was written is on the disk."""
        sync_file(self.directory.evaluations.path)
        super().close()


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of nested mappings under slash-separated names; whatever else is there is left out."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, f"{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)
