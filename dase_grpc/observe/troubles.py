"""What is wrong with a cluster, in sentences; nothing where all is well."""

from collections.abc import Iterator
from typing import Final

from dase_grpc.observe.cells import seconds
from dase_grpc.observe.rates import Look
from dase_grpc.observe.view import GONE, AgentView, ClusterView, NodeView

WAITING: Final = "waiting: "
FAILED: Final = "failed: "
SILENT_S: Final = 5.0
"""Nodes tell of themselves twice a second."""


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
