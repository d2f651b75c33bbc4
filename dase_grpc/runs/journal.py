"""One agent's results on disk, and in TensorBoard where that is installed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from dase_grpc.config.resolve import RunConfig
from dase_grpc.runs.checkpoint import Tensors, describe, save_checkpoint
from dase_grpc.runs.directory import AgentDirectory
from dase_grpc.runs.files import sync_file
from dase_grpc.runs.locking import FolderLock
from dase_grpc.runs.tensorboard import ScalarWriter, open_tensorboard
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
