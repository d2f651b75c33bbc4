"""Where an evaluator node writes: a run directory of its own, or that of learners who do not evaluate."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import RunDirectoryError
from dase_grpc.nodes.results import as_run
from dase_grpc.replay.wire.v1.replay_pb2 import BufferState
from dase_grpc.runs.directory import EVALUATOR_MODE, RUN_FILE, RunDirectory
from dase_grpc.runs.evaluation_journal import EvaluationJournal
from dase_grpc.runs.sameness import require_same_settings
from dase_grpc.schema import TransitionSchema


def evaluated_run(path: Path, config: RunConfig, *, command: Sequence[str]) -> RunDirectory:
    """The run directory at `path`, made if it is missing.

    Raises:
        RunDirectoryError: it cannot be made, is damaged, or belongs to learners that evaluate themselves.
        ConfigError: it is of other settings; those of the buffer do not count.
    """
    if not (path / RUN_FILE).exists():
        return RunDirectory.ensure(path.parent, path.name, config, mode=EVALUATOR_MODE, command=command)
    run = RunDirectory.open(path)
    if run.run.get("mode") != EVALUATOR_MODE and run.config.eval.by != "evaluator":
        raise RunDirectoryError(
            f"{path} is the run of learners that evaluate themselves (eval.by = {run.config.eval.by}), and "
            f"only one may write its evaluations.csv; start all nodes with --set eval.by=evaluator, or "
            f"choose another --run-dir"
        )
    same_buffer = config.model_copy(update={"replay": run.config.replay})
    require_same_settings(run.config, same_buffer, of=f"the run in {path}")
    return run


class EvaluationBooks:
    """The journals of the agents that an evaluator evaluates, opened once there is a run directory.

    Learners that share the directory make it, before they publish anything, with what the replay really
    holds; the evaluator makes it only where a policy has come and there is none. One thread at a time.

    Attributes:
        buffer: what is known of the replay's buffer, for the settings that are recorded.
    """

    def __init__(
        self,
        path: Path,
        agents: Collection[int],
        *,
        config: RunConfig,
        schema: TransitionSchema,
        command: Sequence[str],
    ) -> None:
        self.path = path
        self.buffer: BufferState | None = None
        self._agents = agents
        self._config = config
        self._schema = schema
        self._command = command
        self._journals: Mapping[int, EvaluationJournal] = {}
        self._opened = ExitStack()

    def evaluated(self) -> dict[int, int | None]:
        """The step of the last evaluation that there is of each agent, None where there is none.

        Raises:
            UsageError: see `open`.
        """
        journals = self.open() if (self.path / RUN_FILE).exists() else {}
        return {
            agent_id: journals[agent_id].last_step if agent_id in journals else None
            for agent_id in self._agents
        }

    def open(self) -> Mapping[int, EvaluationJournal]:
        """The journals, opened at the first call.

        Raises:
            RunDirectoryError: see `evaluated_run`; or another evaluator writes there, or a file is damaged.
            ConfigError: see `evaluated_run`.
        """
        if not self._journals:
            config, known = self._config, self.buffer
            if known is not None and known.capacity:
                config = as_run(config, self._schema, capacity=known.capacity, min_size=known.min_size)
            run = evaluated_run(self.path, config, command=self._command)
            self._journals = {agent_id: self._journal(run, agent_id) for agent_id in self._agents}
        return self._journals

    def close(self) -> None:
        """Closes what was opened."""
        self._opened.close()

    def _journal(self, run: RunDirectory, agent_id: int) -> EvaluationJournal:
        journal = EvaluationJournal.open(run.agent(agent_id), config=run.config, schema=self._schema)
        return self._opened.enter_context(closing(journal))
