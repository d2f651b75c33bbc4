"""The scoreboard of an experiment: how it stands, and how long the rest of it takes."""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dase_grpc.launch.console import say
from dase_grpc.launch.display import StepPace, left
from dase_grpc.launch.experiments.folder import Reading, State, score
from dase_grpc.launch.experiments.matrix import RunCell
from dase_grpc.progress import duration, number, several

REDRAW_S: Final = 1.0
PLAIN_EVERY_S: Final = 60.0

MEASURED_S: Final = 10.0
"""How long cells must have trained before their speed says anything about the time left."""


@dataclass(frozen=True)
class Outcome:
    """How one try of a cell ended; text says why where it did not finish.

    It is `refused` where what there was of the cell could not be gone on with, so that nothing was tried.
    """

    kind: Literal["finished", "failed", "stopped"]
    seconds: float
    text: str = ""
    refused: bool = False


class Scoreboard:
    """Shows the cells of one `dase experiment` while a `with` block runs.

    `read` is asked as often as something is drawn. `done` is how many cells had finished before.
    """

    def __init__(
        self,
        console: Console,
        cells: Sequence[RunCell],
        *,
        done: int,
        read: Callable[[RunCell], Reading],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._cells = {cell.name: cell for cell in cells}
        self._done = done
        self._read = read
        self._clock = clock
        self._since: dict[str, float] = {}
        self._time_left = ExperimentTimeLeft()
        live = Live(console=console, auto_refresh=False, transient=True)
        self._live = live if console.is_terminal else None
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

    def started(self, cell: RunCell) -> None:
        """Notes that a cell runs."""
        self._since[cell.name] = self._clock()
        self._time_left.started(cell, self._read(cell).step, self._clock())
        if not self._live:
            self.say(f"{cell.name}: started")

    def ended(self, cell: RunCell, outcome: Outcome) -> None:
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
        failed = f", {kinds['failed']} failed" if kinds["failed"] else ""
        done = f"{finished} of {several(total, 'cell')} finished"
        return f"{done}, {len(self._since)} running, {waiting} waiting{failed}"

    def _left(self, readings: Mapping[str, Reading]) -> str:
        """How long the rest takes; a cell that ended is not run again."""
        now = self._clock()
        for name, reading in readings.items():
            self._time_left.observe(self._cells[name], reading.step, now)
        running = {name: reading.step for name, reading in readings.items()}
        rest = {name: cell for name, cell in self._cells.items() if name not in self.outcomes}
        return left(self._time_left.estimate(running, rest))


@dataclass
class _Track:
    """What was seen of a cell, which goes on from `began_step`.

    Attributes:
        trains_from: the step from which on its agents do not explore at random.
        pace: of its slowest agent, from when it was first seen to train.
        took_s: how long its process ran, once it has finished.
    """

    agents: int
    trains_from: int
    began_s: float
    began_step: int
    pace: StepPace = field(default_factory=StepPace)
    took_s: float | None = None


class ExperimentTimeLeft:
    """Estimates the rest of an experiment; `now` is a monotonic clock's reading in seconds.

    A process that has made no step yet, because it imports and checks, is not one that trains slowly: a
    cell's speed counts from when it was first seen to train. Such a beginning counts for each that waits.
    """

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}
        self._running = 0
        self._most_running = 1

    def started(self, cell: RunCell, step: int, now: float) -> None:
        """Notes that a cell runs, from `step` on."""
        config = cell.config
        random = config.start_steps if config.start_steps < config.train.steps else 0
        self._tracks[cell.name] = _Track(config.train.agents, random, now, step)
        self._running += 1
        self._most_running = max(self._most_running, self._running)

    def observe(self, cell: RunCell, step: int, now: float) -> None:
        """Takes in how far the slowest agent of a running cell is."""
        track = self._tracks[cell.name]
        if step > track.began_step and step >= track.trains_from:
            track.pace.observe(step, now)

    def ended(self, cell: RunCell, *, took_s: float | None) -> None:
        """Notes that a cell's process has ended, and how long it took if the cell is finished."""
        self._tracks[cell.name].took_s = took_s
        self._running -= 1

    def estimate(self, running: Mapping[str, int], cells: Mapping[str, RunCell]) -> float | None:
        """Seconds until all cells have ended; None while too little is known.

        running are those that run, with their steps; cells are these and those that wait, in their order.
        """
        whole, training = self._whole_pace(), self._training_pace()
        if training is None:
            training = whole
        if training is None:
            return None
        ends = []
        for name, step in running.items():
            train, own = cells[name].config.train, self._tracks[name].pace.step_s(measured_s=MEASURED_S)
            each = train.agents * training if own is None else own
            ends.append(max(0, train.steps - step) * each)
        each, start_s = (training, self._start_s()) if whole is None else (whole, 0.0)
        waiting = [cell.steps * each + start_s for name, cell in cells.items() if name not in running]
        return _all_ended([*ends, *[0.0] * (self._most_running - len(ends))], waiting)

    def _training_pace(self) -> float | None:
        """Seconds for one step of one agent, while cells train."""
        measured = [(track.agents, *track.pace.measured) for track in self._tracks.values()]
        seconds = sum(seconds for _, seconds, _ in measured)
        steps = sum(agents * steps for agents, _, steps in measured)
        return seconds / steps if steps > 0 and seconds >= MEASURED_S else None

    def _whole_pace(self) -> float | None:
        """The same from cells that ran from beginning to end, with all else that took time."""
        done = [track for track in self._tracks.values() if track.took_s is not None and not track.began_step]
        steps = sum(track.agents * track.pace.step for track in done if track.pace.step > 0)
        seconds = sum(track.took_s or 0.0 for track in done)
        return seconds / steps if steps > 0 else None

    def _start_s(self) -> float:
        """How long it takes until a cell is seen to train."""
        tracks = self._tracks.values()
        known = [track.pace.since_s - track.began_s for track in tracks if track.pace.since_s is not None]
        return sum(known) / len(known) if known else 0.0


def _all_ended(slots: list[float], waiting: Iterable[float]) -> float:
    """When all cells have ended, if each that waits takes the slot that is free first."""
    heapq.heapify(slots)
    for seconds in waiting:
        heapq.heapreplace(slots, slots[0] + seconds)
    return max(slots)


def say_plan(
    console: Console,
    cells: Sequence[RunCell],
    states: Mapping[str, State],
    where: str,
    *,
    listed: bool = True,
) -> None:
    """What the cells are and how each stands, if that is to be `listed`; and all, and where, in one line."""
    width = max(len(cell.name) for cell in cells)
    for cell in cells if listed else ():
        state = states[cell.name]
        text = f": {state.text}" if state.text else ""
        say(console, f"{cell.name:<{width}}  {cell.steps:>13,} steps  {state.kind}{text}")
    kinds = Counter(states[cell.name].kind for cell in cells)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    steps = sum(cell.steps for cell in cells if states[cell.name].kind != "finished")
    to_go = f"{several(steps, 'environment step')} to go {where}"
    say(console, f"{several(len(cells), 'cell')}: {counted}; {to_go}")


def say_results(
    console: Console,
    cells: Sequence[RunCell],
    states: Mapping[str, State],
    outcomes: Mapping[str, Outcome],
) -> None:
    """One line for each cell: state, the mean of its last 10 evaluations, and the time it took."""
    width = max(len("cell"), *(len(cell.name) for cell in cells))
    say(console, f"{'cell':<{width}}  {'state':<10}  {'final score':>12}  time")
    for cell in cells:
        state, outcome = states[cell.name], outcomes.get(cell.name)
        final = number(score(state.path)) if state.kind == "finished" else "-"
        took = duration(outcome.seconds) if outcome else "-"
        say(console, f"{cell.name:<{width}}  {state.kind:<10}  {final:>12}  {took}")
