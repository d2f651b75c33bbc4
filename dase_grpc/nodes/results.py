"""The results of learners and evaluators on disk, and what they go on from."""

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dase_grpc.config.resolve import RunConfig
from dase_grpc.config.texts import names_a_folder, transitions
from dase_grpc.errors import RunDirectoryError
from dase_grpc.learning.envs.make import require_same_environment
from dase_grpc.learning.training.state import Counters, Saved
from dase_grpc.pace import Origin
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.v1.replay_pb2 import BufferState
from dase_grpc.runs.checkpoint import newest_sound
from dase_grpc.runs.directory import EVALUATOR_MODE, RUN_FILE, AgentDirectory, RunDirectory, checkpoint_paths
from dase_grpc.runs.files import require_utf8
from dase_grpc.runs.journal import AgentJournal, EvaluationJournal
from dase_grpc.runs.lease_note import LeaseNote
from dase_grpc.runs.rewind import require_same_settings, rewind
from dase_grpc.schema import TransitionSchema

log = logging.getLogger("dase")


@dataclass(frozen=True)
class Resumed:
    """What a learner goes on from: its state, what it has stored, and how long it had trained by then.

    Where its agent's actors collect, also from where their steps were counted, and the batches taken since.
    """

    saved: Saved
    stored: int
    elapsed_s: float
    origin: Origin
    used: int


@dataclass(frozen=True)
class Results:
    """Where an agent's results go, what it goes on from, if it does, and the note of who writes them."""

    journal: AgentJournal
    resumed: Resumed | None
    note: LeaseNote

    def close(self) -> None:
        """Lets another process write them."""
        self.journal.close()
        self.note.close()


def results_path(run_dir: Path | None, *, run_id: str, here: Path) -> Path:
    """Where the results go: the given run directory, or one named after the run; seen from `here`."""
    path = run_dir if run_dir is not None else Path("runs") / run_id
    if run_dir is None and not names_a_folder(run_id):
        raise RunDirectoryError(f"the run id {run_id!r} cannot name a folder; choose a --run-dir")
    require_utf8(here / path)
    return here / path


def open_results(
    path: Path,
    config: RunConfig,
    member: Membership,
    schema: TransitionSchema,
    *,
    command: Sequence[str],
    resume: bool = False,
) -> Results:
    """This agent's part of the run directory at `path`, which the first learner makes.

    With `resume` the agent goes on from its newest checkpoint that is not damaged, and its files are taken
    back to that; without any it begins anew. UsageError if there is another configuration or environment or,
    unless the agent resumes, results of it.
    """
    config = as_run(config, schema, capacity=member.capacity, min_size=member.min_size)
    if resume and (path / RUN_FILE).exists():
        run = _same_run(path, config, command=command)
    else:
        run = _ensured(path, config, command=command)
    if config.eval.by == "learner" and run.run.get("mode") == EVALUATOR_MODE:
        raise RunDirectoryError(
            f"{path} holds the evaluations of an evaluator node, and this learner evaluates itself "
            f"(eval.by = learner); choose another --run-dir"
        )
    directory = run.agent(member.agent_id)
    if not resume and _has_results(directory, config):
        raise RunDirectoryError(
            f"{directory.path} already holds results of agent {member.agent_id}; go on with --resume, or "
            f"choose another --run-dir"
        )
    with ExitStack() as failing:
        journal = failing.enter_context(closing(AgentJournal.open(directory, config=config, schema=schema)))
        note = failing.enter_context(closing(LeaseNote.keep(directory.lease_note, member.node_id)))
        resumed = _resume(directory, config, schema) if resume else None
        failing.pop_all()
    return Results(journal, resumed, note)


def _ensured(path: Path, config: RunConfig, *, command: Sequence[str]) -> RunDirectory:
    try:
        return RunDirectory.ensure(path.parent, path.name, config, mode="node", command=command)
    except RunDirectoryError as error:  # its remedy is that of `dase train`, which has a --name
        same = "start it with the same settings, or " if (path / RUN_FILE).exists() else ""
        found = str(error).partition("; choose another name")[0]
        raise RunDirectoryError(f"{found}; {same}choose another --run-dir") from None


def _same_run(path: Path, config: RunConfig, *, command: Sequence[str]) -> RunDirectory:
    """The run to go on with, of the same settings; another budget of steps is noted in its run.toml."""
    run = RunDirectory.open(path)
    require_same_settings(run.config, config, of=f"the run in {path}")
    if run.config.train.steps == config.train.steps:
        return run
    folders = [run.agent(agent_id).checkpoints for agent_id in range(config.train.agents)]
    steps = [max(checkpoint_paths(folder), default=0) for folder in folders]
    return run.resumed(config, from_steps=steps, command=command)


def _resume(directory: AgentDirectory, config: RunConfig, schema: TransitionSchema) -> Resumed | None:
    """Takes an agent back to its newest checkpoint that is not damaged; None where it has none."""
    checkpoint, passed_over = newest_sound(directory.checkpoints)
    for reason in passed_over:
        log.warning("%s; an older checkpoint is used", reason)
    if checkpoint is not None:
        require_same_settings(checkpoint.run_config, config, of=str(checkpoint))
        require_same_environment(schema, checkpoint.schema)
    rewound = rewind(directory, checkpoint, evaluations=config.eval.by == "learner")
    if rewound.aside is not None:
        said = "what is damaged, or was written after the checkpoint (%s), is put aside in %s"
        log.log(logging.WARNING if rewound.damaged else logging.INFO, said, rewound.counted, rewound.aside)
    if checkpoint is None:
        log.warning("agent %d has no checkpoint to resume from, so it begins anew", directory.agent_id)
        return None
    log.info("resuming from %s", checkpoint.path)
    saved = Saved(checkpoint.tensors, checkpoint.training, checkpoint.training_tensors)
    counted = asdict(Counters()) | checkpoint.training["counters"]
    return Resumed(
        saved,
        int(counted["stored"]),
        rewound.elapsed_s,
        origin=Origin(str(counted["buffer_id"]), int(counted["collected_before"])),
        used=int(counted["used"]),
    )


def _has_results(directory: AgentDirectory, config: RunConfig) -> bool:
    """Whether a learner has written there; an evaluator's rows alone may be there before it."""
    if config.eval.by == "evaluator":
        return directory.metrics.path.exists() or bool(checkpoint_paths(directory.checkpoints))
    return directory.evaluations.path.exists()


def as_run(config: RunConfig, schema: TransitionSchema, *, capacity: int, min_size: int) -> RunConfig:
    """The configuration to record: what the replay really holds, where this node's says otherwise."""
    known: dict[str, int] = {"min_size": min_size}
    if transitions(config.replay.capacity, row_bytes=schema.row_bytes) != capacity:
        known["capacity"] = capacity
    return config.model_copy(update={"replay": config.replay.model_copy(update=known)})


def evaluated_run(path: Path, config: RunConfig, *, command: Sequence[str]) -> RunDirectory:
    """The run directory at `path`, made if it is missing; UsageError if it is not an evaluator's to write.

    That is one of other settings, those of the buffer aside, or of learners that evaluate themselves.
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


@dataclass
class EvaluationBooks:
    """The journals of the agents that an evaluator evaluates, opened once there is a run directory.

    Learners that share the directory make it, before they publish anything, with what the replay really
    holds; the evaluator makes it only where a policy has come and there is none, with what is known of the
    `buffer`. One thread at a time.
    """

    path: Path
    agents: Collection[int]
    config: RunConfig
    schema: TransitionSchema
    command: Sequence[str]
    buffer: BufferState | None = None
    _journals: Mapping[int, EvaluationJournal] = field(default_factory=dict)
    _opened: ExitStack = field(default_factory=ExitStack)

    def evaluated(self) -> dict[int, int | None]:
        """The step of the last evaluation that there is of each agent, None where there is none."""
        journals = self.open() if (self.path / RUN_FILE).exists() else {}
        return {
            agent_id: journals[agent_id].last_step if agent_id in journals else None
            for agent_id in self.agents
        }

    def open(self) -> Mapping[int, EvaluationJournal]:
        """The journals, opened at the first call."""
        if not self._journals:
            config, known = self.config, self.buffer
            if known is not None and known.capacity:
                config = as_run(config, self.schema, capacity=known.capacity, min_size=known.min_size)
            run = evaluated_run(self.path, config, command=self.command)
            self._journals = {agent_id: self._journal(run, agent_id) for agent_id in self.agents}
        return self._journals

    def close(self) -> None:
        """Closes what was opened."""
        self._opened.close()

    def _journal(self, run: RunDirectory, agent_id: int) -> EvaluationJournal:
        journal = EvaluationJournal.open(run.agent(agent_id), config=run.config, schema=self.schema)
        return self._opened.enter_context(closing(journal))
