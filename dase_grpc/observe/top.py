"""`dase top`: looks again and again, draws what it sees in lines that fit the terminal, heeds single keys."""

import asyncio
import math
import os
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dase_grpc.errors import UnreachableError, UsageError
from dase_grpc.observe.tables import Pairs, agent_table, counted, head, line, node_table, rate
from dase_grpc.observe.view import AgentView, ClusterView, Look, NodeView, Rates, Target, observing, rates
from dase_grpc.process.lifecycle import stop_event
from dase_grpc.process.tasks import unless
from dase_grpc.progress import ago

REDRAW_S: Final = 1.0
QUIT: Final = frozenset("qQ")
HINT: Final = "q quits"

KEPT_LOOKS: Final = 61
"""Those of the last minute."""

SMOOTHED_LOOKS: Final = 5
"""A rate in figures is one over the latest so many looks."""

SHOWN_NODES: Final = 3
"""So many actors and evaluators are shown however little room there is."""

BESIDE_FROM: Final = 140
"""Where a line has so many characters, similarities stand beside the agents."""

GAP: Final = 3
_SPARKS: Final = "▁▂▃▄▅▆▇█"


def top_here(target: Target, console: Console) -> None:
    """Shows a cluster until q, Ctrl-C or SIGTERM; Ctrl-Z gives the terminal back meanwhile.

    Raises:
        UsageError, RefusalError: there is no terminal, or the replay refuses; one that is away is waited for.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        raise UsageError(
            "dase top draws on a terminal, and its output goes to none; dase status prints the same once"
        )
    asyncio.run(_top(target, console))


async def _top(target: Target, console: Console) -> None:
    async with stop_event(stdin_is_leash=False) as stop, observing(target) as observer:
        with suppress(UnreachableError):
            await unless(stop, observer.first_look())
        loop = asyncio.get_running_loop()
        live = Live(console=console, screen=True, auto_refresh=False)

        @contextmanager
        def on_terminal() -> Iterator[None]:
            with keys(loop, lambda key: stop.set() if key in QUIT else None), live:
                yield

        def show(screen: Screen) -> None:
            live.update(screen, refresh=True)

        with suspendable(loop, on_terminal):
            await follow(observer.look, show, stop, replays=str(target.replay))


async def follow(
    look: Callable[[], Coroutine[None, None, Look]],
    show: Callable[["Screen"], None],
    stop: asyncio.Event,
    *,
    replays: str,
    every_s: float = REDRAW_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Looks and shows, `every_s` seconds apart, until `stop`."""
    looks: deque[Look] = deque(maxlen=KEPT_LOOKS)
    last_known: Look | None = None
    while not stop.is_set():
        began = clock()
        seen = await unless(stop, look())
        if seen is None:
            return
        looks.append(seen)
        last_known = seen if seen.cluster is not None else last_known
        show(Screen(replays, tuple(looks), clock(), last_known))
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), max(0.0, began + every_s - clock()))


@contextmanager
def keys(loop: asyncio.AbstractEventLoop, on_key: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_key` with each key while the block runs; the terminal is then as it was before.

    Where standard input is no terminal there are no keys. Ctrl-C and Ctrl-Z stay signals.
    """
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        pressed = os.read(terminal, 64)
        if not pressed:  # hung up
            loop.remove_reader(terminal)
        for key in pressed.decode(errors="ignore"):
            on_key(key)

    tty.setcbreak(terminal, termios.TCSANOW)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSANOW, before)


@contextmanager
def suspendable(
    loop: asyncio.AbstractEventLoop, taking: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Holds what `taking` takes while the block runs, but not while SIGTSTP has stopped the process.

    Where that signal is ignored, or the kernel drops it as nobody could continue, the process goes on.
    """
    with ExitStack() as held:
        held.enter_context(taking())
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN:
            yield
            return

        def suspend() -> None:
            held.close()
            loop.remove_signal_handler(signal.SIGTSTP)
            signal.raise_signal(signal.SIGTSTP)  # returns once SIGCONT has come
            loop.add_signal_handler(signal.SIGTSTP, suspend)
            held.enter_context(taking())

        loop.add_signal_handler(signal.SIGTSTP, suspend)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTSTP)


@dataclass(frozen=True)
class Part:
    """Something to show that takes so many lines."""

    shown: RenderableType
    height: int


@dataclass(frozen=True)
class Screen:
    """What has been seen of a cluster by `now`, seconds of the looks' clock; the latest look last.

    last_known is the latest view, perhaps from before the looks. No clock, no terminal, no network: it is
    drawn in the size that the terminal then has.
    """

    replays: str
    looks: Sequence[Look]
    now: float
    last_known: Look | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich's console protocol."""
        yield self.drawn(width=options.max_width, height=options.height or console.size.height)

    def drawn(self, *, width: int, height: int) -> Group:
        """At most `height` lines of at most `width` characters."""
        known = self.last_known
        cluster = None if known is None else known.cluster
        if known is None or cluster is None:
            title = Text.assemble(
                ("dase top", "bold"), f"   replay {self.replays}   no replay has answered yet   ", HINT
            )
            return _stacked([Part(line(title), 1), *self._notices(room=height - 1)], height)
        parts = [_heading(cluster, self.replays), self._rates(width)]
        parts += self._notices(room=max(1, (height - _height(parts)) // 4))
        speeds = self._smoothed.steps_by_agent
        parts += _members(cluster, speeds, width=width, room=height - _height(parts))
        if width < BESIDE_FROM and _height(parts) + 2 + len(parts) - 1 <= height:
            parts[1] = self._rates(width, lines=3)
        return _stacked(parts, height)

    def _rates(self, width: int, *, lines: int = 1) -> Part:
        """Three rates in figures and as their course over the last minute, in one line or in three."""
        now, before = self._smoothed, [rates(*both) for both in pairwise(self.looks)]
        shown = (
            ("inserts/s", now.inserted, [each.inserted for each in before]),
            ("samples/s", now.sampled, [each.sampled for each in before]),
            ("steps/s", now.env_steps, [each.env_steps for each in before]),
        )
        across = len(shown) // lines
        cells = []
        for name, value, values in shown:
            figures = f"{name:<9} {rate(value):>7} "
            room = min(KEPT_LOOKS, width // across - len(figures) - 2)
            cells.append(line(Text.assemble(figures, (sparkline(values, room).rjust(room), "cyan"), "  ")))
        rows = [Text.assemble(*cells[first : first + across]) for first in range(0, len(cells), across)]
        return Part(Group(*rows), lines)

    def _notices(self, *, room: int) -> list[Part]:
        """What is wrong, as far as there is room."""
        known = self.last_known
        latest = self.looks[-1] if self.looks else Look(self.now, None if known is None else known.cluster)
        texts = latest.troubles()
        if latest.cluster is None and known is not None:
            texts.append(f"what is below was so {ago(self.now - known.at)} ago; waiting for the replay")
        if len(texts) > room:
            texts = [*texts[: room - 1], f"... and {len(texts) - room + 1} more of the kind"]
        style = "bold red" if latest.cluster is None else "yellow"
        lines = [line(Text(f"! {text}", style=style)) for text in texts]
        return [Part(Group(*lines), len(lines))] if lines else []

    @property
    def _smoothed(self) -> Rates:
        """The rates over the latest looks between which the replay was not away."""
        latest = reversed(self.looks[-SMOOTHED_LOOKS - 1 :])
        lately = list(takewhile(lambda look: look.cluster is not None, latest))
        return rates(lately[-1], lately[0]) if lately else Rates()


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The course of values in at most `width` characters, the latest last; a blank where none is known.

    The highest one is full, 0 is the lowest; where there are more values than characters, means are drawn.
    """
    each = max(1, math.ceil(len(values) / max(1, width)))
    ends = reversed(range(len(values), 0, -each))  # from the end, so that the latest is a mean of as many
    groups = [[value for value in values[max(0, end - each) : end] if value is not None] for end in ends]
    means = [sum(group) / len(group) if group else None for group in groups]
    top = max((mean for mean in means if mean is not None), default=0.0)
    return "".join(" " if mean is None else _spark(mean, top) for mean in means)


def _spark(value: float, top: float) -> str:
    return _SPARKS[min(len(_SPARKS) - 1, int(value / top * len(_SPARKS)))] if top > 0 else _SPARKS[0]


def _stacked(parts: Sequence[Part], height: int) -> Group:
    """The parts below each other, with empty lines between them where there is room."""
    spread = _height(parts) + len(parts) - 1 <= height
    shown: list[RenderableType] = []
    for part in parts:
        shown += ["", part.shown] if spread and shown else [part.shown]
    return Group(*shown)


def _height(parts: Iterable[Part]) -> int:
    return sum(part.height for part in parts)


def _heading(cluster: ClusterView, replays: str) -> Part:
    first, *others = head(cluster, replays=replays)
    grid = Table.grid(expand=True, padding=(0, 0, 0, 2))
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(first, Text(HINT, style="dim"))
    return Part(Group(grid, *others), 1 + len(others))


def _members(cluster: ClusterView, speeds: Mapping[int, float], *, width: int, room: int) -> Iterator[Part]:
    """Agents, their similarities, and other nodes; similarities in one line where each does not fit."""
    agents, nodes, pairs = cluster.agents, cluster.nodes, Pairs(cluster.agents)
    for_nodes = 1 + min(len(nodes), SHOWN_NODES + 1) if nodes else 0
    beside = pairs.fit and width >= BESIDE_FROM and pairs.height + for_nodes <= room
    similarity: list[Part] = []
    if pairs.fit and not beside and 1 + len(agents) + pairs.height + for_nodes <= room:
        similarity = [Part(pairs.heat_map(width), pairs.height)]
    elif not beside and (summary := pairs.summary):
        similarity = [Part(line(Text(summary)), 1)]
    left = room - for_nodes - _height(similarity)
    first = _agents_beside(pairs, speeds, width, left) if beside else _agents(agents, speeds, width, left)
    yield first
    yield from similarity
    if nodes:
        yield _nodes(nodes, width, room - first.height - _height(similarity))


def _agents(agents: Sequence[AgentView], speeds: Mapping[int, float], width: int, room: int) -> Part:
    """As many agents as there is room for; those in trouble first where it is not for all."""
    shown = agents[: _rows(len(agents), room)]
    if len(shown) < len(agents):
        shown = sorted(agents, key=lambda agent: agent.trouble is None)[: len(shown)]
    table = agent_table(shown, speeds, width=width, expand=True)
    seen = {agent.agent_id for agent in shown}
    return _with_rest(table, len(shown), [agent.lease for agent in agents if agent.agent_id not in seen])


def _agents_beside(pairs: Pairs, speeds: Mapping[int, float], width: int, room: int) -> Part:
    left = _agents(pairs.agents, speeds, width - pairs.width - GAP, room)
    grid = Table.grid(expand=True, padding=(0, GAP, 0, 0), pad_edge=False)
    grid.add_column(ratio=1)
    grid.add_column(width=pairs.width)
    grid.add_row(left.shown, pairs.heat_map(pairs.width))
    return Part(grid, max(left.height, pairs.height))


def _nodes(nodes: Sequence[NodeView], width: int, room: int) -> Part:
    shown = nodes[: _rows(len(nodes), room)]
    table = node_table(shown, width=width, expand=True)
    return _with_rest(table, len(shown), [node.role for node in nodes[len(shown) :]])


def _with_rest(table: Table, rows: int, rest: Sequence[str]) -> Part:
    if not rest:
        return Part(table, 1 + rows)
    more = line(Text(f"... and {len(rest):,} more: {counted(rest)}", style="dim"))
    return Part(Group(table, more), 2 + rows)


def _rows(count: int, room: int) -> int:
    """How many rows fit below a line of titles, where those that do not take a line too."""
    return count if count + 1 <= room else max(1, room - 2)
