"""Runs cells as processes of this machine: so many at a time, in order, each resumed where it can be."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dase_grpc.errors import DISK_FULL_CODE, USAGE_CODE, DaseError
from dase_grpc.launch.console import pasted
from dase_grpc.launch.experiments.folder import ExperimentFolder
from dase_grpc.launch.experiments.matrix import RunCell
from dase_grpc.launch.experiments.scoreboard import Outcome, Scoreboard
from dase_grpc.launch.processes import (
    ERROR_PREFIX,
    PROGRAM,
    STOP_S,
    end_nodes,
    exit_text,
    shortened,
    start_node,
)
from dase_grpc.process.tasks import first_cause, unless
from dase_grpc.runs.files import end_of

STOP_CELL_S: Final = 2 * STOP_S + 10
"""A cluster stops its learners, then its replay, and has `STOP_S` for each."""

LAST_LINE_LENGTH: Final = 200
"""How the sentence begins with which a process of ours ends."""


@dataclass(eq=False)
class CellRunner:
    """Runs the cells of one experiment, in order.

    `jobs` is how many cores there are to keep busy; a cell that needs more runs alone. `locks` are the file
    descriptors that children keep open. `gpu` is what they are told of `--gpu`; None for the CPU. `program`
    is the command that is `dase`.
    """

    folder: ExperimentFolder
    board: Scoreboard
    jobs: int
    locks: Sequence[int]
    gpu: str | None = None
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
            outcome = self._concluded(cell) or await self._go_on(cell, stop)
            if outcome is None:
                if note := self.folder.begin(cell):
                    self.board.say(note)
                self.board.started(cell)
                outcome = await self._try(cell, stop, self._train(cell))
            self.board.ended(cell, outcome)

    def _concluded(self, cell: RunCell) -> Outcome | None:
        """Has a run count that came to its end without a mark; says that its report may be missing."""
        seconds = self.folder.conclude(cell)
        if seconds is None:
            return None
        again = f"dase report {pasted(self.folder.run(cell))}"
        self.board.say(f"{cell.name} was at its last step already; if its report is missing: {again}")
        self.board.started(cell)
        return Outcome("finished", seconds)

    async def _go_on(self, cell: RunCell, stop: asyncio.Event) -> Outcome | None:
        """Resumes what there is of a cell; None where there is nothing, or it cannot be gone on with."""
        step = self.folder.resumable(cell)
        if step is None:
            return None
        self.board.say(f"{cell.name} goes on from step {step:,}")
        self.board.started(cell)
        arguments = ("resume", "--stdin-is-leash", *self._on_gpu(), str(self.folder.run(cell)))
        outcome = await self._try(cell, stop, arguments, again=True)
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
        return ("train", "--stdin-is-leash", *told, *lockstep, *self._on_gpu())

    def _on_gpu(self) -> Sequence[str]:
        return () if self.gpu is None else (f"--gpu={self.gpu}",)

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
            keeps_open=self.locks,
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
