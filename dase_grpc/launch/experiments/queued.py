"""Queued cells: what has become of those that a cluster's jobs run, read from files, while they run."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dase_grpc.errors import ConfigError, SchedulerError
from dase_grpc.launch.experiments.folder import ExperimentFolder, State
from dase_grpc.launch.experiments.matrix import RunCell
from dase_grpc.launch.experiments.runner import last_words
from dase_grpc.launch.experiments.scoreboard import Outcome, Scoreboard
from dase_grpc.launch.experiments.slurm import Task
from dase_grpc.process.tasks import first_cause, unless

ASK_EVERY_S: Final = 10.0
"""How often Slurm is asked; sites do not like it to be often."""


def states_beside(
    folder: ExperimentFolder, cells: Sequence[RunCell], tasks: Mapping[str, Task]
) -> dict[str, State]:
    """The state of each cell by its name; those with a task are queued, and their files may change.

    Raises:
        ConfigError: a cell's name is queued with other settings.
    """
    states = folder.states([cell for cell in cells if cell.name not in tasks])
    for cell in cells:
        if (task := tasks.get(cell.name)) is None:
            continue
        if task.identity != cell.identity:
            raise ConfigError(
                f"cell {cell.name} is queued with other settings as job {task.job}; wait for its end, or end "
                f"it: scancel {task.job}"
            )
        states[cell.name] = State("queued", folder.run(cell), f"job {task.job} is {task.state.lower()}")
    return {cell.name: states[cell.name] for cell in cells}


@dataclass(eq=False)
class QueuedCells:
    """Follows cells that a cluster's jobs run, on the scoreboard.

    How far they are stands in their files. `ask` tells which of them still have a task; it may block, and is
    asked every `ask_every_s` seconds.
    """

    folder: ExperimentFolder
    board: Scoreboard
    ask: Callable[[], Mapping[str, Task]]
    ask_every_s: float = ASK_EVERY_S
    _latest: dict[str, Task] = field(default_factory=dict, init=False)
    _since: dict[str, float] = field(default_factory=dict, init=False)
    _answers: bool = field(default=True, init=False)

    async def follow(self, cells: Sequence[RunCell], stop: asyncio.Event) -> None:
        """Returns when every cell has ended or has no task any more, or at `stop`."""
        with first_cause():
            async with asyncio.TaskGroup() as tasks:
                shown = tasks.create_task(self._show())
                left = list(cells)
                while left and not stop.is_set():
                    queued = await asyncio.to_thread(self._ask)
                    left = [cell for cell in left if not self._has_ended(cell, queued)]
                    if left:
                        await unless(stop, asyncio.sleep(self.ask_every_s))
                shown.cancel()

    async def _show(self) -> None:
        while True:
            self.board.show()
            await asyncio.sleep(self.board.every_s)

    def _ask(self) -> Mapping[str, Task] | None:
        """What has a task; None where that is not told."""
        try:
            queued = self.ask()
        except SchedulerError as error:
            if self._answers:
                self.board.say(f"note: {error}; it is asked again every {self.ask_every_s:g} s")
            self._answers = False
            return None
        self._answers = True
        self._latest |= queued
        return queued

    def _has_ended(self, cell: RunCell, queued: Mapping[str, Task] | None) -> bool:
        """Looks at a cell and tells the scoreboard; its files are read after its task was asked for."""
        ended = self.folder.ended(cell)
        finished = ended is not None and ended.kind == "finished"
        gone = finished or (queued is not None and cell.name not in queued)
        if cell.name not in self._since and (gone or (queued and queued[cell.name].runs)):
            self._since[cell.name] = time.monotonic()
            self.board.started(cell)
        if gone:
            self.board.ended(cell, self._outcome(cell, ended))
        return gone

    def _outcome(self, cell: RunCell, ended: State | None) -> Outcome:
        if ended is not None and ended.kind == "finished":
            return Outcome("finished", self.folder.took_s(cell))
        seconds = time.monotonic() - self._since[cell.name]
        if ended is not None:
            return Outcome("failed", seconds, ended.text)
        if (task := self._latest.get(cell.name)) is None:
            return Outcome("stopped", seconds, "Slurm has no job of it any more")
        return Outcome(
            "stopped", seconds, f"job {task.job} has ended, {last_words(task.log)}; its log is {task.log}"
        )
