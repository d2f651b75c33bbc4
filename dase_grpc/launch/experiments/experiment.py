"""`dase experiment`: plans the cells, checks them, runs what is missing, says what came of it."""

import asyncio
import contextlib
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from dase_grpc.config.texts import transitions
from dase_grpc.errors import ConfigError, DaseError
from dase_grpc.launch.checks import check_capacity, check_device, probed
from dase_grpc.launch.console import PatientConsole, program, say
from dase_grpc.launch.display import pasted
from dase_grpc.launch.experiments.file import read_experiment
from dase_grpc.launch.experiments.folder import ExperimentFolder, State, score
from dase_grpc.launch.experiments.matrix import Cell, cells_of
from dase_grpc.launch.experiments.runner import CellRunner
from dase_grpc.launch.experiments.scoreboard import Outcome, Reading, Scoreboard
from dase_grpc.launch.storage import free_disk, keeps_on_disk, shown_size
from dase_grpc.process.lifecycle import stop_event
from dase_grpc.progress import duration, number, several
from dase_grpc.replay.buffer.directory import ROWS
from dase_grpc.replay.buffer.durable import reserved_bytes
from dase_grpc.schema import TransitionSchema

ALL_FINISHED: Final = 0
SOME_FAILED: Final = 1
STOPPED: Final = 130
"""Exit codes; 2 is for what is refused before anything starts. 130 is what shells give to a Ctrl-C."""


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

    Raises:
        UsageError: before anything starts, where the file, a cell, or what lies in the folder is wrong.
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
        _say_plan(console, matrix.cells, folder.states(matrix.cells), jobs)
        return ALL_FINISHED
    with folder.locked(partial(say, console)) as lock:
        states = folder.states(matrix.cells)
        todo = [cell for cell in matrix.cells if states[cell.name].kind != "finished"]
        board = Scoreboard(console, todo, done=len(matrix.cells) - len(todo), read=partial(_reading, folder))
        require_disk(todo, schemas, folder.path, jobs=jobs, kept=experiment.keep_buffers)
        if todo:
            _say_plan(console, matrix.cells, states, jobs, listed=False)
            asyncio.run(_run(CellRunner(folder, board, jobs=jobs, lock=lock), todo, board))
        _say_results(console, matrix.cells, folder.states(matrix.cells), board.outcomes)
        return _conclude(console, folder, todo, board.outcomes, options.command)


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_cells(cells: Sequence[Cell]) -> dict[str, TransitionSchema]:
    """Tries each environment out once, and checks each buffer's size; the layouts by the cells' names.

    Raises:
        UsageError: in one sentence that names the cell.
    """
    schemas: dict[str, TransitionSchema] = {}
    found: dict[str, TransitionSchema] = {}
    for cell in cells:
        env = cell.config.env
        key = env.model_dump_json()
        try:
            check_device(cell.config)
            found[cell.name] = schemas[key] = schemas.get(key) or probed(env)
            check_capacity(cell.config, schemas[key])
        except DaseError as error:
            raise type(error)(f"cell {cell.name}: {error}") from None
    return found


async def _run(runner: CellRunner, cells: Sequence[Cell], board: Scoreboard) -> None:
    async with stop_event(stdin_is_leash=False) as stop:
        with board:
            await runner.run(cells, stop)


def _reading(folder: ExperimentFolder, cell: Cell) -> Reading:
    return Reading(folder.step(cell), folder.latest_return(cell))


def _say_plan(
    console: Console, cells: Sequence[Cell], states: Mapping[str, State], jobs: int, *, listed: bool = True
) -> None:
    width = max(len(cell.name) for cell in cells)
    for cell in cells if listed else ():
        state = states[cell.name]
        text = f": {state.text}" if state.text else ""
        say(console, f"{cell.name:<{width}}  {cell.steps:>13,} steps  {state.kind}{text}")
    kinds = Counter(states[cell.name].kind for cell in cells)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    steps = sum(cell.steps for cell in cells if states[cell.name].kind != "finished")
    say(
        console,
        f"{several(len(cells), 'cell')}: {counted}; {several(steps, 'environment step')} to go on "
        f"{several(jobs, 'core')}",
    )


def _say_results(
    console: Console, cells: Sequence[Cell], states: Mapping[str, State], outcomes: Mapping[str, Outcome]
) -> None:
    """One line for each cell: state, the mean of its last 10 evaluations, and the time it took."""
    width = max(len("cell"), *(len(cell.name) for cell in cells))
    say(console, f"{'cell':<{width}}  {'state':<10}  {'final score':>12}  time")
    for cell in cells:
        state, outcome = states[cell.name], outcomes.get(cell.name)
        final = number(score(state.path)) if state.kind == "finished" else "-"
        took = duration(outcome.seconds) if outcome else "-"
        say(console, f"{cell.name:<{width}}  {state.kind:<10}  {final:>12}  {took}")


def _conclude(
    console: Console,
    folder: ExperimentFolder,
    todo: Sequence[Cell],
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
    cells: Sequence[Cell], schemas: Mapping[str, TransitionSchema], root: Path, *, jobs: int, kept: bool
) -> None:
    """Checks that the buffers of the clusters among `cells`, which are still to run, find room below `root`.

    Each takes its whole size from its start on; one that is there already takes nothing more. Those that
    may run at once count, the largest ones, or all of them where finished cells keep theirs.

    Args:
        cells: those that have not finished.
        schemas: the layout of each cell's transitions, by its name.
        root: the experiment's folder.
        jobs: how many cores are kept busy.
        kept: whether the buffers of finished cells stay.

    Raises:
        ConfigError: the disk has no room.
    """
    waiting = [cell for cell in cells if cell.mode == "cluster" and keeps_on_disk(cell.config)]
    if not waiting:
        return
    at_once = len(waiting) if kept else max(1, jobs // min(cell.weight for cell in waiting))
    sizes = sorted((_missing(cell, schemas[cell.name], root) for cell in waiting), reverse=True)[:at_once]
    wanted, free = sum(sizes), free_disk(root)
    if wanted > free:
        why = "cells that finish keep theirs" if kept else f"up to {len(sizes)} run at once"
        raise ConfigError(
            f"the cells' buffers take {shown_size(wanted)} of disk in {root} ({why}), and {shown_size(free)} "
            f"are free; free space there, lower replay.capacity or --jobs, or set replay.storage = 'memory'"
        )


def _missing(cell: Cell, schema: TransitionSchema, root: Path) -> int:
    """What a cell's buffer has still to take."""
    if (root / cell.name / "replay" / ROWS).exists():
        return 0
    return reserved_bytes(schema, transitions(cell.config.replay.capacity, row_bytes=schema.row_bytes))
