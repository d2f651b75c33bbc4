"""`dase status`: a cluster told once, in tables for people or as JSON for programs."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from dase_grpc.observe.tables import Pairs, agent_table, head, node_table, rate
from dase_grpc.observe.view import (
    AgentView,
    BufferView,
    ClusterView,
    Look,
    NodeView,
    Rates,
    Target,
    observing,
    rates,
)

LOOKS_APART_S: Final = 1.0
TROUBLE_CODE: Final = 5
"""What `--check` makes of a cluster in which something is wrong."""

UNBOUNDED: Final = 200
"""Columns of a table that goes to a file or a pipe."""


@dataclass(frozen=True)
class Told:
    """Two looks at a cluster, a little apart, and the replays that were asked; the later one has a view."""

    before: Look
    now: Look
    replays: str

    @property
    def cluster(self) -> ClusterView:
        """What is known of it."""
        return self.now.cluster or ClusterView()

    @property
    def rates(self) -> Rates:
        """What happened in between."""
        return rates(self.before, self.now)

    @property
    def interval_s(self) -> float:
        """How far the looks are apart."""
        return self.now.at - self.before.at


def status_here(target: Target, console: Console, *, as_json: bool = False, check: bool = False) -> int:
    """Prints how a cluster is; returns the exit code, with `check` not 0 where something is wrong.

    Where no replay answers, or they refuse, that is a RefusalError.
    """
    return tell(asyncio.run(look_twice(target)), console, as_json=as_json, check=check)


def tell(told: Told, console: Console, *, as_json: bool, check: bool) -> int:
    """Prints what was seen; see `status_here`."""
    if not console.is_terminal:
        console.width = UNBOUNDED
    if as_json:
        text = json.dumps(document(told), ensure_ascii=False, indent=2, allow_nan=False)
        console.print(text, highlight=False, soft_wrap=True, markup=False)
    else:
        console.print(Group(*page(told, width=console.width)))
    return TROUBLE_CODE if check and told.now.troubles() else 0


async def look_twice(target: Target, *, apart_s: float = LOOKS_APART_S) -> Told:
    """Looks at a cluster, and again; raises as `status_here`."""
    async with observing(target) as observer:
        before = await observer.first_look()
        await asyncio.sleep(apart_s)
        return Told(before, await observer.first_look(), str(target.replay))


def page(told: Told, *, width: int) -> Iterator[RenderableType]:
    """What people are shown, `width` characters wide."""
    cluster, now, pairs = told.cluster, told.rates, Pairs(told.cluster.agents)
    yield from head(cluster, replays=told.replays)
    yield Text(
        f"{rate(now.inserted)} inserts/s, {rate(now.sampled)} samples/s, {rate(now.env_steps)} steps/s "
        f"(over {told.interval_s:.1f} s)"
    )
    if cluster.agents:
        yield from ("", agent_table(cluster.agents, now.steps_by_agent, width=width))
    if cluster.nodes:
        yield from ("", node_table(cluster.nodes, width=width))
    if pairs.fit:
        yield from ("", pairs.heat_map(width))
    elif summary := pairs.summary:
        yield from ("", Text(summary))
    if wrong := told.now.troubles():
        yield ""
        yield from (Text(f"! {text}", style="yellow") for text in wrong)


def document(told: Told) -> dict[str, Any]:
    """What programs are given; docs/watching.md says what each field is. None where a number is not known."""
    cluster, now = told.cluster, told.rates
    return {
        "replay": told.replays,
        "run_id": cluster.run_id,
        "environment": cluster.environment,
        "draining": cluster.draining,
        "uptime_seconds": cluster.uptime_seconds,
        "interval_seconds": told.interval_s,
        "inserted_per_second": now.inserted,
        "sampled_per_second": now.sampled,
        "env_steps_per_second": now.env_steps,
        "buffer": _buffer(cluster.buffer),
        "agents": [_agent(agent, now.steps_by_agent) for agent in cluster.agents],
        "nodes": [_node(node) for node in cluster.nodes],
        "troubles": told.now.troubles(),
    }


def _buffer(buffer: BufferView) -> dict[str, Any]:
    told = {**vars(buffer), "size_by_agent": _by_agent(buffer.size_by_agent)}
    return {name: value for name, value in told.items() if name != "incarnations"}


def _agent(agent: AgentView, steps_per_second: Mapping[int, float]) -> dict[str, Any]:
    own = {name: value for name, value in vars(agent).items() if name not in ("progress", "policy_version")}
    progress = agent.progress
    return {
        **own,
        "state": progress.state,
        "step": progress.step,
        "total_steps": progress.total_steps,
        "env_steps_per_second": steps_per_second.get(agent.agent_id),
        **vars(progress),
        "updates_per_second": progress.updates_per_second or None,
        "similarity": _by_agent(progress.similarity),
        "policy_version": agent.policy_version,
    }


def _node(node: NodeView) -> dict[str, Any]:
    own, now = {name: value for name, value in vars(node).items() if name != "attendance"}, node.attendance
    return {
        **own,
        "state": now.state,
        **vars(now),
        "env_steps_per_second": now.env_steps_per_second or None,
    }


def _by_agent(values: Mapping[int, float]) -> dict[str, float]:
    return {str(agent): value for agent, value in sorted(values.items())}
