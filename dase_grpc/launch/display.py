"""What a person sees of a run in progress: a live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dase_grpc.config import RunConfig
from dase_grpc.progress import Progress

PLAIN_EVERY_S: Final = 10.0
SHOWN_SOURCES: Final = 6


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment; progress is None for an agent that has not joined yet."""

    agents: Sequence[Progress | None]
    buffer_size: int
    buffer_capacity: int


class Display(Protocol):
    """Shows snapshots while the block it guards runs."""

    def __enter__(self) -> Self:
        """Starts showing."""
        ...

    def __exit__(self, *exc: object) -> None:
        """Stops showing; the last snapshot stays visible."""
        ...

    def show(self, snapshot: Snapshot) -> None:
        """Shows a newer snapshot."""
        ...


def make_display(
    console: Console, config: RunConfig, *, clock: Callable[[], float] = time.monotonic
) -> Display:
    """A table that redraws itself on a terminal, and lines now and then where there is none."""
    if console.is_terminal:
        return LiveTable(console, config, clock)
    return PlainLines(console, config, clock)


class LiveTable:
    """One line per agent, redrawn in place."""

    def __init__(self, console: Console, config: RunConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._eta = TimeLeft(config.train.steps)
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Redraws."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, justify in (
            ("agent", "right"),
            ("step", "right"),
            ("return", "right"),
            ("evaluation", "right"),
            ("updates/s", "right"),
            ("similarity λ", "left"),
            ("state", "left"),
        ):
            table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
        for agent_id, progress in enumerate(snapshot.agents):
            table.add_row(str(agent_id), *agent_cells(agent_id, progress))
        footer = Text(f"{buffer_text(snapshot)}, {self._eta.text(snapshot, self._clock())}", style="dim")
        self._live.update(Group(table, footer))


class PlainLines:
    """One line per agent every few seconds, and whenever an agent has a new evaluation."""

    def __init__(self, console: Console, config: RunConfig, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._eta = TimeLeft(config.train.steps)
        self._said_at: float | None = None
        self._said: Snapshot | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return

    def show(self, snapshot: Snapshot) -> None:
        """Prints, unless nothing changed or it did so a moment ago."""
        now = self._clock()
        due = self._said_at is None or now - self._said_at >= PLAIN_EVERY_S
        finished = all(p is not None and p.state == "finished" for p in snapshot.agents)
        if snapshot == self._said or not any(snapshot.agents) or not (due or finished):
            return
        self._said_at, self._said = now, snapshot
        for agent_id, progress in enumerate(snapshot.agents):
            step, episode, evaluation, rate, similarity, state = agent_cells(agent_id, progress)
            self._console.print(
                f"agent {agent_id}: step {step}, return {episode}, evaluation {evaluation}, "
                f"{rate} updates/s, similarity {similarity}, {state}",
                highlight=False,
                soft_wrap=True,
            )
        self._console.print(
            f"{buffer_text(snapshot)}, {self._eta.text(snapshot, now)}", highlight=False, soft_wrap=True
        )


class TimeLeft:
    """Estimates the rest of a run from its slowest agent's speed over the last minute."""

    def __init__(self, total_steps: int, *, horizon_s: float = 60.0) -> None:
        self._total = total_steps
        self._horizon_s = horizon_s
        self._seen: list[tuple[float, int]] = []

    def text(self, snapshot: Snapshot, now: float) -> str:
        """For example "about 2 min 10 s left"."""
        step = min((p.step if p else 0 for p in snapshot.agents), default=0)
        self._seen.append((now, step))
        while now - self._seen[0][0] > self._horizon_s:
            self._seen.pop(0)
        (since, first), left = self._seen[0], self._total - step
        if left <= 0:
            return "all steps done"
        if step <= first or now <= since:
            return "time left not known yet"
        return f"about {duration_text(left * (now - since) / (step - first))} left"


def agent_cells(agent_id: int, progress: Progress | None) -> tuple[str, str, str, str, str, str]:
    """Step, episode return, evaluation, updates/s, similarity by source, state."""
    if progress is None:
        return ("-", "-", "-", "-", "-", "starting")
    evaluation = number(progress.evaluation_return)
    if progress.first_evaluation_return is not None:
        evaluation += f" (first {number(progress.first_evaluation_return)})"
    return (
        f"{progress.step:,}/{progress.total_steps:,}",
        number(progress.episode_return),
        evaluation,
        f"{progress.updates_per_second:.0f}",
        similarity_text(agent_id, progress),
        progress.state,
    )


def similarity_text(agent_id: int, progress: Progress) -> str:
    """λ by the agent that collected, own rows left out: "1: 0.21  2: 3e-05"."""
    others = [(source, value) for source, value in sorted(progress.similarity.items()) if source != agent_id]
    if not others:
        return "-"
    shown = "  ".join(f"{source}: {value:.2g}" for source, value in others[:SHOWN_SOURCES])
    return shown + ("  ..." if len(others) > SHOWN_SOURCES else "")


def buffer_text(snapshot: Snapshot) -> str:
    """How full the buffer is."""
    if not snapshot.buffer_capacity:
        return "buffer not open yet"
    share = snapshot.buffer_size / snapshot.buffer_capacity
    return f"buffer {snapshot.buffer_size:,} of {snapshot.buffer_capacity:,} ({share:.0%})"


def number(value: float | None) -> str:
    """A return, short."""
    return "-" if value is None else f"{value:,.1f}"


def duration_text(seconds: float) -> str:
    """For example "2 min 10 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
