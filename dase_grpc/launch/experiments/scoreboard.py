"""How an experiment stands: a live table on a terminal, plain lines elsewhere."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dase_grpc.launch.console import say
from dase_grpc.launch.experiments.matrix import Cell
from dase_grpc.launch.time_left import ExperimentTimeLeft
from dase_grpc.progress import duration, number, several

REDRAW_S: Final = 1.0
PLAIN_EVERY_S: Final = 60.0


@dataclass(frozen=True)
class Outcome:
    """How one try of a cell ended; text says why where it did not finish.

    It is `refused` where nothing was tried, since what there was of the cell could not be gone on with.
    """

    kind: Literal["finished", "failed", "stopped"]
    seconds: float
    text: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Reading:
    """How far a running cell's slowest agent is, and the agents' latest mean return."""

    step: int = 0
    latest_return: float | None = None


class Scoreboard:
    """Shows the cells of one `dase experiment` while a `with` block runs.

    `read` gives a running cell's Reading; it is asked as often as something is drawn. `done` are the
    cells that had finished before.
    """

    def __init__(
        self,
        console: Console,
        cells: Sequence[Cell],
        *,
        done: int,
        read: Callable[[Cell], Reading],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._cells = {cell.name: cell for cell in cells}
        self._done = done
        self._read = read
        self._clock = clock
        self._since: dict[str, float] = {}
        self._time_left = ExperimentTimeLeft()
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )
        self.outcomes: dict[str, Outcome] = {}

    @property
    def every_s(self) -> float:
        """How often `show` is worth calling."""
        return REDRAW_S if self._live else PLAIN_EVERY_S

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Prints a line above the table."""
        say(self._console, text)

    def started(self, cell: Cell) -> None:
        """Notes that a cell runs."""
        self._since[cell.name] = self._clock()
        self._time_left.started(cell, self._read(cell).step, self._clock())
        if not self._live:
            self.say(f"{cell.name}: started")

    def ended(self, cell: Cell, outcome: Outcome) -> None:
        """Notes how a cell ended and says so."""
        del self._since[cell.name]
        self.outcomes[cell.name] = outcome
        reading = self._read(cell)
        self._time_left.observe(cell, reading.step, self._clock())
        self._time_left.ended(cell, took_s=outcome.seconds if outcome.kind == "finished" else None)
        told = f"{outcome.kind} after {duration(outcome.seconds)}"
        if outcome.text:
            told += f": {outcome.text}"
        elif reading.latest_return is not None:
            told += f", evaluation {number(reading.latest_return)}"
        self.say(f"{cell.name}: {told}")

    def show(self) -> None:
        """Draws the table anew, or prints where the experiment stands."""
        readings = {name: self._read(self._cells[name]) for name in self._since}
        standing = f"{self._counts()}; {self._left(readings)}"
        if self._live is None:
            return self.say(standing)
        table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
        table.add_column("running")
        for name in ("step", "evaluation", "time"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, reading in readings.items():
            total = self._cells[name].config.train.steps
            table.add_row(
                Text(name),
                f"{reading.step:,} of {total:,}",
                number(reading.latest_return),
                duration(self._clock() - self._since[name]),
            )
        self._live.update(Group(table, Text(standing, style="dim")), refresh=True)

    def _counts(self) -> str:
        kinds = Counter(outcome.kind for outcome in self.outcomes.values())
        finished, total = self._done + kinds["finished"], self._done + len(self._cells)
        waiting = len(self._cells) - len(self.outcomes) - len(self._since)
        text = (
            f"{finished} of {several(total, 'cell')} finished, {len(self._since)} running, {waiting} waiting"
        )
        return f"{text}, {kinds['failed']} failed" if kinds["failed"] else text

    def _left(self, readings: Mapping[str, Reading]) -> str:
        """How long the rest takes; a cell that ended is not run again."""
        now = self._clock()
        for name, reading in readings.items():
            self._time_left.observe(self._cells[name], reading.step, now)
        running = {name: reading.step for name, reading in readings.items()}
        rest = {name: cell for name, cell in self._cells.items() if name not in self.outcomes}
        seconds = self._time_left.estimate(running, rest)
        return "time left not known yet" if seconds is None else f"about {duration(seconds)} left"
