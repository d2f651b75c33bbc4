"""`dase resume`: goes on with a run in its directory, from the newest checkpoints that are whole."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.errors import ConfigError, RunDirectoryError
from dase_grpc.launch import checks, room
from dase_grpc.launch.console import PatientConsole, say
from dase_grpc.launch.forks import fork_server
from dase_grpc.launch.lockstep import BUFFER_FILE, ResumedRound
from dase_grpc.launch.train import LaunchOptions, run_here
from dase_grpc.learning.envs.make import require_same_environment
from dase_grpc.runs.checkpoint import Checkpoint, newest_sound
from dase_grpc.runs.directory import EVALUATOR_MODE, IN_ROUNDS, RunDirectory, versions
from dase_grpc.runs.files import FolderLock, require_utf8, written
from dase_grpc.runs.rewind import Rewound, changed_versions, require_same_settings, rewind
from dase_grpc.runs.rounds import newest_whole_round
from dase_grpc.schema import TransitionSchema

_OTHER_BETA: Final = (
    "β of the priorities grows until the last step, so with another total it goes on from another value, and "
    "the run differs from one of this total at once"
)


@dataclass(frozen=True)
class ResumeOptions(LaunchOptions):
    """What `dase resume` is told; steps is the new total of each agent, None the run's own."""

    path: Path
    steps: int | None = None
    empty_buffer: bool = False


def resume_here(options: ResumeOptions) -> None:
    """Goes on with a run on this machine, as `dase train` does with a new one.

    Raises:
        UsageError: before anything is changed, when the run cannot be gone on with, or is going on.
        NodeFailedError: a node ended before its time and was not, or could not be, started again.
    """
    path = options.path.absolute()
    RunDirectory.open(path)  # or there is nothing to lock
    require_utf8(path)
    with closing(FolderLock.acquire(path)):
        directory = RunDirectory.open(path)
        wanted = directory.run.get("mode") == "cluster" and options.gpus is None
        with fork_server(threads=directory.config.train.threads, wanted=wanted) as forks:
            _resume(replace(options, forks=forks), directory)


def _resume(options: ResumeOptions, directory: RunDirectory) -> None:
    console = PatientConsole()
    config = _with_total(directory.config, options.steps)
    mode = _mode(options, directory)
    schema = checks.check(config, gpus=options.gpus, starts_actors=mode == "cluster", stacked=mode == "stack")
    for agent in directory.agents():
        FolderLock.acquire(agent.path).close()
    note = changed_versions(directory.versions, versions())
    if note is not None:
        say(console, f"note: {note}")
    if config.anneals and config.train.steps != directory.config.train.steps:
        say(console, f"note: {_OTHER_BETA}")
    resumed = None
    if mode in IN_ROUNDS:
        room.require_memory(config, schema, gpus=options.gpus)
        resumed, steps = _resume_lockstep(directory, config, schema, console)
    else:
        steps = _resume_cluster(directory, config, schema, console, options)
    directory = directory.resumed(config, from_steps=steps, command=options.command)
    done = f"{min(steps):,}" if len(set(steps)) == 1 else ", ".join(f"{each:,}" for each in steps)
    say(console, f"resuming {options.path} from step {done} of {config.train.steps:,}")
    run_here(options, directory, console, shown=options.path, resumed=resumed)


def _mode(options: ResumeOptions, directory: RunDirectory) -> str:
    """The run's mode; refuses one that does not go on as a whole, and options that are not for it."""
    mode = directory.mode
    if mode == EVALUATOR_MODE:
        raise ConfigError(
            f"{options.path} has what an evaluator node has written, from which nothing goes on; start the "
            f"evaluator again with its own command"
        )
    if mode == "node":
        raise ConfigError(
            f"the learners of {options.path} were started one by one (mode = {mode!r}); start each again "
            f"with its own command and --resume"
        )
    if mode in IN_ROUNDS:
        checks.require_one_gpu(options.gpus)
        if options.empty_buffer:
            raise ConfigError(
                f"--empty-buffer is for a run with processes of its own; {mode} keeps its buffer"
            )
        if options.max_restarts is not None:
            raise ConfigError(f"--max-restarts is for a run with processes of its own; {mode} has none")
    return mode


def _with_total(config: RunConfig, steps: int | None) -> RunConfig:
    if steps is None:
        return config
    if steps < 1:
        raise ConfigError(f"--steps {steps} is not a number of steps; give the new total of each agent")
    return resolve(config.model_dump(mode="json"), {"train": {"steps": steps}})


def _resume_lockstep(
    directory: RunDirectory, config: RunConfig, schema: TransitionSchema, console: PatientConsole
) -> tuple[ResumedRound, list[int]]:
    """Takes the run back to its newest whole round."""
    whole = newest_whole_round(directory)
    for reason in whole.passed_over:
        say(console, f"note: {reason}; an older round is used")
    steps = list(whole.round.steps)
    _require_fit(config, schema, whole.checkpoints, steps)
    rewound = [rewind(directory.agent(each.agent_id), each) for each in whole.checkpoints]
    _say_aside(rewound, steps, console)
    last = directory.replay / BUFFER_FILE
    with written(last):
        last.unlink(missing_ok=True)  # what the end of the run wrote is not its end
    return ResumedRound(whole, tuple(each.elapsed_s for each in rewound)), steps


def _resume_cluster(
    directory: RunDirectory,
    config: RunConfig,
    schema: TransitionSchema,
    console: PatientConsole,
    options: ResumeOptions,
) -> list[int]:
    """Checks what the nodes, which rewind their files themselves, will go on from; the learners' steps."""
    found: list[Checkpoint | None] = []
    for agent_id in range(config.train.agents):
        checkpoint, passed_over = newest_sound(directory.agent(agent_id).checkpoints)
        for reason in passed_over:
            say(console, f"note: {reason}; an older checkpoint is used")
        found.append(checkpoint)
    whole = [checkpoint for checkpoint in found if checkpoint is not None]
    if not whole:
        raise RunDirectoryError(
            f"no agent of {directory.path} has a checkpoint to resume from; {directory.how_to_begin_anew}"
        )
    for agent_id, checkpoint in enumerate(found):
        if checkpoint is None:
            say(console, f"note: agent {agent_id} has no checkpoint, so it begins anew")
    steps = [0 if checkpoint is None else checkpoint.step for checkpoint in found]
    _require_fit(config, schema, whole, steps)
    if options.empty_buffer:
        reserved = room.reserve(config, schema, directory.path, gpus=options.gpus)
        aside = checks.put_buffer_aside(directory)
        if aside is not None:
            say(console, f"note: the buffer that was there is put aside in {aside}")
        say(console, reserved)
    elif not checks.has_buffer(directory):
        raise buffer_is_gone(directory)
    elif not room.keeps_on_disk(config):
        raise ConfigError(
            f"the buffer of {directory.path} lies on disk, and its replay is to keep it in memory "
            f"(replay.storage = {config.replay.storage!r}); set that back, or begin with --empty-buffer"
        )
    return steps


def buffer_is_gone(directory: RunDirectory) -> ConfigError:
    """What to say of a run without a buffer: where that was, and what can be done."""
    on_disk = room.keeps_on_disk(directory.config)
    what = "is not in its replay/ any more" if on_disk else "was kept in memory and is gone"
    return ConfigError(f"the buffer of {directory.path} {what}; {checks.BEGIN_EMPTY}")


def _require_fit(
    config: RunConfig, schema: TransitionSchema, checkpoints: Sequence[Checkpoint], steps: Sequence[int]
) -> None:
    """Checks that checkpoints are of this run and environment, and that there is anything left to do."""
    for checkpoint in checkpoints:
        require_same_settings(checkpoint.run_config, config, of=str(checkpoint))
        require_same_environment(schema, checkpoint.schema)
    done, total = min(steps), config.train.steps
    if done >= total:
        raise ConfigError(
            f"{done:,} steps are done already, and the total is {total:,}; give a larger total with --steps"
        )


def _say_aside(rewound: Sequence[Rewound], steps: Sequence[int], console: PatientConsole) -> None:
    for each, step in zip(rewound, steps, strict=True):
        if each.aside is not None:
            what = f"what is no part of the run until step {step:,} ({each.counted})"
            say(console, f"note: {what} is put aside in {each.aside}")
