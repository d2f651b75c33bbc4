"""Results on disk as they come: an agent's, an evaluator's, and TensorBoard where that is installed."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, Self

from dase_grpc.config.resolve import RunConfig
from dase_grpc.runs.checkpoint import Tensors, best, describe, load_checkpoint, save_checkpoint
from dase_grpc.runs.directory import AgentDirectory
from dase_grpc.runs.files import FolderLock, sync_file, written
from dase_grpc.runs.logs import read_evaluations
from dase_grpc.schema import TransitionSchema


class LearnerAtRest(Protocol):
    """What a checkpoint keeps: an agent's tensors, and the numbers and tensors of its training."""

    @property
    def agent(self) -> Tensors:
        """The agent's state."""
        ...

    @property
    def numbers(self) -> Mapping[str, Any]:
        """What else training goes on from, as far as JSON holds it."""
        ...

    @property
    def tensors(self) -> Tensors:
        """The rest of it."""
        ...


@dataclass(frozen=True)
class Evaluated:
    """One evaluation, as evaluations.csv has it; `version` is the number of updates the policy had had."""

    step: int
    version: int
    return_mean: float
    return_std: float
    episodes: int
    wall_seconds: float


def _score(directory: AgentDirectory) -> float | None:
    path = best(directory.evaluator)
    return None if path is None else float(load_checkpoint(path).metadata["evaluation"])


class ScalarWriter(Protocol):
    """Takes numbers to show over environment steps; every call may be ignored."""

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Records numbers at one step; a mapping becomes `name/key`, None is left out."""
        ...

    def close(self) -> None:
        """Writes what is pending; nothing may follow. Blocks for the disk."""
        ...


class AgentJournal:
    """Writes evaluations.csv, metrics.jsonl, checkpoints and scalars of one agent; one thread at a time."""

    def __init__(
        self,
        directory: AgentDirectory,
        *,
        config: RunConfig,
        schema: TransitionSchema,
        tensorboard: ScalarWriter,
        lock: FolderLock | None = None,
    ) -> None:
        self._lock = lock
        self._directory = directory
        self._config = config
        self._schema = schema
        self._tensorboard = tensorboard
        self.last_checkpoint: Path | None = None

    @classmethod
    def open(cls, directory: AgentDirectory, *, config: RunConfig, schema: TransitionSchema) -> Self:
        """A journal that also writes to TensorBoard if the extra is installed; config is the whole run's.

        The folder is its own until it is closed.

        Raises:
            RunDirectoryError: another process writes there.
        """
        lock = FolderLock.acquire(directory.path)
        tensorboard = open_tensorboard(directory.tensorboard)
        return cls(directory, config=config, schema=schema, tensorboard=tensorboard, lock=lock)

    def evaluation(
        self, *, step: int, return_mean: float, return_std: float, episodes: int, wall_seconds: float
    ) -> None:
        """Appends one line to evaluations.csv."""
        write_evaluation(
            self._directory,
            self._tensorboard,
            step=step,
            return_mean=return_mean,
            return_std=return_std,
            episodes=episodes,
            wall_seconds=wall_seconds,
        )

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Appends one line to metrics.jsonl."""
        self._directory.metrics.append(values)
        self._tensorboard.scalars(int(values["step"]), values)

    def checkpoint(self, *, step: int, saved: LearnerAtRest, scores: Mapping[str, Any]) -> None:
        """Keeps the learner's state, atomically; the results until then are on the disk before it."""
        for path in (self._directory.evaluations.path, self._directory.metrics.path):
            sync_file(path)
        self.last_checkpoint = save_checkpoint(
            self._directory.checkpoints,
            step=step,
            tensors=saved.agent,
            training_tensors=saved.tensors,
            metadata=describe(
                self._config,
                self._schema,
                agent_id=self._directory.agent_id,
                training=saved.numbers,
                **scores,
            ),
        )

    def close(self) -> None:
        """Flushes and closes TensorBoard's file; another process may write then."""
        self._tensorboard.close()
        if self._lock is not None:
            self._lock.close()


def write_evaluation(
    directory: AgentDirectory,
    tensorboard: ScalarWriter,
    *,
    step: int,
    return_mean: float,
    return_std: float,
    episodes: int,
    wall_seconds: float,
) -> None:
    """Appends one line to an agent's evaluations.csv, and its scalars; whoever evaluates does this."""
    directory.evaluations.append(
        step=step,
        return_mean=return_mean,
        return_std=return_std,
        episodes=episodes,
        wall_seconds=wall_seconds,
    )
    tensorboard.scalars(step, {"evaluation/return_mean": return_mean, "evaluation/return_std": return_std})


class EvaluationJournal:
    """Writes evaluations.csv, scalars and the best policy of one agent; one thread at a time.

    Goes on where an earlier one has ended. The agent's own folder may be its learner's at the same time, who
    then leaves evaluations.csv alone.

    Attributes:
        last_step: the step of the last evaluation there is, None before the first.
        seconds: the time in evaluation until then.
    """

    def __init__(
        self,
        directory: AgentDirectory,
        *,
        config: RunConfig,
        schema: TransitionSchema,
        tensorboard: ScalarWriter,
        lock: FolderLock,
    ) -> None:
        rows = read_evaluations(directory.evaluations.path)
        self.last_step = int(rows.step.max()) if len(rows) else None
        self.seconds = float(rows.wall_seconds.max()) if len(rows) else 0.0
        self._directory = directory
        self._config = config
        self._schema = schema
        self._tensorboard = tensorboard
        self._lock = lock
        self._best = _score(directory)

    @classmethod
    def open(cls, directory: AgentDirectory, *, config: RunConfig, schema: TransitionSchema) -> Self:
        """The journal of an agent, no other evaluator's until it is closed; config is the whole run's.

        Raises:
            RunDirectoryError: another does already, or a file is damaged.
        """
        lock = FolderLock.acquire(directory.evaluator)
        try:
            tensorboard = open_tensorboard(directory.tensorboard)
            return cls(directory, config=config, schema=schema, tensorboard=tensorboard, lock=lock)
        except BaseException:
            lock.close()
            raise

    def note(self, evaluated: Evaluated, tensors: Tensors) -> None:
        """Appends one evaluation; keeps the policy if none before it was better. Blocks for the disk."""
        write_evaluation(
            self._directory,
            self._tensorboard,
            step=evaluated.step,
            return_mean=evaluated.return_mean,
            return_std=evaluated.return_std,
            episodes=evaluated.episodes,
            wall_seconds=evaluated.wall_seconds,
        )
        self.last_step = evaluated.step
        if isfinite(evaluated.return_mean) and (self._best is None or evaluated.return_mean >= self._best):
            self._keep(evaluated, tensors)

    def close(self) -> None:
        """Lets another evaluator write; what was written is on the disk."""
        sync_file(self._directory.evaluations.path)
        self._tensorboard.close()
        self._lock.close()

    def _keep(self, evaluated: Evaluated, tensors: Tensors) -> None:
        save_checkpoint(
            self._directory.evaluator,
            step=evaluated.step,
            tensors=tensors,
            metadata=describe(
                self._config,
                self._schema,
                agent_id=self._directory.agent_id,
                evaluation=evaluated.return_mean,
                evaluation_step=evaluated.step,
                policy_version=evaluated.version,
            ),
            keep=1,
        )
        self._best = evaluated.return_mean


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
