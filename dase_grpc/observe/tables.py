"""Tables of agents, of other nodes and of the similarity of each pair, and the short texts in them."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, TypeGuard

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from dase_grpc.observe.view import GONE, WAITING, AgentView, BufferView, ClusterView, NodeView
from dase_grpc.progress import LOWEST_WEIGHT, Progress, ago, duration, number, several, weight

NOTHING: Final = "-"
"""Stands for a number that is not known yet, as in `number`."""

SHOWN_SOURCES: Final = 6
SHOWN_SHARES: Final = 8
"""With more agents their shares of the buffer are not listed."""

SIMILARITY: Final = "similarity λ"
_TEXTS: Final = frozenset({"lease", "state", "node", "role", SIMILARITY})
"""Columns of texts; the others hold numbers."""

_AGENTS_FROM: Final = {"lease": 92, "heard": 92, "steps/s": 120, "updates": 120, "policy": 120, "node": 140}
_NODES_FROM: Final = {"heard": 92, "steps": 100}
"""Columns that are shown where there are at least so many characters in a line."""

MAX_AGENTS: Final = 16
"""With more of them pairs are summed up."""

TITLE: Final = "similarity λ, row learns from column"
WIDE: Final = 7
"""Columns that a pair takes, the space before it among them."""

NARROW: Final = 4
"""The same where only the power of ten of small ones is shown."""

_COLD, _WARM, _HOT = (33, 41, 66), (52, 120, 130), (250, 204, 92)
_DARK, _LIGHT = "#10131c", "#eef1f5"


def has_started(progress: Progress | None) -> TypeGuard[Progress]:
    """Whether the agent has joined and told its progress."""
    return progress is not None and progress.total_steps > 0


def has_ended(progress: Progress | None) -> bool:
    """Whether the agent will not go on."""
    return progress is not None and progress.state in ("finished", "stopped")


def agent_cells(agent_id: int, progress: Progress | None) -> dict[str, str]:
    """What an agent tells of itself, by the titles of a table's columns."""
    titles = ("step", "return", "evaluation", "first", "updates/s", SIMILARITY)
    if not has_started(progress):
        return {**dict.fromkeys(titles, NOTHING), "state": "starting"}
    cells = (
        f"{progress.step:,}",
        number(progress.episode_return),
        number(progress.evaluation_return),
        number(progress.first_evaluation_return),
        f"{progress.updates_per_second:.0f}" if progress.updates_per_second else NOTHING,
        similarity_text(agent_id, progress),
    )
    return {**dict(zip(titles, cells, strict=True)), "state": progress.state}


def similarity_text(agent_id: int, progress: Progress) -> str:
    """The λ that weighs, and in brackets that of each peer alone where there are several.

    For example "0.05 (1:0.21  2:3e-05)"; of a single peer both are all but the same. No space is within a
    pair, where a narrow table would break it (rich breaks at no-break spaces too).
    """
    others = [(source, value) for source, value in sorted(progress.similarity.items()) if source != agent_id]
    used = _weight(progress)
    if len(others) < 2:
        return used
    shown = "  ".join(f"{source}:{weight(value)}" for source, value in others[:SHOWN_SOURCES])
    return f"{used} ({shown}{'  ...' if len(others) > SHOWN_SOURCES else ''})"


def _weight(progress: Progress) -> str:
    return NOTHING if progress.similarity_weight is None else weight(progress.similarity_weight)


def buffer_text(size: int, capacity: int) -> str:
    """How full the buffer is."""
    if not capacity:
        return "buffer not open yet"
    return f"buffer {size:,} of {capacity:,} ({share(size, capacity)})"


def share(part: int, whole: int) -> str:
    """A part of a whole in percent: 0% and 100% only where it is none and all of it."""
    if 0 < part < 0.01 * whole:
        return "<1%"
    return ">99%" if 0.99 * whole < part < whole else f"{part / whole:.0%}"


def rate(per_second: float | None) -> str:
    """How many per second; a decimal where they are few."""
    if per_second is None:
        return NOTHING
    return f"{per_second:,.1f}" if 0 < per_second < 9.95 else f"{per_second:,.0f}"


def line(text: Text) -> Text:
    """The same text, cut off where the line ends."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def counted(states: Iterable[str]) -> str:
    """For example "3 live, 1 expired", the most frequent first."""
    return ", ".join(f"{count:,} {state}" for state, count in Counter(states).most_common())


def head(cluster: ClusterView, *, replays: str) -> list[Text]:
    """Which run this is, who takes part, and what the buffer holds: a line each."""
    up = "" if cluster.uptime_seconds is None else f"   up {duration(cluster.uptime_seconds)}"
    ends = "   shutting down" if cluster.draining else ""
    run, replay = ("run ", "dim"), ("   replay ", "dim")
    first = Text.assemble(run, (cluster.run_id, "bold"), replay, replays, up, (ends, "red"))
    first.append(f"   {cluster.environment or 'no learner has joined yet'}")
    return [line(first), line(Text(_members(cluster))), line(Text(_buffer(cluster.buffer)))]


def _members(cluster: ClusterView) -> str:
    agents, nodes, buffer = cluster.agents, Counter(node.role for node in cluster.nodes), cluster.buffer
    leases = f": {counted(agent.lease for agent in agents)}" if agents else ""
    others = "".join(f"; {several(count, role)}" for role, count in sorted(nodes.items()))
    reading = sum(agent.in_place for agent in agents)
    in_place = f"; {reading:,} read{'s' * (reading == 1)} the buffer in place" if reading else ""
    text = f"{several(len(agents), 'agent')}{leases}{in_place}{others}"
    if not buffer.size or not 1 < len(buffer.size_by_agent) <= SHOWN_SHARES:
        return text
    shares = (f"{agent}:{share(size, buffer.size)}" for agent, size in buffer.size_by_agent.items())
    return f"{text}   in the buffer {'  '.join(shares)}"


def _buffer(buffer: BufferView) -> str:
    text = buffer_text(buffer.size, buffer.capacity)
    if not buffer.capacity:
        return text
    came_and_went = f"inserted {buffer.inserted_total:,}  sampled {buffer.sampled_total:,}"
    return f"{text}   {came_and_went}  refused {buffer.refused_total:,}"


def progress_table(agents: Iterable[tuple[str, Progress | None]], *, weighs: bool) -> Table:
    """A line for each agent of a run, by its name; with similarities where the method `weighs` by them."""
    titles = [title for title in ("agent", *agent_cells(0, None)) if weighs or title != SIMILARITY]
    rows = (
        ({"agent": name, **agent_cells(agent_id, progress)}, "")
        for agent_id, (name, progress) in enumerate(agents)
    )
    return _table(titles, rows, gap=1, wraps=True)


def agent_table(
    agents: Iterable[AgentView], steps_per_second: Mapping[int, float], *, width: int, expand: bool = False
) -> Table:
    """A line for each agent, below one of titles."""
    titles = [title for title in _agent_cells(AgentView(0), {}) if width >= _AGENTS_FROM.get(title, 0)]
    rows = ((_agent_cells(agent, steps_per_second), _agent_style(agent)) for agent in agents)
    return _table(titles, rows, expand=expand)


def node_table(nodes: Iterable[NodeView], *, width: int, expand: bool = False) -> Table:
    """A line for each actor and evaluator, below one of titles."""
    titles = [title for title in _node_cells(NodeView()) if width >= _NODES_FROM.get(title, 0)]
    rows = ((_node_cells(node), _state_style(node.attendance.state)) for node in nodes)
    return _table(titles, rows, expand=expand)


def _agent_cells(agent: AgentView, steps_per_second: Mapping[int, float]) -> dict[str, str]:
    """An agent by the titles of all columns, in their order."""
    progress = agent.progress
    told = agent_cells(agent.agent_id, progress)
    return {
        "agent": str(agent.agent_id),
        "lease": agent.lease,
        "heard": ago(agent.seconds_since_heartbeat),
        "step": told["step"],
        "": share(progress.step, progress.total_steps) if has_started(progress) else "",
        "steps/s": rate(steps_per_second.get(agent.agent_id)),
        "updates": f"{progress.updates:,}",
        "updates/s": told["updates/s"] if agent.lease == "live" else NOTHING,
        "return": told["return"],
        "evaluation": told["evaluation"],
        "λ": _weight(progress),
        "policy": NOTHING if agent.policy_version is None else f"{agent.policy_version:,}",
        "state": agent.state,
        "node": agent.node_name,
    }


def _node_cells(node: NodeView) -> dict[str, str]:
    """An actor or evaluator by the titles of all columns, in their order."""
    now = node.attendance
    return {
        "role": node.role,
        "agent": "all" if node.agent_id is None else str(node.agent_id),
        "heard": ago(node.seconds_since_attendance),
        "envs": str(now.envs) if now.envs else NOTHING,
        "steps": f"{now.env_steps:,}" if now.env_steps else NOTHING,
        "steps/s": rate(now.env_steps_per_second) if now.env_steps_per_second else NOTHING,
        "policy": NOTHING if now.policy_version is None else f"{now.policy_version:,}",
        "behind": NOTHING if now.policy_lag_updates is None else f"{now.policy_lag_updates:,.0f}",
        "state": now.state,
        "node": node.node_name,
    }


def _table(
    titles: Sequence[str],
    rows: Iterable[tuple[Mapping[str, str], str]],
    *,
    expand: bool = False,
    gap: int = 2,
    wraps: bool = False,
) -> Table:
    """Rows are cells by their column's title, and a style; texts may be wrapped."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=expand, padding=(0, gap, 0, 0))
    for title in titles:
        table.add_column(
            title,
            justify="left" if title in _TEXTS else "right",
            no_wrap=not (wraps and title in _TEXTS),
            ratio=1 if expand and title == "state" else None,
        )
    for cells, style in rows:
        table.add_row(*(Text(cells[title]) for title in titles), style=style)
    return table


def _agent_style(agent: AgentView) -> str:
    if agent.lease == GONE or agent.has_failed:
        return "red"
    return "dim" if agent.lease == "left" else _state_style(agent.progress.state)


def _state_style(state: str) -> str:
    return "yellow" if state.startswith(WAITING) else ""


@dataclass(frozen=True)
class Pairs:
    """The similarity of every pair of these agents, as a heat map or in one line."""

    agents: Sequence[AgentView]

    @property
    def fit(self) -> bool:
        """Whether each is shown."""
        return 2 <= len(self.agents) <= MAX_AGENTS

    @property
    def height(self) -> int:
        """How many lines the heat map takes: one for its title, one for the columns, one for each agent."""
        return 2 + len(self.agents)

    @property
    def width(self) -> int:
        """How many characters a line of the heat map takes where it is wide."""
        return max(len(TITLE), self._label + len(self.agents) * WIDE)

    def heat_map(self, width: int) -> Group:
        """Rows learn from columns; a colour by the order of magnitude, and the number if there is room."""
        wide = self.width <= width
        cell = (WIDE if wide else NARROW) - 1
        table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
        table.add_column("", width=self._label - 1, justify="right", no_wrap=True, header_style="dim")
        for each in self.agents:
            table.add_column(
                str(each.agent_id), width=cell, justify="right", no_wrap=True, header_style="dim"
            )
        for learner in self.agents:
            cells = [_pair(learner, source.agent_id, wide=wide) for source in self.agents]
            table.add_row(Text(str(learner.agent_id), style="dim"), *cells)
        return Group(Text(TITLE, style="bold"), table)

    @property
    def summary(self) -> str:
        """All in one line; an empty text where no similarity of another agent is known."""
        known = [
            (value, agent.agent_id, source)
            for agent in self.agents
            for source, value in agent.progress.similarity.items()
            if source != agent.agent_id
        ]
        if not known:
            return ""
        lowest, (highest, learner, source) = min(known)[0], max(known, key=lambda pair: pair[0])
        nil = sum(value < LOWEST_WEIGHT for value, *_ in known)
        middle = median(value for value, *_ in known)
        return (
            f"similarity λ of {several(len(known), 'pair')}: median {weight(middle)}, "
            f"lowest {weight(lowest)}, highest {weight(highest)} ({learner} from {source}), "
            f"{nil:,} below {LOWEST_WEIGHT:g}"
        )

    @property
    def _label(self) -> int:
        return 1 + max(len(str(agent.agent_id)) for agent in self.agents)


def short_weight(value: float) -> str:
    """A weight in three characters: 1, .21, e-5 for anything around 1e-05, ~0 for what can change nothing."""
    if value == 0:
        return "0"
    if value < LOWEST_WEIGHT:
        return "~0"
    if value < 0.01:
        return f"e{math.floor(math.log10(value))}"
    text = f"{value:.2f}"
    return text.removeprefix("0") if value < 0.995 else f"{value:.0f}"


def _pair(learner: AgentView, source: int, *, wide: bool) -> Text:
    value = learner.progress.similarity.get(source)
    if source == learner.agent_id:
        return Text("·", style="dim")
    if value is None:
        return Text(NOTHING, style="dim")
    return Text(weight(value) if wide else short_weight(value), style=_colours(value))


def _colours(value: float) -> Style:
    """From cold at the lowest weight that counts to hot at 1, by order of magnitude."""
    depth = 1 - math.log10(min(1.0, max(value, LOWEST_WEIGHT))) / math.log10(LOWEST_WEIGHT)
    low, high, share = (_COLD, _WARM, 2 * depth) if depth < 0.5 else (_WARM, _HOT, 2 * depth - 1)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return Style(color=_DARK if depth > 0.6 else _LIGHT, bgcolor=f"#{red:02x}{green:02x}{blue:02x}")
