"""Tables of agents and nodes, and what is wrong with a cluster."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table
from rich.text import Text

from dase_grpc.observe.cells import (
    NOTHING,
    agent_cells,
    buffer_text,
    has_started,
    rate,
    seconds,
    share,
    weight_text,
)
from dase_grpc.observe.view import GONE, AgentView, BufferView, ClusterView, Look, NodeView
from dase_grpc.progress import Progress, duration, several

SHOWN_SHARES: Final = 8
"""With more agents their shares of the buffer are not listed."""

WAITING: Final = "waiting: "
FAILED: Final = "failed: "
SILENT_S: Final = 5.0
"""Nodes tell of themselves twice a second."""


@dataclass(frozen=True)
class Column:
    """A column of a table that is shown where there are at least `from_width` characters in a line."""

    title: str
    from_width: int = 0
    is_text: bool = False
    wraps: bool = False


_TRAINED: Final = (
    Column("agent"),
    Column("step"),
    Column("return"),
    Column("evaluation"),
    Column("first"),
    Column("updates/s"),
    Column("similarity λ", is_text=True, wraps=True),
    Column("state", is_text=True, wraps=True),
)
_AGENTS: Final = (
    Column("agent"),
    Column("lease", 92, is_text=True),
    Column("heard", 92),
    Column("step"),
    Column(""),
    Column("steps/s", 120),
    Column("updates", 120),
    Column("updates/s"),
    Column("return"),
    Column("evaluation"),
    Column("λ"),
    Column("policy", 120),
    Column("state", is_text=True),
    Column("node", 140, is_text=True),
)
_NODES: Final = (
    Column("role", is_text=True),
    Column("agent"),
    Column("heard", 92),
    Column("envs"),
    Column("steps", 100),
    Column("steps/s"),
    Column("policy"),
    Column("behind"),
    Column("state", is_text=True),
    Column("node", is_text=True),
)


def head(cluster: ClusterView, *, replays: str) -> list[Text]:
    """Which run this is, who takes part, and what the buffer holds: a line each."""
    up = "" if cluster.uptime_s is None else f"   up {duration(cluster.uptime_s)}"
    ends = "   shutting down" if cluster.draining else ""
    environment = cluster.environment or "no learner has joined yet"
    first = Text.assemble(
        ("run ", "dim"), (cluster.run_id, "bold"), ("   replay ", "dim"), replays, up, (ends, "red")
    )
    return [
        line(first.append(f"   {environment}")),
        line(Text(_members(cluster))),
        line(Text(_buffer(cluster.buffer))),
    ]


def progress_table(agents: Iterable[tuple[str, Progress | None]], *, width: int, weighs: bool) -> Table:
    """A line for each agent of a run, by its name; with similarities where the method `weighs` by them."""
    columns = [column for column in _TRAINED if weighs or column.title != "similarity λ"]
    rows = (
        ({"agent": name, **agent_cells(agent_id, progress)}, "")
        for agent_id, (name, progress) in enumerate(agents)
    )
    return _table(columns, rows, width=width, gap=1)


def agent_table(
    agents: Iterable[AgentView], steps_per_second: Mapping[int, float], *, width: int, expand: bool = False
) -> Table:
    """A line for each agent, below one of titles."""
    rows = ((_agent_cells(agent, steps_per_second), _agent_style(agent)) for agent in agents)
    return _table(_AGENTS, rows, width=width, expand=expand)


def node_table(nodes: Iterable[NodeView], *, width: int, expand: bool = False) -> Table:
    """A line for each actor and evaluator, below one of titles."""
    rows = ((_node_cells(node), _state_style(node.attendance.state)) for node in nodes)
    return _table(_NODES, rows, width=width, expand=expand)


def counted(states: Iterable[str]) -> str:
    """For example "3 live, 1 expired", the most frequent first."""
    return ", ".join(f"{count:,} {state}" for state, count in Counter(states).most_common())


def line(text: Text) -> Text:
    """The same text, cut off where the line ends."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _members(cluster: ClusterView) -> str:
    agents, nodes = cluster.agents, Counter(node.role for node in cluster.nodes)
    leases = f": {counted(agent.lease for agent in agents)}" if agents else ""
    others = "".join(f"; {several(count, role)}" for role, count in sorted(nodes.items()))
    return f"{several(len(agents), 'agent')}{leases}{others}{_shares(cluster.buffer)}"


def _buffer(buffer: BufferView) -> str:
    text = buffer_text(buffer.size, buffer.capacity)
    if not buffer.capacity:
        return text
    return f"{text}   inserted {buffer.inserted:,}  sampled {buffer.sampled:,}  refused {buffer.refused:,}"


def _shares(buffer: BufferView) -> str:
    """Whose transitions the buffer holds, where the agents are few."""
    if not buffer.size or not 1 < len(buffer.size_by_agent) <= SHOWN_SHARES:
        return ""
    shares = (f"{agent}:{share(size, buffer.size)}" for agent, size in buffer.size_by_agent.items())
    return f"   in the buffer {'  '.join(shares)}"


def _agent_cells(agent: AgentView, steps_per_second: Mapping[int, float]) -> dict[str, str]:
    progress = agent.progress
    told = agent_cells(agent.agent_id, progress)
    return {
        **told,
        "agent": str(agent.agent_id),
        "lease": agent.lease,
        "heard": seconds(agent.silent_s),
        "": share(progress.step, progress.total_steps) if has_started(progress) else "",
        "steps/s": rate(steps_per_second.get(agent.agent_id)),
        "updates": f"{progress.updates:,}",
        "updates/s": told["updates/s"] if agent.lease == "live" else NOTHING,
        "λ": weight_text(progress),
        "policy": NOTHING if agent.policy_version is None else f"{agent.policy_version:,}",
        "state": agent.state,
        "node": agent.node_name,
    }


def _node_cells(node: NodeView) -> dict[str, str]:
    now = node.attendance
    return {
        "role": node.role,
        "agent": "all" if node.agent_id is None else str(node.agent_id),
        "heard": seconds(node.silent_s),
        "envs": str(now.envs) if now.envs else NOTHING,
        "steps": f"{now.env_steps:,}" if now.env_steps else NOTHING,
        "steps/s": rate(now.env_steps_per_second) if now.env_steps_per_second else NOTHING,
        "policy": NOTHING if now.policy_version is None else f"{now.policy_version:,}",
        "behind": NOTHING if now.policy_lag_updates is None else f"{now.policy_lag_updates:,.0f}",
        "state": now.state,
        "node": node.node_name,
    }


def _table(
    columns: Sequence[Column],
    rows: Iterable[tuple[Mapping[str, str], str]],
    *,
    width: int,
    expand: bool = False,
    gap: int = 2,
) -> Table:
    """The columns that fit; rows are cells by their column's title, and a style."""
    shown = [column for column in columns if width >= column.from_width]
    table = Table(box=None, pad_edge=False, header_style="bold", expand=expand, padding=(0, gap, 0, 0))
    for column in shown:
        table.add_column(
            column.title,
            justify="left" if column.is_text else "right",
            no_wrap=not column.wraps,
            ratio=1 if expand and column.title == "state" else None,
        )
    for cells, style in rows:
        table.add_row(*(Text(cells[column.title]) for column in shown), style=style)
    return table


def _agent_style(agent: AgentView) -> str:
    if agent.lease == GONE or agent.reason.startswith(FAILED):
        return "red"
    return "dim" if agent.lease == "left" else _state_style(agent.progress.state)


def _state_style(state: str) -> str:
    return "yellow" if state.startswith(WAITING) else ""


def troubles(look: Look) -> list[str]:
    """What an operator should know of, the most serious first."""
    found = [str(error) for error in look.silent.values()]
    if look.cluster is not None:
        found += _of_cluster(look.cluster)
    return found


def in_trouble(agent: AgentView) -> bool:
    """Whether one of the troubles is this agent's."""
    return _of_agent(agent) is not None


def _of_cluster(cluster: ClusterView) -> Iterator[str]:
    if cluster.draining:
        yield "the replay is shutting down: it takes no new nodes"
    yield from filter(None, map(_of_agent, cluster.agents))
    yield from filter(None, map(_of_node, cluster.nodes))


def _of_agent(agent: AgentView) -> str | None:
    who = f"agent {agent.agent_id}"
    if agent.lease == GONE:
        return f"{who} is gone: {agent.node_name} was last heard of {seconds(agent.silent_s)} ago"
    if agent.lease == "left":
        return f"{who} {agent.reason}" if agent.reason.startswith(FAILED) else None
    if agent.progress.state.startswith(WAITING):
        return f"{who} waits for {_what(agent.progress.state)}"
    return f"{who} has been silent for {seconds(agent.silent_s)}" if agent.silent_s > SILENT_S else None


def _of_node(node: NodeView) -> str | None:
    who = node.node_name if node.agent_id is None else f"{node.node_name} of agent {node.agent_id}"
    if node.silent_s > SILENT_S:
        return f"{who} has been silent for {seconds(node.silent_s)}"
    if node.attendance.state.startswith(WAITING):
        return f"{who} waits for {_what(node.attendance.state)}"
    return None


def _what(state: str) -> str:
    return state.removeprefix(WAITING).removeprefix("for ")
