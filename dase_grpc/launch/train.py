"""`dase train`: checks, makes the run directory, runs nodes or one process, says where results are."""

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from rich.console import Console

from dase_grpc.config.algorithms import algorithm_name
from dase_grpc.config.gpus import Gpus
from dase_grpc.config.resolve import RunConfig
from dase_grpc.config.texts import MAX_BYTES
from dase_grpc.errors import ConfigError, DaseError, RunDirectoryError
from dase_grpc.launch import checks, room
from dase_grpc.launch.console import PatientConsole, pasted, program, say
from dase_grpc.launch.display import Snapshot, make_display
from dase_grpc.launch.forks import ForkServer
from dase_grpc.launch.local import LocalCluster, run_cluster
from dase_grpc.launch.supervision import MAX_RESTARTS, Supervisor
from dase_grpc.learning.envs.ids import with_resolved_id
from dase_grpc.process.containment import left_as_found
from dase_grpc.process.lifecycle import halt_event, stop_event
from dase_grpc.progress import number, several
from dase_grpc.runs.directory import IN_ROUNDS, AgentDirectory, RunDirectory, checkpoint_paths
from dase_grpc.runs.files import FolderLock, require_utf8, whole_lines
from dase_grpc.runs.logs import read_evaluations, read_metrics, read_restarts, told

if TYPE_CHECKING:
    from dase_grpc.launch.lockstep import ResumedRound  # torch takes seconds to import

REDRAW_S: Final = 0.25
KILLED_CODE: Final = 130
"""What shells give to a Ctrl-C."""

SAME_SECOND: Final = 100
"""Runs of one kind that may begin within the same second."""

BAD_WORLDS: Final = {
    "refused": (
        "left out {counted} not finite ({listed}); make the environment return finite numbers",
        "{} in {:,}",
        ("transition that was", "transitions that were"),
    ),
    "env_restarts": (
        "had its environment made anew {counted} because it raised ({listed}); its traceback was logged",
        "{}: {:,}",
        ("time", "times"),
    ),
}
"""What is said, by what a line of metrics counts, how each kind of it is, and what one and several are."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What `dase train` and `dase resume` are told alike."""

    gpus: Gpus | None = None
    command: Sequence[str] = ()
    stdin_is_leash: bool = False
    max_restarts: int | None = None
    forks: ForkServer | None = None

    @property
    def gpu(self) -> int | None:
        """That of a run in one process; None for the CPU."""
        return None if self.gpus is None else self.gpus.only


@dataclass(frozen=True)
class TrainOptions(LaunchOptions):
    """What `dase train` is told besides the configuration."""

    config: RunConfig
    root: Path
    name: str | None = None
    lockstep: bool = False
    stack: bool = False

    @property
    def mode(self) -> str:
        """How it is run, as run.toml has it."""
        return "stack" if self.stack else "lockstep" if self.lockstep else "cluster"


def train_here(options: TrainOptions) -> None:
    """Trains on this machine until the budget is spent or a signal comes; prints where results are.

    Nobody else can go on with the run meanwhile.

    Raises:
        UsageError: before any process starts, when the environment or the settings cannot be used.
        NodeFailedError: a node ended before its time and was not, or could not be, started again.
    """
    console = PatientConsole()
    with new_run(options) as (options_here, directory, buffer):
        _say_begin(directory.config, console, buffer=buffer)
        run_here(options_here, directory, console, shown=options.root / directory.path.name)


@contextmanager
def new_run(options: TrainOptions) -> Iterator[tuple[TrainOptions, RunDirectory, str | None]]:
    """Checks what was asked for and makes the run's directory, which nobody else works on within the block.

    Gives the options with what was resolved, the directory, and where a buffer on disk lies, in words.

    Raises:
        UsageError: the environment or the settings cannot be used; nothing was made.
    """
    require_utf8(options.root)
    root = options.root.absolute()  # before there is an environment, which may move
    config = with_resolved_id(options.config)
    options = replace(options, root=root, config=config)
    in_rounds, buffer = options.mode in IN_ROUNDS, None
    if in_rounds:
        _require_one_process(options)
    schema = checks.check(config, gpus=options.gpus, starts_actors=not in_rounds, stacked=options.stack)
    if in_rounds:
        room.require_memory(config, schema, gpus=options.gpus)
    else:
        buffer = room.reserve(config, schema, root, gpus=options.gpus)
    directory = _new_directory(options)
    with closing(FolderLock.acquire(directory.path)):
        yield options, directory, buffer


def _require_one_process(options: TrainOptions) -> None:
    """Checks that the run can be one in one process, and as a stack if it shall be."""
    config, flag = options.config, f"--{options.mode}"
    if options.lockstep and options.stack:
        raise ConfigError("--lockstep updates one agent after the other and --stack all at once; give one")
    if config.eval.by == "evaluator":
        raise ConfigError(f"eval.by = evaluator is for nodes; {flag} has none, so leave it out")
    if options.max_restarts is not None:
        raise ConfigError(f"--max-restarts is for nodes; {flag} has none, and its runs are resumed")
    checks.require_one_gpu(options.gpus)
    if options.stack:
        checks.require_stackable(config)


def _say_begin(config: RunConfig, console: Console, *, buffer: str | None) -> None:
    """Says what is trained, where its buffer lies, and what a look at the settings shows."""
    steps = several(config.train.steps, "step")
    each = " each" if config.train.agents > 1 else ""
    say(console, f"{_method(config)} on {config.env.id}, {steps}{each}, seed {config.train.seed}")
    if buffer is not None:
        say(console, buffer)
    for note in notes(config):
        say(console, note)


def notes(config: RunConfig) -> Iterator[str]:
    """What a look at the settings shows that is no error, yet hardly meant."""
    if config.train.steps <= config.start_steps:
        covers = f"agent.start_steps = {config.start_steps} covers the whole run"
        yield f"note: {covers}, so hardly anything is learned; lower it, or train longer"
    if (vain := checks.vain_products(config)) is not None:
        yield f"note: {vain}"


def run_here(
    options: LaunchOptions,
    directory: RunDirectory,
    console: Console,
    *,
    shown: Path,
    resumed: "ResumedRound | None" = None,
) -> None:
    """Runs what is in `directory`, in its mode, until the budget is spent or a signal comes.

    `shown` is how the directory is called in what is printed. A run in one process goes on from `resumed`.
    """
    failures = len(whole_lines(directory.restarts))
    try:
        if directory.run["mode"] in IN_ROUNDS:
            _train_in_rounds(options, directory, console, resumed=resumed)
        else:
            asyncio.run(_train_in_cluster(options, directory, console))
    finally:
        _say_restarts(directory, console, first=failures)
        _say_results(directory, console, shown=shown, program=program(options.command))


def run_name(config: RunConfig) -> str:
    """A folder name that says what the run is and when it began."""
    env = _in_a_name(config.env.id, limit=MAX_BYTES // 2)
    limit = MAX_BYTES // 4 // len(config.algorithms)
    algorithms = "+".join(_in_a_name(each, limit=limit) for each in config.algorithms)
    when = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    method = "dpd" if config.method == "dpd" else f"k{config.train.agents}"
    return f"{env}-{algorithms}-{method}-seed{config.train.seed}-{when}"


def _in_a_name(text: str, *, limit: int) -> str:
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in text)
    return plain.encode()[:limit].decode(errors="ignore")


def tried_names(name: str) -> Iterator[str]:
    """The name, and with -2, -3, ... behind it what stands for it where it is taken."""
    yield name
    yield from (f"{name}-{count}" for count in range(2, SAME_SECOND + 1))


def _new_directory(options: TrainOptions) -> RunDirectory:
    """The run's directory; where an automatic name is taken already, one with -2, -3, ... behind it."""
    name = run_name(options.config) if options.name is None else options.name
    for tried in tried_names(name):
        try:
            return RunDirectory.create(
                options.root, tried, options.config, mode=options.mode, command=options.command
            )
        except RunDirectoryError:
            if options.name is not None or not (options.root / tried).exists():
                raise
    raise RunDirectoryError(f"{options.root / name} and {SAME_SECOND} like it exist; give the run a --name")


def _train_in_rounds(
    options: LaunchOptions, directory: RunDirectory, console: Console, *, resumed: "ResumedRound | None"
) -> None:
    from dase_grpc.launch.lockstep import open_lockstep, run_lockstep

    with (
        halt_event(stdin_is_leash=options.stdin_is_leash) as halt,
        left_as_found(),
        open_lockstep(
            directory.config,
            directory,
            gpu=options.gpu,
            stacked=directory.run["mode"] == "stack",
            resumed=resumed,
            # all kept rounds are whole on the disk
            on_hang=partial(checks.end_hanging, tidy=partial(console.show_cursor, True)),
        ) as run,
        make_display(console, directory.config) as display,
    ):
        drawn_at, ring = 0.0, run.store.ring

        def show(*, every_s: float = 0.0) -> None:
            nonlocal drawn_at
            if time.monotonic() - drawn_at >= every_s:
                display.show(Snapshot(run.progress, len(ring), ring.capacity))
                drawn_at = time.monotonic()

        run_lockstep(run, halt, partial(show, every_s=REDRAW_S))
        show()


async def _train_in_cluster(options: LaunchOptions, directory: RunDirectory, console: Console) -> None:
    tell, resume = partial(say, console), "resumed" in directory.run
    limit = MAX_RESTARTS if options.max_restarts is None else options.max_restarts
    supervisor = Supervisor(directory, tell, limit=limit)
    gpus = checks.check_devices(directory.config, options.gpus)
    cluster = LocalCluster(
        directory.config, directory, supervisor, gpus=gpus, forks=options.forks, resume=resume
    )
    async with stop_event(
        stdin_is_leash=options.stdin_is_leash, on_second=partial(_kill_all, cluster)
    ) as stop:
        await run_cluster(
            cluster,
            stop=stop,
            display=make_display(console, directory.config),
            say=tell,
            on_start=lambda address: tell(f"watch: dase top --replay {address}"),
        )


def _kill_all(cluster: LocalCluster) -> NoReturn:
    """Ends everything at once, as a second Ctrl-C asks for: every node by SIGKILL, then this process."""
    cluster.kill()
    os.write(sys.stderr.fileno(), b"killed: the nodes have kept nothing since their last checkpoints\n")
    os._exit(KILLED_CODE)


def _method(config: RunConfig) -> str:
    names, agents = list(map(algorithm_name, config.algorithms)), config.train.agents
    if config.method == "single":
        return f"one {names[0]} agent"
    told = f"{agents} agents ({', '.join(names)})" if len(names) > 1 else f"{agents} {names[0]} agents"
    how = "that distil each other's policies" if config.method == "dpd" else "sharing one replay"
    return f"{told} {how}"


def _say_restarts(directory: RunDirectory, console: Console, *, first: int) -> None:
    """Says which nodes have failed from failure `first` on, how often they were started again, and why."""
    try:
        failures = read_restarts(directory.restarts)[first:]
    except DaseError as error:
        say(console, f"note: {error}")
    else:
        for node, text in told(failures).items():
            say(console, f"note: {node} was {text}; its log is {directory.logs / f'{node}.log'}")


def _say_results(directory: RunDirectory, console: Console, *, shown: Path, program: str) -> None:
    """Says how the agents did and where everything is; whatever cannot be read is said too."""
    from dase_grpc.runs.reports.report import write_report  # Matplotlib takes half a second to import

    agents, found = directory.agents(), [f"results: {shown}"]
    try:
        for agent in agents:
            _say_agent(agent, directory.config.agent_name(agent.agent_id), console)
        if agents:
            found.append(f"report:  {shown / write_report(directory).name}")
        kept = [max(checkpoint_paths(agent.checkpoints), default=0) for agent in agents]
        if any(kept):
            found.append(f"next:    {program} evaluate {pasted(shown)}")
            total = directory.config.train.steps
            if min(kept) < total:
                left = f"step {min(kept):,} of {total:,} is kept"
                found.append(f"go on:   {program} resume {pasted(shown)}    # {left}")
    except DaseError as error:
        found += [f"no report: {error}"]
    for text in found:
        say(console, text)


def _say_agent(agent: AgentDirectory, name: str, console: Console) -> None:
    """Says how an agent did, and what its environment has done wrong to it, and how often."""
    curve = read_evaluations(agent.evaluations.path)
    if len(curve):
        shown = [0, -1] if len(curve) > 1 else [0]
        told = (f"{number(float(curve.return_mean[i]))} at step {int(curve.step[i]):,}" for i in shown)
        say(console, f"{name}: evaluation return {', '.join(told)}")
    records = read_metrics(agent.metrics.path)
    for key, (what, each, nouns) in BAD_WORLDS.items():
        counted: Counter[str] = Counter()
        for values in records:
            counted.update(values.get(key) or {})
        if counted:
            listed = ", ".join(each.format(*item) for item in sorted(counted.items()))
            count = several(counted.total(), *nouns)
            say(console, f"note: {name} {what.format(counted=count, listed=listed)}")
