"""`dase experiment`: checks the cells, has those that are missing run, says what came of it."""

import asyncio
import contextlib
import difflib
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dase_grpc.config.gpus import Gpus
from dase_grpc.errors import ConfigError, DaseError
from dase_grpc.launch import checks, room
from dase_grpc.launch.console import PatientConsole, pasted, program, say
from dase_grpc.launch.experiments.file import ExperimentFile, read_experiment
from dase_grpc.launch.experiments.folder import ExperimentFolder, State
from dase_grpc.launch.experiments.kubernetes import CellsJob, apply, yaml_text
from dase_grpc.launch.experiments.matrix import RunCell, cells_of
from dase_grpc.launch.experiments.queued import QueuedCells, states_beside
from dase_grpc.launch.experiments.runner import CellRunner
from dase_grpc.launch.experiments.scoreboard import Outcome, Scoreboard, say_plan, say_results
from dase_grpc.launch.experiments.sites import Place
from dase_grpc.launch.experiments.slurm import SlurmQueue, require_slurm
from dase_grpc.launch.experiments.task import ALL_FINISHED, NOTHING_KEPT, SOME_FAILED, STOPPED
from dase_grpc.launch.processes import PROGRAM
from dase_grpc.process.lifecycle import stop_event
from dase_grpc.progress import several
from dase_grpc.replay.buffer.directory import ROWS
from dase_grpc.runs.files import require_utf8
from dase_grpc.schema import TransitionSchema


@dataclass(frozen=True)
class ExperimentOptions:
    """What `dase experiment` is told besides the file.

    jobs is how many cores it may keep busy on this machine; cell the one that alone is run here, on `gpu`.
    Slurm's queue is left to itself where it is not to `wait`; a Job of Kubernetes is printed, or given to the
    cluster where it is to `apply`.
    """

    file: Path
    root: Path
    jobs: int | None = None
    dry_run: bool = False
    command: Sequence[str] = ()
    place: Place = "local"
    wait: bool = True
    apply: bool = False
    cell: str | None = None
    gpu: str | None = None

    @property
    def gpus(self) -> Gpus | None:
        """Those of the one cell that is run here; None for the CPU."""
        return None if self.gpu is None else Gpus.parse(self.gpu)


@dataclass(frozen=True)
class _Checked:
    """An experiment whose cells can all be run."""

    options: ExperimentOptions
    experiment: ExperimentFile
    cells: Sequence[RunCell]
    schemas: Mapping[str, TransitionSchema]
    folder: ExperimentFolder
    console: PatientConsole

    def require_room(self, cells: Sequence[RunCell], *, at_once: int, limit: str) -> None:
        """Checks that `cells`, which are to run on this machine, find room on its disk and in its memory."""
        self.require_disk(cells, at_once=at_once, limit=limit)
        require_memory(cells, self.schemas, at_once=at_once, gpus=self.options.gpus, limit=limit)

    def require_disk(self, cells: Sequence[RunCell], *, at_once: int, limit: str) -> None:
        """Checks that the buffers of `cells` find room (`require_disk`)."""
        kept = self.experiment.keep_buffers
        require_disk(cells, self.schemas, self.folder.path, at_once=at_once, kept=kept, limit=limit)


def experiment_here(options: ExperimentOptions) -> int:
    """Has what is missing of an experiment run, here or by a cluster's jobs; returns the exit code.

    Before anything starts it refuses what is wrong in the file, of a cell, or in the folder.
    """
    _require_sense(options)
    checked = _checked(options)
    if options.cell is not None:
        return _run_one(checked, checked.cells[0])
    if options.place == "slurm":
        return _run_on_slurm(checked)
    if options.place == "kubernetes":
        return _run_on_kubernetes(checked)
    return _run_here(checked)


def _require_sense(options: ExperimentOptions) -> None:
    """Checks that flags mean something beside each other."""
    if options.cell is not None and (options.place != "local" or options.jobs or options.dry_run):
        raise ConfigError("--cell runs one cell here; leave --on, --jobs and --dry-run out")
    if options.gpu is not None and options.cell is None:
        raise ConfigError("--gpu is for one cell, beside --cell; an experiment here trains on the CPU")
    if options.place != "local" and options.jobs is not None:
        raise ConfigError(
            f"--jobs counts cores of this machine; how many cells --on {options.place} runs at once is "
            f"at_once in [{options.place}] of the file"
        )
    if options.place != "slurm" and not options.wait:
        raise ConfigError("--no-wait leaves what is queued to itself; it is for --on slurm")
    if options.place != "kubernetes" and options.apply:
        raise ConfigError("--apply gives a Job to a cluster; it is for --on kubernetes")


def _checked(options: ExperimentOptions) -> _Checked:
    """Reads the file and tries everything out that does not depend on the folder."""
    prints = options.place == "kubernetes"
    console = PatientConsole(stderr=prints)  # stdout is for the manifest
    experiment = read_experiment(options.file)
    require_utf8(options.root)
    # an environment may change the folder, and print
    with contextlib.chdir("."), contextlib.redirect_stdout(sys.stderr if prints else sys.stdout):
        matrix = cells_of(experiment)
        cells = matrix.cells if options.cell is None else [_named(options.cell, matrix.cells)]
        schemas = check_cells(cells, gpus=options.gpus)
    for note in matrix.notes if options.cell is None else ():
        say(console, f"note: {note}")
    folder = ExperimentFolder(options.root / experiment.name, keep_buffers=experiment.keep_buffers)
    return _Checked(options, experiment, cells, schemas, folder, console)


def _named(given: str, cells: Sequence[RunCell]) -> RunCell:
    name = _name_in_list(given) if given.startswith("@") else given
    for cell in cells:
        if cell.name == name:
            return cell
    near = difflib.get_close_matches(name, [cell.name for cell in cells], n=1)
    hint = f"did you mean {near[0]}?" if near else "--dry-run lists them"
    raise ConfigError(f"--cell {name!r} is no cell of the experiment; {hint}")


def _name_in_list(given: str) -> str:
    """The name that `@FILE:N` stands for: that in line N, from 0 on, of a file."""
    path, _, number = given.removeprefix("@").rpartition(":")
    try:
        return dict(enumerate(Path(path).read_text(encoding="utf-8").splitlines()))[int(number)]
    except OSError as error:
        raise ConfigError(f"--cell {given}: cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError):
        raise ConfigError(f"--cell {given} is no line of a file; write @FILE:N, with N from 0 on") from None


def _run_here(checked: _Checked) -> int:
    """Runs all that is missing on this machine."""
    console, folder, cells = checked.console, checked.folder, checked.cells
    jobs = checked.options.jobs or usable_cores()
    where = f"on {several(jobs, 'core')}"
    if checked.options.dry_run:
        states = folder.states(cells)
        say_plan(console, cells, states, where)
        todo = _unfinished(cells, states)
        checked.require_room(todo, at_once=cells_at_once(todo, jobs), limit="--jobs")
        return ALL_FINISHED
    with folder.locks.all_cells(partial(say, console)) as lock:
        states = folder.states(cells)
        todo = _unfinished(cells, states)
        board = Scoreboard(console, todo, done=len(cells) - len(todo), read=folder.reading)
        checked.require_room(todo, at_once=cells_at_once(todo, jobs), limit="--jobs")
        if todo:
            say_plan(console, cells, states, where, listed=False)
            runner = CellRunner(folder, board, jobs=jobs, locks=(lock,))
            asyncio.run(_shown(partial(runner.run, todo), board))
        say_results(console, cells, folder.states(cells), board.outcomes)
        return _conclude(checked, todo, board.outcomes)


def _run_one(checked: _Checked, cell: RunCell) -> int:
    """Runs one cell on this machine, while others may run the others; says how it ended."""
    console, folder = checked.console, checked.folder
    with folder.locks.one_cell(cell.name, partial(say, console)) as locks:
        if folder.states([cell])[cell.name].kind == "finished":
            say(console, f"{cell.name} is finished already")
            return ALL_FINISHED
        checked.require_room([cell], at_once=1, limit="at_once")
        board = Scoreboard(console, [cell], done=0, read=folder.reading)
        runner = CellRunner(folder, board, jobs=cell.weight, locks=locks, gpu=checked.options.gpu)
        before = folder.kept_step(cell)
        asyncio.run(_shown(partial(runner.run, [cell]), board))
        outcome = board.outcomes.get(cell.name)
        if outcome is None or outcome.kind == "stopped":
            return STOPPED if folder.kept_step(cell) > before else NOTHING_KEPT
        return ALL_FINISHED if outcome.kind == "finished" else SOME_FAILED


def _run_on_slurm(checked: _Checked) -> int:
    """Queues all that is missing and not queued yet, and waits for it where that is asked for."""
    require_slurm()
    console, folder, cells = checked.console, checked.folder, checked.cells
    queue = SlurmQueue(folder.queue)
    where = f"by jobs of Slurm, at most {checked.experiment.slurm.at_once} at once"
    if checked.options.dry_run:
        say_plan(console, cells, states_beside(folder, cells, queue.tasks()), where)
        return ALL_FINISHED
    with folder.locks.queueing():
        states = states_beside(folder, cells, queue.tasks())
        todo = _unfinished(cells, states)
        if todo:
            say_plan(console, cells, states, where, listed=False)
            _queue(checked, [cell for cell in todo if states[cell.name].kind != "queued"], queue)
            if not checked.options.wait:
                say(console, "not waited for; the same command without --no-wait follows what is queued")
                return ALL_FINISHED
        return _follow(checked, todo, queue)


def _queue(checked: _Checked, cells: Sequence[RunCell], queue: SlurmQueue) -> None:
    """Gives cells to Slurm, if there are any."""
    site, name = checked.experiment.slurm, checked.experiment.name
    checked.require_disk(cells, at_once=site.at_once, limit="slurm.at_once")
    if cells:
        job_name = queue.submit(checked.options.file, cells, site, name=name, command=PROGRAM)
        say(checked.console, f"{several(len(cells), 'cell')} queued as {job_name}")


def _follow(checked: _Checked, todo: Sequence[RunCell], queue: SlurmQueue) -> int:
    """Shows how queued cells get on until all have ended, or a signal comes, which leaves them queued."""
    console, folder, cells = checked.console, checked.folder, checked.cells
    board = Scoreboard(console, todo, done=len(cells) - len(todo), read=folder.reading)
    if todo:
        asyncio.run(_shown(partial(QueuedCells(folder, board, queue.tasks).follow, todo), board))
    tasks = {} if len(board.outcomes) == len(todo) else queue.tasks()
    say_results(console, cells, states_beside(folder, cells, tasks), board.outcomes)
    if tasks:
        jobs = sorted({task.job.partition("_")[0] for task in tasks.values()})
        say(console, f"what is queued stays queued; to end it: scancel {' '.join(jobs)}")
    return _conclude(checked, todo, board.outcomes)


def _run_on_kubernetes(checked: _Checked) -> int:
    """Prints the Job of all that is missing, or gives it to the cluster."""
    console, site, options = checked.console, checked.experiment.kubernetes, checked.options
    if site is None:
        raise ConfigError(
            f"--on kubernetes needs a table [kubernetes] in {options.file}, with image and claim at least"
        )
    states = checked.folder.states(checked.cells)
    where = f"by a Job of Kubernetes, at most {site.at_once} cells at once"
    say_plan(console, checked.cells, states, where, listed=options.dry_run)
    todo = _unfinished(checked.cells, states)
    if options.dry_run or not todo:
        return ALL_FINISHED
    job = CellsJob(checked.experiment.name, options.file.read_text(encoding="utf-8"), todo, site)
    if not options.apply:
        sys.stdout.write(yaml_text(job.manifests()))
        return ALL_FINISHED
    apply(job)
    follow = f"kubectl --namespace={site.namespace} get job {job.job_name}"
    say(console, f"{several(len(todo), 'cell')} are given to job {job.job_name}; to follow it: {follow}")
    return ALL_FINISHED


def _unfinished(cells: Sequence[RunCell], states: Mapping[str, State]) -> list[RunCell]:
    return [cell for cell in cells if states[cell.name].kind != "finished"]


async def _shown(work: Callable[[asyncio.Event], Awaitable[None]], board: Scoreboard) -> None:
    """Works until the end or a signal, with the scoreboard on the screen."""
    async with stop_event(stdin_is_leash=False) as stop:
        with board:
            await work(stop)


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_cells(cells: Sequence[RunCell], gpus: Gpus | None = None) -> dict[str, TransitionSchema]:
    """Checks each cell as a run of its own, but for its room; the layouts by the cells' names."""
    looks, found = checks.Checks(gpus, here=False), dict[str, TransitionSchema]()
    for cell in cells:
        with _named_by(cell):
            if cell.mode == "lockstep":
                checks.require_one_gpu(gpus)
            found[cell.name] = looks.check(cell.config, starts_actors=cell.mode == "cluster")
    return found


@contextlib.contextmanager
def _named_by(cell: RunCell) -> Iterator[None]:
    try:
        yield
    except DaseError as error:
        raise type(error)(f"cell {cell.name}: {error}") from None


def _conclude(checked: _Checked, todo: Sequence[RunCell], outcomes: Mapping[str, Outcome]) -> int:
    """Says how to go on; the exit code."""
    console, folder, command = checked.console, checked.folder, checked.options.command
    called = program(command)
    failed = [name for name, outcome in outcomes.items() if outcome.kind == "failed"]
    for name in failed:
        say(console, f"failed: {name}: {outcomes[name].text}")
    say(console, f"results: {folder.path}")
    again = f"{called} {shlex.join(command[1:])}"
    if any(cell.name not in outcomes or outcomes[cell.name].kind == "stopped" for cell in todo):
        say(console, f"stopped before the end; to go on: {again}")
        return STOPPED
    if failed:
        say(console, f"{len(failed)} of {several(len(todo), 'cell')} failed; to try again: {again}")
        return SOME_FAILED
    say(console, f"all cells are finished; next: {called} compare {pasted(folder.path)}")
    return ALL_FINISHED


def cells_at_once(cells: Sequence[RunCell], jobs: int) -> int:
    """How many of the cells run at once, at most, on so many cores; one that needs more runs alone."""
    return max(1, jobs // min((cell.weight for cell in cells), default=1))


def require_disk(
    cells: Sequence[RunCell],
    schemas: Mapping[str, TransitionSchema],
    root: Path,
    *,
    at_once: int,
    kept: bool,
    limit: str,
) -> None:
    """Checks that the buffers of the clusters among `cells`, which are still to run, find room below `root`.

    Each takes its whole size from its start on; one that is there already takes nothing more. Those that
    may run `at_once` count, the largest ones, or all where finished cells keep theirs (`kept`). `schemas` are
    the layouts of the cells' transitions, by name, `limit` what is to be lowered for fewer at once.
    """
    waiting = [cell for cell in cells if cell.mode == "cluster" and room.keeps_on_disk(cell.config)]
    if not waiting:
        return
    at_once = len(waiting) if kept else at_once
    missing = [cell for cell in waiting if not (root / cell.name / "replay" / ROWS).exists()]
    sizes = (room.disk_bytes(cell.config, schemas[cell.name]) for cell in missing)
    wanted, free = sum(sorted(sizes, reverse=True)[:at_once]), room.free_disk(root)
    if wanted > free:
        why = "cells that finish keep theirs" if kept else f"up to {min(at_once, len(waiting))} run at once"
        shown, left = room.shown_size(wanted), room.shown_size(free)
        raise ConfigError(
            f"the cells' buffers take {shown} of disk in {root} ({why}), and {left} are free; free space "
            f"there, lower replay.capacity or {limit}, or set replay.storage = 'memory'"
        )


def require_memory(
    cells: Sequence[RunCell],
    schemas: Mapping[str, TransitionSchema],
    *,
    at_once: int,
    gpus: Gpus | None,
    limit: str,
) -> None:
    """Checks that buffers in memory and networks find room there, of those cells that may run `at_once`.

    The arguments are as those of `require_disk`.
    """
    sizes = {}
    for cell in cells:
        in_memory = cell.mode == "lockstep" or not room.keeps_on_disk(cell.config)
        with _named_by(cell):
            buffer = room.buffer_bytes(cell.config, schemas[cell.name]) if in_memory else 0
        sizes[cell.name] = buffer + room.networks_bytes(cell.config, schemas[cell.name], gpus)
    largest = sorted(sizes, key=lambda name: -sizes[name])[:at_once]
    wanted, free = sum(sizes[name] for name in largest), room.free_memory()
    if wanted > free:
        what = f"cell {largest[0]} takes" if len(largest) == 1 else f"{len(largest)} cells at once take"
        instead = (
            "replay.capacity or agent.hidden" if at_once == 1 else f"{limit}, replay.capacity or agent.hidden"
        )
        raise ConfigError(
            f"{what} at least {room.shown_size(wanted)} of memory for buffer and networks, and "
            f"{room.shown_size(free)} are available; lower {instead}, or end what else takes memory"
        )
