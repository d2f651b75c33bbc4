"""The results of an evaluator node on disk: an agent's evaluations, and the best policy it has seen."""

from dataclasses import dataclass
from math import isfinite
from typing import Self

from dase_grpc.config.resolve import RunConfig
from dase_grpc.runs.checkpoint import Tensors, best, describe, load_checkpoint, save_checkpoint
from dase_grpc.runs.directory import AgentDirectory
from dase_grpc.runs.files import sync_file
from dase_grpc.runs.journal import write_evaluation
from dase_grpc.runs.locking import FolderLock
from dase_grpc.runs.logs import read_evaluations
from dase_grpc.runs.tensorboard import ScalarWriter, open_tensorboard
from dase_grpc.schema import TransitionSchema


@dataclass(frozen=True)
class Evaluated:
    """One evaluation, as evaluations.csv has it; `version` is the number of updates the policy had had."""

    step: int
    version: int
    return_mean: float
    return_std: float
    episodes: int
    wall_seconds: float


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


def _score(directory: AgentDirectory) -> float | None:
    path = best(directory.evaluator)
    return None if path is None else float(load_checkpoint(path).metadata["evaluation"])
