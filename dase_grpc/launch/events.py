"""Events of a run as its files tell of them, and new runs that train while their events are taken."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from dase_grpc.errors import UsageError
from dase_grpc.launch.child import ChildRun, configured
from dase_grpc.launch.lockstep import open_lockstep, rounds
from dase_grpc.launch.train import TrainOptions, new_run, notes, run_name, tried_names
from dase_grpc.process.containment import left_as_found
from dase_grpc.process.signals import interrupt_deferred
from dase_grpc.runs.directory import RUN_FILE, AgentDirectory, RunDirectory, checkpoint_paths
from dase_grpc.runs.logs import read_evaluations, read_metrics
from dase_grpc.runs.reports.report import write_report

POLL_S: Final = 0.2
"""How often the files of a run in other processes are looked at."""

_OVER: Final = object()


T = TypeVar("T")


@dataclass(frozen=True)
class Began:
    """The run's directory is there."""

    path: Path


@dataclass(frozen=True)
class Stepped:
    """The agents have come this far: environment steps by agent id, of `total` each."""

    steps: Mapping[int, int]
    total: int


@dataclass(frozen=True)
class Evaluated:
    """An agent's policy was evaluated, without noise."""

    agent: int
    step: int
    return_mean: float
    return_std: float
    episodes: int


@dataclass(frozen=True)
class Updated:
    """What an agent's updates came to since the last time: a line of metrics.jsonl."""

    agent: int
    step: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class Kept:
    """An agent's checkpoint lies on the disk."""

    agent: int
    step: int
    path: Path


@dataclass(frozen=True)
class Ended:
    """The run is over; `finished` says whether every agent has had its last step."""

    steps: Mapping[int, int]
    finished: bool


Event = Began | Stepped | Evaluated | Updated | Kept | Ended


class RunFollower:
    """Tells of what is new in the files of a run, which may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._run: tuple[int, RunDirectory] | None = None
        self._total = 0
        self._seen: dict[Path, tuple[int, int]] = {}
        self._kept: dict[int, set[int]] = {}
        self._steps: dict[int, int] = {}

    def news(self) -> Iterator[Event]:
        """What has come since the last call, agent by agent, and then how far they are, if that is new."""
        before = dict(self._steps)
        if not (self._path / RUN_FILE).exists():
            return
        directory = self._directory()
        self._total = directory.config.train.steps
        for agent in directory.agents():
            yield from self._of_agent(agent)
        if self._steps != before:
            yield Stepped(dict(sorted(self._steps.items())), self._total)

    def _directory(self) -> RunDirectory:
        """The run; run.toml is parsed again only where it was written anew, as for a run that is resumed."""
        written = (self._path / RUN_FILE).stat().st_mtime_ns
        if self._run is None or self._run[0] != written:
            self._run = written, RunDirectory.open(self._path)
        return self._run[1]

    def end(self) -> Ended:
        """The last event."""
        steps = dict(sorted(self._steps.items()))
        return Ended(steps, bool(steps) and min(steps.values()) >= self._total)

    def _of_agent(self, agent: AgentDirectory) -> Iterator[Event]:
        number = agent.agent_id
        for row in self._new(agent.evaluations.path, _evaluations):
            yield self._at(number, Evaluated(number, *row))
        for record in self._new(agent.metrics.path, read_metrics):
            yield self._at(number, Updated(number, int(record["step"]), record))
        kept = checkpoint_paths(agent.checkpoints)
        for step in sorted(kept.keys() - self._kept.setdefault(number, set())):
            self._kept[number].add(step)
            yield self._at(number, Kept(number, step, kept[step]))

    def _at(self, agent: int, event: Evaluated | Updated | Kept) -> Event:
        self._steps[agent] = max(event.step, self._steps.get(agent, 0))
        return event

    def _new(self, path: Path, read: Callable[[Path], list[T]]) -> list[T]:
        """The lines of a log that were not there before; it is read only where it has grown."""
        size, lines = self._seen.get(path, (0, 0))
        now = path.stat().st_size if path.exists() else 0
        if now == size:
            return []
        found = read(path)
        self._seen[path] = now, len(found)
        return found[lines:]


def _evaluations(path: Path) -> list[tuple[int, float, float, int]]:
    found = read_evaluations(path)
    columns = found.step, found.return_mean, found.return_std, found.episodes
    return list(zip(*(column.tolist() for column in columns), strict=True))


# -- streams ------------------------------------------------------------------------------------------


def unheard(line: str) -> None:
    """Says nothing."""


def in_processes(options: TrainOptions, say: Callable[[str], None]) -> Iterator[Event]:
    """The events of a new run of `dase train`; `say` gets what that says, line by line, from another thread.

    Closed before its end, it has the run keep its checkpoints.

    Raises:
        UsageError: what was asked for cannot be done.
        DaseError: the run failed.
    """
    root = options.root.absolute()
    gpu = [] if options.gpus is None else [f"--gpu={options.gpus}"]
    with configured(options.config) as file:
        flags = (f"--config={file}", f"--runs={root}", *gpu)
        for name in [options.name] if options.name is not None else tried_names(run_name(options.config)):
            path = root / name
            if options.name is None and path.exists():
                continue
            arguments = ("train", "--stdin-is-leash", *flags, f"--name={name}")
            try:
                yield from followed(arguments, path, say, command=file.parent.name)
            except UsageError:
                # another run that began in the same second has had the name
                if options.name is not None or not path.exists() or _is_of(path, file.parent.name):
                    raise
            else:
                return


def _is_of(path: Path, command: str) -> bool:
    """Whether the run there is one whose command held these words."""
    return (path / RUN_FILE).exists() and command in str(RunDirectory.open(path).run.get("command"))


def followed(
    arguments: Sequence[str], path: Path, say: Callable[[str], None], *, command: str = ""
) -> Iterator[Event]:
    """The events, from now on, of the run in `path` that `dase` trains with these arguments; raises alike.

    A run whose own command does not hold the words `command` is another, and is not told of.
    """
    follower, begun = RunFollower(path), False
    with ChildRun(arguments, say=say) as child:
        while True:
            ended = child.wait(POLL_S)
            if not begun and _is_of(path, command):
                begun = True
                yield Began(path)
            if begun:
                yield from follower.news()
            if ended:
                break
        child.require_success()
    yield follower.end()


def in_rounds(options: TrainOptions, say: Callable[[str], None]) -> Iterator[Event]:
    """The events of a new run in this process, which trains only while the next one is awaited.

    `say` gets the notes on its settings.

    Closed before its end, or interrupted by Ctrl-C, it keeps a checkpoint of each agent.

    Raises:
        UsageError: what was asked for cannot be done.
        DaseError: the run failed.
    """
    with ExitStack() as stack:
        options, directory, _ = stack.enter_context(new_run(options))
        config = directory.config
        for note in notes(config):
            say(note)
        stack.enter_context(left_as_found())
        run = stack.enter_context(open_lockstep(config, directory, gpu=options.gpu, stacked=options.stack))
        follower, halt = RunFollower(directory.path), threading.Event()
        yield Began(directory.path)
        trained = rounds(run, halt)
        stack.callback(trained.close)
        often = math.gcd(config.eval.every, config.train.log_every, config.train.checkpoint_every)
        while True:
            with interrupt_deferred() as came:
                ended = next(trained, _OVER) is _OVER
            if came.is_set():
                raise KeyboardInterrupt
            if ended:
                break
            if min(learner.steps for learner in run.learners) % often == 0:
                yield from follower.news()
    yield from follower.news()
    write_report(directory)
    yield follower.end()
