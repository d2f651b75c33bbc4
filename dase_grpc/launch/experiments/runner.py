"""The runner of cells: child processes, as many at a time as there are cores for; none outlives this one."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from dase_grpc.errors import DISK_FULL_CODE, USAGE_CODE, DaseError
from dase_grpc.launch.experiments.folder import ExperimentFolder
from dase_grpc.launch.experiments.matrix import Cell
from dase_grpc.launch.experiments.scoreboard import Outcome, Scoreboard
from dase_grpc.launch.local import PROGRAM
from dase_grpc.launch.processes import STOP_S, Node, end_nodes, exit_text, start_node
from dase_grpc.process.tasks import first_cause, unless
from dase_grpc.runs.files import end_of

STOP_CELL_S: Final = 2 * STOP_S + 10
"""A cluster stops its learners, then its replay, and has `STOP_S` for each."""

LAST_LINE_LENGTH: Final = 200
ERROR_PREFIX: Final = "error: "
"""How the sentence begins with which a process of ours ends."""


class CellRunner:
    """Runs the cells of one experiment, in order.

    `jobs` is how many cores there are to keep busy; a cell that needs more runs alone. `lock` is the
    file descriptor that children keep open. `program` is the command that is `dase`.
    """

    def __init__(
        self,
        folder: ExperimentFolder,
        board: Scoreboard,
        *,
        jobs: int,
        lock: int,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._folder = folder
        self._board = board
        self._jobs = jobs
        self._lock = lock
        self._program = program
        self._free = asyncio.Semaphore(jobs)
        self._next = asyncio.Lock()

    async def run(self, cells: Sequence[Cell], stop: asyncio.Event) -> None:
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
            await asyncio.sleep(self._board.every_s)
            self._board.show()

    async def _tell_of(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._board.say("stopping: the running cells keep their checkpoints (Ctrl-C kills)")

    async def _cell(self, cell: Cell, stop: asyncio.Event) -> None:
        async with self._room(cell):
            if stop.is_set():
                return
            outcome = await self._go_on(cell, stop)
            if outcome is None:
                if note := self._folder.begin(cell):
                    self._board.say(note)
                self._board.started(cell)
                outcome = await self._try(cell, stop, self._train(cell))
            self._board.ended(cell, outcome)

    async def _go_on(self, cell: Cell, stop: asyncio.Event) -> Outcome | None:
        """Resumes what there is of a cell; None where there is nothing, or it cannot be gone on with."""
        step = self._folder.resumable(cell)
        if step is None:
            return None
        self._board.say(f"{cell.name} goes on from step {step:,}")
        self._board.started(cell)
        outcome = await self._try(cell, stop, self._resume(cell), again=True)
        if outcome.refused:
            self._board.say(f"{cell.name} cannot be resumed: {outcome.text}")
            return None
        return outcome

    async def _try(
        self, cell: Cell, stop: asyncio.Event, arguments: Sequence[str], *, again: bool = False
    ) -> Outcome:
        """Runs a cell's process to its end, or until `stop`.

        What was refused when it was tried `again`, before the run went on, is no failure of the cell. After
        a SIGKILL, a full disk, and a usage error of a run that had gone on, it is resumed the next time: it
        would have to start over else.
        """
        began, resumed = time.monotonic(), self._folder.times_resumed(cell)
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
        refused = usage and self._folder.times_resumed(cell) == resumed
        if not usage and code >= 0 and code != DISK_FULL_CODE:
            self._folder.fail(cell, reason)
        return Outcome("failed", seconds, reason, refused=refused)

    @asynccontextmanager
    async def _room(self, cell: Cell) -> AsyncIterator[None]:
        """Waits for enough free cores; who came first goes first, so that a large cell is not passed by."""
        taken = 0
        try:
            async with self._next:
                while taken < min(cell.weight, self._jobs):
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()

    def _train(self, cell: Cell) -> Sequence[str]:
        """The arguments of a process that trains the cell from the beginning."""
        return (
            "train",
            "--stdin-is-leash",
            f"--config={self._folder.config(cell)}",
            f"--runs={self._folder.path}",
            f"--name={cell.name}",
            *(("--lockstep",) if cell.mode == "lockstep" else ()),
        )

    def _resume(self, cell: Cell) -> Sequence[str]:
        """The arguments of a process that goes on with the cell."""
        return ("resume", "--stdin-is-leash", str(self._folder.run(cell)))

    async def _process(
        self, cell: Cell, stop: asyncio.Event, arguments: Sequence[str], *, again: bool
    ) -> int:
        """Runs the cell's process to its end, or until `stop`; its exit code."""
        node = await start_node(
            cell.name,
            (*self._program, *arguments),
            log=self._folder.log(cell),
            threads=cell.config.train.threads,
            again=again,
            keeps_open=(self._lock,),
        )
        try:
            await unless(stop, node.ended())
        finally:
            await end_nodes([node], within_s=STOP_CELL_S)
        return _exit_code(node)

    def _unfinished(self, cell: Cell, code: int, *, seconds: float) -> str | None:
        """Marks a run that is complete as finished, or says why it is not."""
        log = self._folder.log(cell)
        if code:
            return f"{exit_text(code)}, {last_words(log)}; its log is {log}"
        try:
            reason = self._folder.finish(cell, seconds=seconds)
        except (DaseError, OSError) as error:
            reason = str(error)
        return reason and f"{reason}; its log is {log}"


def _exit_code(node: Node) -> int:
    if node.process.returncode is None:
        raise TypeError(f"{node.name} still runs")
    return node.process.returncode


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
    return " ".join(map(_shortened, dict.fromkeys([*errors[-1:], lines[-1]])))


def _shortened(line: str) -> str:
    return line if len(line) <= LAST_LINE_LENGTH else f"{line[: LAST_LINE_LENGTH - 3]}..."
