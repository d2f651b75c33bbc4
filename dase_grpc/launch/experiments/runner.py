"""`dase experiment`: checks the cells, runs those that are missing as processes, says what came of it."""

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from dase_grpc.errors import DISK_FULL_CODE, USAGE_CODE, ConfigError, DaseError
from dase_grpc.launch import checks
from dase_grpc.launch.console import PatientConsole, pasted, program, say
from dase_grpc.launch.experiments.file import read_experiment
from dase_grpc.launch.experiments.folder import ExperimentFolder
from dase_grpc.launch.experiments.matrix import RunCell, cells_of
from dase_grpc.launch.experiments.scoreboard import Outcome, Scoreboard, say_plan, say_results
from dase_grpc.launch.processes import (
    ERROR_PREFIX,
    PROGRAM,
    STOP_S,
    end_nodes,
    exit_text,
    shortened,
    start_node,
)
from dase_grpc.process.lifecycle import stop_event
from dase_grpc.process.tasks import first_cause, unless
from dase_grpc.progress import several
from dase_grpc.replay.buffer.directory import ROWS
from dase_grpc.runs.files import end_of
from dase_grpc.schema import TransitionSchema

ALL_FINISHED: Final = 0
SOME_FAILED: Final = 1
STOPPED: Final = 130
"""Exit codes; 2 is for what is refused before anything starts. 130 is what shells give to a Ctrl-C."""

STOP_CELL_S: Final = 2 * STOP_S + 10
"""A cluster stops its learners, then its replay, and has `STOP_S` for each."""

LAST_LINE_LENGTH: Final = 200
"""How the sentence begins with which a process of ours ends."""


@dataclass(frozen=True)
class ExperimentOptions:
    """What `dase experiment` is told besides the file; jobs is how many cores it may keep busy."""

    file: Path
    root: Path
    jobs: int | None = None
    dry_run: bool = False
    command: Sequence[str] = ()


def experiment_here(options: ExperimentOptions) -> int:
    """Runs what is missing of an experiment on this machine; returns the exit code.

    Before anything starts it refuses what is wrong in the file, of a cell, or in the folder.
    """
    console = PatientConsole()
    experiment = read_experiment(options.file)
    with contextlib.chdir("."):  # an environment may change the folder
        matrix = cells_of(experiment)
        schemas = check_cells(matrix.cells)
    for note in matrix.notes:
        say(console, f"note: {note}")
    folder = ExperimentFolder(options.root / experiment.name, keep_buffers=experiment.keep_buffers)
    jobs = options.jobs or usable_cores()
    if options.dry_run:
        say_plan(console, matrix.cells, folder.states(matrix.cells), jobs)
        return ALL_FINISHED
    with folder.locked(partial(say, console)) as lock:
        states = folder.states(matrix.cells)
        todo = [cell for cell in matrix.cells if states[cell.name].kind != "finished"]
        board = Scoreboard(console, todo, done=len(matrix.cells) - len(todo), read=folder.reading)
        require_disk(todo, schemas, folder.path, jobs=jobs, kept=experiment.keep_buffers)
        if todo:
            say_plan(console, matrix.cells, states, jobs, listed=False)
            asyncio.run(_run(CellRunner(folder, board, jobs=jobs, lock=lock), todo, board))
        say_results(console, matrix.cells, folder.states(matrix.cells), board.outcomes)
        return _conclude(console, folder, todo, board.outcomes, options.command)


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_cells(cells: Sequence[RunCell]) -> dict[str, TransitionSchema]:
    """Tries each environment out once, and checks each buffer's size; the layouts by the cells' names."""
    tried: dict[str, TransitionSchema] = {}
    found: dict[str, TransitionSchema] = {}
    for cell in cells:
        key = cell.config.env.model_dump_json()
        try:
            checks.check_devices(cell.config)
            found[cell.name] = tried[key] = tried.get(key) or checks.probed(cell.config.env)
            checks.check_capacity(cell.config, tried[key])
        except DaseError as error:
            raise type(error)(f"cell {cell.name}: {error}") from None
    return found


async def _run(runner: "CellRunner", cells: Sequence[RunCell], board: Scoreboard) -> None:
    async with stop_event(stdin_is_leash=False) as stop:
        with board:
            await runner.run(cells, stop)


def _conclude(
    console: Console,
    folder: ExperimentFolder,
    todo: Sequence[RunCell],
    outcomes: Mapping[str, Outcome],
    command: Sequence[str],
) -> int:
    """Says how to go on; the exit code."""
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


def require_disk(
    cells: Sequence[RunCell], schemas: Mapping[str, TransitionSchema], root: Path, *, jobs: int, kept: bool
) -> None:
    """Checks that the buffers of the clusters among `cells`, which are still to run, find room below `root`.

    Each takes its whole size from its start on; one that is there already takes nothing more. Those that
    may run at once on `jobs` cores count, the largest ones, or all where finished cells keep theirs (`kept`).
    `schemas` are the layouts of the cells' transitions, by name.
    """
    waiting = [cell for cell in cells if cell.mode == "cluster" and checks.keeps_on_disk(cell.config)]
    if not waiting:
        return
    at_once = len(waiting) if kept else max(1, jobs // min(cell.weight for cell in waiting))
    missing = [cell for cell in waiting if not (root / cell.name / "replay" / ROWS).exists()]
    sizes = (checks.disk_bytes(cell.config, schemas[cell.name]) for cell in missing)
    wanted, free = sum(sorted(sizes, reverse=True)[:at_once]), checks.free_disk(root)
    if wanted > free:
        why = "cells that finish keep theirs" if kept else f"up to {min(at_once, len(waiting))} run at once"
        shown, left = checks.shown_size(wanted), checks.shown_size(free)
        raise ConfigError(
            f"the cells' buffers take {shown} of disk in {root} ({why}), and {left} are free; free space "
            f"there, lower replay.capacity or --jobs, or set replay.storage = 'memory'"
        )


@dataclass(eq=False)
class CellRunner:
    """Runs the cells of one experiment, in order.

    `jobs` is how many cores there are to keep busy; a cell that needs more runs alone. `lock` is the
    file descriptor that children keep open. `program` is the command that is `dase`.
    """

    folder: ExperimentFolder
    board: Scoreboard
    jobs: int
    lock: int
    program: Sequence[str] = PROGRAM

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.jobs)
        self._next = asyncio.Lock()

    async def run(self, cells: Sequence[RunCell], stop: asyncio.Event) -> None:
        """Returns when every cell has ended, or after `stop` when those that ran have kept their state.

        How a cell ended stands on the scoreboard; one that fails does not end the others.
        """
        with first_cause():
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(job) for job in (self._show(), self._tell_of(stop))]
                await asyncio.wait([tasks.create_task(self._cell(cell, stop)) for cell in cells])
                for task in beside:
                    task.cancel()

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(self.board.every_s)
            self.board.show()

    async def _tell_of(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.board.say("stopping: the running cells keep their checkpoints (Ctrl-C kills)")

    async def _cell(self, cell: RunCell, stop: asyncio.Event) -> None:
        async with self._room(cell):
            if stop.is_set():
                return
            outcome = await self._go_on(cell, stop)
            if outcome is None:
                if note := self.folder.begin(cell):
                    self.board.say(note)
                self.board.started(cell)
                outcome = await self._try(cell, stop, self._train(cell))
            self.board.ended(cell, outcome)

    async def _go_on(self, cell: RunCell, stop: asyncio.Event) -> Outcome | None:
        """Resumes what there is of a cell; None where there is nothing, or it cannot be gone on with."""
        step = self.folder.resumable(cell)
        if step is None:
            return None
        self.board.say(f"{cell.name} goes on from step {step:,}")
        self.board.started(cell)
        outcome = await self._try(
            cell, stop, ("resume", "--stdin-is-leash", str(self.folder.run(cell))), again=True
        )
        if outcome.refused:
            self.board.say(f"{cell.name} cannot be resumed: {outcome.text}")
            return None
        return outcome

    async def _try(
        self, cell: RunCell, stop: asyncio.Event, arguments: Sequence[str], *, again: bool = False
    ) -> Outcome:
        """Runs a cell's process to its end, or until `stop`.

        What was refused when it was tried `again`, before the run went on, is no failure of the cell. After
        a SIGKILL, a full disk, and a usage error of a run that had gone on, it is resumed the next time: it
        would have to start over else.
        """
        began, resumed = time.monotonic(), self.folder.times_resumed(cell)
        code = 0
        try:
            code = await self._process(cell, stop, arguments, again=again)
        except OSError as error:
            reason: str | None = f"no process could be started: {error.strerror or error}"
        else:
            reason = self._unfinished(cell, code, seconds=time.monotonic() - began)
        seconds = time.monotonic() - began
        if reason is None:
            return Outcome("finished", seconds)
        if stop.is_set():
            return Outcome("stopped", seconds)
        usage = again and code == USAGE_CODE
        refused = usage and self.folder.times_resumed(cell) == resumed
        if not usage and code >= 0 and code != DISK_FULL_CODE:
            self.folder.fail(cell, reason)
        return Outcome("failed", seconds, reason, refused=refused)

    @asynccontextmanager
    async def _room(self, cell: RunCell) -> AsyncIterator[None]:
        """Waits for enough free cores; who came first goes first, so that a large cell is not passed by."""
        taken = 0
        try:
            async with self._next:
                while taken < min(cell.weight, self.jobs):
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()

    def _train(self, cell: RunCell) -> Sequence[str]:
        """The arguments of a process that trains the cell from the beginning."""
        lockstep, folder = ("--lockstep",) if cell.mode == "lockstep" else (), self.folder
        told = (f"--config={folder.config(cell)}", f"--runs={folder.path}", f"--name={cell.name}")
        return ("train", "--stdin-is-leash", *told, *lockstep)

    async def _process(
        self, cell: RunCell, stop: asyncio.Event, arguments: Sequence[str], *, again: bool
    ) -> int:
        """Runs the cell's process to its end, or until `stop`; its exit code."""
        node = await start_node(
            cell.name,
            (*self.program, *arguments),
            log=self.folder.log(cell),
            threads=cell.config.train.threads,
            again=again,
            keeps_open=(self.lock,),
        )
        try:
            await unless(stop, node.ended())
        finally:
            await end_nodes([node], within_s=STOP_CELL_S)
        return await node.ended()

    def _unfinished(self, cell: RunCell, code: int, *, seconds: float) -> str | None:
        """Marks a run that is complete as finished, or says why it is not."""
        log = self.folder.log(cell)
        if code:
            return f"{exit_text(code)}, {last_words(log)}; its log is {log}"
        try:
            reason = self.folder.finish(cell, seconds=seconds)
        except (DaseError, OSError) as error:
            reason = str(error)
        return reason and f"{reason}; its log is {log}"


def last_words(log: Path) -> str:
    """The line of a log that names its error, and the last one that says something, if that is another."""
    try:
        text = end_of(log)
    except OSError as error:
        return f"and its log cannot be read ({error.strerror or error})"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "its log is empty"
    errors = [line for line in lines if line.startswith(ERROR_PREFIX)]
    return " ".join(shortened(line, LAST_LINE_LENGTH) for line in dict.fromkeys([*errors[-1:], lines[-1]]))
