"""Where a learner that has joined a run writes its results."""

from collections.abc import Sequence
from pathlib import Path

from dase_grpc.capacity import transitions
from dase_grpc.config import RunConfig
from dase_grpc.errors import RunDirectoryError
from dase_grpc.naming import names_a_folder
from dase_grpc.runs.directory import RUN_FILE, RunDirectory
from dase_grpc.runs.journal import AgentJournal
from dase_grpc.schema import TransitionSchema
from dase_grpc.wire.cluster import Membership


def results_path(run_dir: Path | None, *, run_id: str) -> Path:
    """Where the results go: the given run directory, or one named after the run.

    Raises:
        RunDirectoryError: the run's id cannot name a folder.
    """
    path = run_dir if run_dir is not None else Path("runs") / run_id
    if run_dir is None and not names_a_folder(run_id):
        raise RunDirectoryError(f"the run id {run_id!r} cannot name a folder; choose a --run-dir")
    return path.absolute()  # an environment may change the current directory


def open_journal(
    path: Path, config: RunConfig, member: Membership, schema: TransitionSchema, *, command: Sequence[str]
) -> AgentJournal:
    """This agent's part of the run directory at `path`, which the first learner makes.

    Raises:
        RunDirectoryError: it cannot be made, or holds another configuration or results of this agent.
    """
    config = _as_run(config, member, schema)
    try:
        run = RunDirectory.ensure(path.parent, path.name, config, mode="node", command=command)
    except RunDirectoryError as error:  # its remedy is that of `dase train`, which has a --name
        same = "start it with the same settings, or " if (path / RUN_FILE).exists() else ""
        found = str(error).partition("; choose another name")[0]
        raise RunDirectoryError(f"{found}; {same}choose another --run-dir") from None
    directory = run.agent(member.agent_id)
    if directory.evaluations.path.exists():
        raise RunDirectoryError(
            f"{directory.path} already holds results of agent {member.agent_id}; choose another --run-dir"
        )
    return AgentJournal.open(directory, config=config, schema=schema)


def _as_run(config: RunConfig, member: Membership, schema: TransitionSchema) -> RunConfig:
    """The configuration to record: what the replay really holds, where this learner's says otherwise."""
    known: dict[str, int] = {"min_size": member.min_size}
    if transitions(config.replay.capacity, row_bytes=schema.row_bytes) != member.capacity:
        known["capacity"] = member.capacity
    return config.model_copy(update={"replay": config.replay.model_copy(update=known)})
