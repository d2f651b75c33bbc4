"""The screen of `dase top`: a frame as lines that fit a terminal. No clock, no terminal, no network."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from dase_grpc.observe import cells as observe_cells
from dase_grpc.observe.cells import rate, seconds, sparkline
from dase_grpc.observe.tables import agent_table, counted, head, in_trouble, line, node_table, troubles
from dase_grpc.observe.view import AgentView, ClusterView, Look, NodeView, Rates, course, rates

SMOOTHED_LOOKS: Final = 5
"""A rate in figures is one over the latest so many looks."""

SHOWN_NODES: Final = 3
"""So many actors and evaluators are shown however little room there is."""

BESIDE_FROM: Final = 140
"""Where a line has so many characters, similarities stand beside the agents."""

GAP: Final = 3
KEPT_LOOKS: Final = 61
"""Those of the last minute."""

HINT: Final = "q quits"


@dataclass(frozen=True)
class Frame:
    """What has been seen of a cluster by `now`, seconds of the looks' clock; the latest look last.

    last_known is the latest view, perhaps from before the looks.
    """

    replays: str
    looks: Sequence[Look]
    now: float
    last_known: Look | None = None


@dataclass(frozen=True)
class Part:
    """Something to show that takes so many lines."""

    shown: RenderableType
    height: int


@dataclass(frozen=True)
class Screen:
    """A frame as a renderable of the size that the terminal has when it is drawn."""

    frame: Frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich's console protocol."""
        height = options.height or console.size.height
        yield draw(self.frame, width=options.max_width, height=height)


def draw(frame: Frame, *, width: int, height: int) -> Group:
    """The frame in at most `height` lines of at most `width` characters."""
    known = frame.last_known
    cluster = None if known is None else known.cluster
    if known is None or cluster is None:
        parts = [_title(frame, "no replay has answered yet"), *_notices(frame, known, room=height - 1)]
        return _stacked(parts, height)
    parts = [_heading(cluster, frame), _rates(frame, width)]
    parts += _notices(frame, known, room=max(1, (height - _height(parts)) // 4))
    speeds = _smoothed(frame.looks).steps_by_agent
    parts += _members(cluster, speeds, width=width, room=height - _height(parts))
    if width < BESIDE_FROM and _height(parts) + 2 + len(parts) - 1 <= height:
        parts[1] = _rates(frame, width, lines=3)
    return _stacked(parts, height)


def _stacked(parts: Sequence[Part], height: int) -> Group:
    """The parts below each other, with empty lines between them where there is room."""
    spread = _height(parts) + len(parts) - 1 <= height
    shown: list[RenderableType] = []
    for part in parts:
        shown += ["", part.shown] if spread and shown else [part.shown]
    return Group(*shown)


def _height(parts: Iterable[Part]) -> int:
    return sum(part.height for part in parts)


def _title(frame: Frame, text: str) -> Part:
    return Part(line(Text.assemble(("dase top", "bold"), f"   replay {frame.replays}   {text}   ", HINT)), 1)


def _heading(cluster: ClusterView, frame: Frame) -> Part:
    first, *others = head(cluster, replays=frame.replays)
    grid = Table.grid(expand=True, padding=(0, 0, 0, 2))
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(first, Text(HINT, style="dim"))
    return Part(Group(grid, *others), 1 + len(others))


def _rates(frame: Frame, width: int, *, lines: int = 1) -> Part:
    """Three rates in figures and as their course over the last minute, in one line or in three."""
    now, before = _smoothed(frame.looks), course(frame.looks)
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


def _notices(frame: Frame, known: Look | None, *, room: int) -> list[Part]:
    """What is wrong, as far as there is room."""
    silent = frame.looks[-1].silent if frame.looks else {}
    away = known is None or (bool(frame.looks) and frame.looks[-1].cluster is None)
    texts = troubles(Look(frame.now, None if away or known is None else known.cluster, silent))
    if away and known is not None:
        texts.append(f"what is below was so {seconds(frame.now - known.at)} ago; waiting for the replay")
    if len(texts) > room:
        texts = [*texts[: room - 1], f"... and {len(texts) - room + 1} more of the kind"]
    lines = [line(Text(f"! {text}", style="bold red" if away else "yellow")) for text in texts]
    return [Part(Group(*lines), len(lines))] if lines else []


def _members(cluster: ClusterView, speeds: Mapping[int, float], *, width: int, room: int) -> Iterator[Part]:
    """Agents, their similarities, and other nodes; similarities in one line where each does not fit."""
    agents, nodes = cluster.agents, cluster.nodes
    for_nodes = _lines_for(nodes, at_most=SHOWN_NODES)
    pairs = observe_cells.fits(agents)
    beside = pairs and width >= BESIDE_FROM and observe_cells.height_of(agents) + for_nodes <= room
    summary = [Part(line(Text(text)), 1) for text in (observe_cells.in_one_line(agents),) if text]
    below = pairs and not beside and 1 + len(agents) + observe_cells.height_of(agents) + for_nodes <= room
    similarity = [_similarity(agents, width)] if below else [] if beside else summary
    left = room - for_nodes - _height(similarity)
    first = _agents_beside(agents, speeds, width, left) if beside else _agents(agents, speeds, width, left)
    yield first
    yield from similarity
    if nodes:
        yield _nodes(nodes, width, room - first.height - _height(similarity))


def _agents(agents: Sequence[AgentView], speeds: Mapping[int, float], width: int, room: int) -> Part:
    """As many agents as there is room for; those in trouble first where it is not for all."""
    shown = list(agents[: _rows(len(agents), room)])
    if len(shown) < len(agents):
        shown = sorted(agents, key=lambda agent: not in_trouble(agent))[: len(shown)]
    table = agent_table(shown, speeds, width=width, expand=True)
    seen = {agent.agent_id for agent in shown}
    return _with_rest(table, len(shown), [agent.lease for agent in agents if agent.agent_id not in seen])


def _nodes(nodes: Sequence[NodeView], width: int, room: int) -> Part:
    shown = nodes[: _rows(len(nodes), room)]
    table = node_table(shown, width=width, expand=True)
    return _with_rest(table, len(shown), [node.role for node in nodes[len(shown) :]])


def _agents_beside(agents: Sequence[AgentView], speeds: Mapping[int, float], width: int, room: int) -> Part:
    pairs = observe_cells.width_of(agents, wide=True)
    left = _agents(agents, speeds, width - pairs - GAP, room)
    grid = Table.grid(expand=True, padding=(0, GAP, 0, 0), pad_edge=False)
    grid.add_column(ratio=1)
    grid.add_column(width=pairs)
    grid.add_row(left.shown, observe_cells.heat_map(agents))
    return Part(grid, max(left.height, observe_cells.height_of(agents)))


def _similarity(agents: Sequence[AgentView], width: int) -> Part:
    wide = observe_cells.width_of(agents, wide=True) <= width
    return Part(observe_cells.heat_map(agents, wide=wide), observe_cells.height_of(agents))


def _with_rest(table: Table, rows: int, rest: Sequence[str]) -> Part:
    if not rest:
        return Part(table, 1 + rows)
    more = line(Text(f"... and {len(rest):,} more: {counted(rest)}", style="dim"))
    return Part(Group(table, more), 2 + rows)


def _rows(count: int, room: int) -> int:
    """How many rows fit below a line of titles, where those that do not take a line too."""
    return count if count + 1 <= room else max(1, room - 2)


def _lines_for(nodes: Sequence[NodeView], *, at_most: int) -> int:
    return 0 if not nodes else 1 + min(len(nodes), at_most + 1)


def _smoothed(looks: Sequence[Look]) -> Rates:
    """The rates over the latest looks between which the replay was not away."""
    lately = list(takewhile(lambda look: look.cluster is not None, reversed(looks[-SMOOTHED_LOOKS - 1 :])))
    return rates(lately[-1], lately[0]) if lately else Rates()
