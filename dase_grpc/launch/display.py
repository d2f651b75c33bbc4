"""A run in progress: a live table on a terminal, plain lines elsewhere, and how long it still takes."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dase_grpc.config.resolve import RunConfig
from dase_grpc.launch.console import say
from dase_grpc.observe import tables
from dase_grpc.progress import Progress, duration, several

PLAIN_EVERY_S: Final = 20.0
MEASURED_S: Final = 2.0
"""How long all agents must have trained before their speed says anything about the time left."""


class StepPace:
    """Seconds for a step, from what was observed over the last `horizon_s`, or since the beginning.

    Memory is bounded: of what lies close together only the latest is kept.
    """

    def __init__(self, horizon_s: float = math.inf) -> None:
        self._horizon_s = horizon_s
        self._seen: deque[tuple[float, int]] = deque()

    def observe(self, step: int, now: float) -> None:
        """Takes in how far it is; now is a monotonic clock's reading in seconds."""
        if len(self._seen) > 1 and now - self._seen[-2][0] < self._horizon_s / 60:
            self._seen.pop()
        self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > self._horizon_s:
            self._seen.popleft()

    @property
    def since_s(self) -> float | None:
        """When it was first observed, within the horizon."""
        return self._seen[0][0] if self._seen else None

    @property
    def step(self) -> int:
        """The latest step; -1 before any."""
        return self._seen[-1][1] if self._seen else -1

    @property
    def measured(self) -> tuple[float, int]:
        """The seconds between the first and the latest observation, and the steps made meanwhile."""
        if not self._seen:
            return 0.0, 0
        (since, first), (now, step) = self._seen[0], self._seen[-1]
        return now - since, step - first

    def step_s(self, *, measured_s: float) -> float | None:
        """Seconds for a step; None before it has gone on for `measured_s`."""
        seconds, steps = self.measured
        return seconds / steps if steps > 0 and seconds >= measured_s else None


def left(seconds: float | None) -> str:
    """For example "about 2 min 10 s left"."""
    return "time left not known yet" if seconds is None else f"about {duration(seconds)} left"


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment; None for an agent that has not joined yet, steps per second of each actor."""

    agents: Sequence[Progress | None]
    buffer_size: int
    buffer_capacity: int
    actors: Sequence[float] = ()

    @property
    def buffer_text(self) -> str:
        """How full the buffer is, and who fills it, if not the learners."""
        text = tables.buffer_text(self.buffer_size, self.buffer_capacity)
        if not self.actors:
            return text
        return f"{text}, {several(len(self.actors), 'actor')} ({sum(self.actors):,.0f} steps/s)"


class TimeLeft:
    """Estimates the rest of a run from its slowest agent's speed over the last minute.

    Agents that explore at random are much faster than they will be, so nothing counts before all train.
    """

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._pace = StepPace(horizon_s=60.0)

    def observe(self, snapshot: Snapshot, now: float) -> None:
        """Takes in how far the slowest agent is."""
        if any(p is None or p.state in ("starting", "exploring") for p in snapshot.agents):
            self._pace = StepPace(horizon_s=60.0)
        else:
            self._pace.observe(min((p.step for p in snapshot.agents if p), default=0), now)

    def __str__(self) -> str:
        """For example "about 2 min 10 s left"."""
        if self._pace.step >= self._total:
            return "all steps done"
        step_s = self._pace.step_s(measured_s=MEASURED_S)
        return left(None if step_s is None else (self._total - self._pace.step) * step_s)


class LiveTable:
    """One line per agent, redrawn in place while the block runs; the last one stays visible."""

    def __init__(self, console: Console, config: RunConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._time_left = TimeLeft(config.train.steps)
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Redraws."""
        self._time_left.observe(snapshot, self._clock())
        names = (
            self._config.agent_name(agent_id).removeprefix("agent ")
            for agent_id in range(len(snapshot.agents))
        )
        table = tables.progress_table(
            zip(names, snapshot.agents, strict=True),
            weighs=self._config.method == "dase",  # others have no similarity
        )
        each = " each" if len(snapshot.agents) > 1 else ""
        steps = several(self._config.train.steps, "step")
        footer = f"{steps}{each}, {snapshot.buffer_text}, {self._time_left}"
        self._live.update(Group(table, Text(footer, style="dim")))


class PlainLines:
    """A line for an agent when it starts and when it ends, and for every agent now and then."""

    def __init__(self, console: Console, config: RunConfig, clock: Callable[[], float]) -> None:
        self._console = console
        self._config = config
        self._clock = clock
        self._time_left = TimeLeft(config.train.steps)
        self._all_said_at = clock()
        self._said: dict[int, Progress] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return

    def show(self, snapshot: Snapshot) -> None:
        """Prints what is new, if it is worth a line."""
        now = self._clock()
        self._time_left.observe(snapshot, now)
        due = now - self._all_said_at >= PLAIN_EVERY_S
        told = False
        for agent_id, progress in enumerate(snapshot.agents):
            if tables.has_started(progress) and self._is_news(agent_id, progress, due=due):
                first = agent_id not in self._said or tables.has_ended(progress)
                self._said[agent_id] = progress
                line = _agent_line(agent_id, progress, first=first)
                say(self._console, f"{self._config.agent_name(agent_id)}: {line}")
                told = True
        if told and (due or all(map(tables.has_ended, snapshot.agents))):
            self._all_said_at = now
            say(self._console, f"{snapshot.buffer_text}, {self._time_left}")

    def _is_news(self, agent_id: int, progress: Progress, *, due: bool) -> bool:
        before = self._said.get(agent_id)
        if before is None:
            return due or progress.evaluation_return is not None or tables.has_ended(progress)
        return progress != before and (due or tables.has_ended(progress))


Display = LiveTable | PlainLines


def make_display(
    console: Console, config: RunConfig, *, clock: Callable[[], float] = time.monotonic
) -> Display:
    """A table that redraws itself on a terminal, and lines now and then where there is none."""
    return (LiveTable if console.is_terminal else PlainLines)(console, config, clock)


def _agent_line(agent_id: int, progress: Progress, *, first: bool) -> str:
    """An agent's numbers in one line, to follow its name; with its first evaluation if `first`.

    No similarity where none is known: a single agent never has any.
    """
    cells = tables.agent_cells(agent_id, progress)
    began = f" (first {cells['first']})" if first else ""
    similarity = cells["similarity λ"]
    weighs = f"similarity {similarity}, " if similarity != tables.NOTHING else ""
    return (
        f"step {cells['step']} of {progress.total_steps:,}, return {cells['return']}, "
        f"evaluation {cells['evaluation']}{began}, {cells['updates/s']} updates/s, {weighs}{cells['state']}"
    )
