"""Notices nodes whose processes live and do nothing: stopped, or hanging where none of their threads runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from dase_grpc.launch.processes import Node
from dase_grpc.replay.wire.v1 import cluster_pb2

SILENT_S: Final = 60.0
"""How long a replay may not answer, and a learner without a lease live; see `silent_nodes`."""

LONGEST_LOOK_S: Final = 5.0
"""More time passes between two looks only if the process that looks is stopped, or its machine asleep."""


class Silence:
    """Adds up how long nodes have been silent. Plain and synchronous; the caller brings the time."""

    def __init__(self) -> None:
        self._silent_s: dict[Node, float] = {}
        self._looked_at = 0.0

    def over(self, silent: Mapping[Node, float], *, now: float) -> list[Node]:
        """Which of the nodes that are silent now have been so, at each look, for their limits in seconds.

        Time in which nobody looked does not count, for then the nodes may not have run either.
        """
        passed_s = min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now
        before = self._silent_s
        self._silent_s = {node: before[node] + passed_s if node in before else 0.0 for node in silent}
        return [node for node, lasted_s in self._silent_s.items() if lasted_s >= silent[node]]


def silent_nodes(
    status: cluster_pb2.StatusResponse | None,
    replay: Node | None,
    learners: Sequence[Node],
    *,
    env_timeout_s: float,
    now: float,
) -> dict[Node, float]:
    """The nodes that run and are not heard of, and for how many seconds that may last.

    `status` is the replay's answer, None if it gave none. Learners are in the order of their agent ids; one
    is `heard` of from its first heartbeat on, and silent when it has no lease then, as its environment may
    make it if that keeps Python's global lock in a call: so it has `env_timeout_s` if that is longer.
    `now` is the time on the clock of `Node.started_s`.
    """
    if status is None:
        return {} if replay is None or not replay.runs else {replay: SILENT_S}
    limit_s = max(SILENT_S, env_timeout_s)
    holders = set(_heard(status, learners, now=now))
    return {node: limit_s for node in learners if node.runs and node.heard and node not in holders}


def _heard(status: cluster_pb2.StatusResponse, learners: Sequence[Node], *, now: float) -> Iterator[Node]:
    """The learners that hold their leases; they are noted as heard of.

    The lease of one that was started again may still be that of the process before, or one that the replay
    has found on its disk; neither has had a heartbeat, with its state, since then.
    """
    for agent in status.agents:
        if agent.agent_id < len(learners) and agent.lease == "live" and agent.progress.state:
            node = learners[agent.agent_id]
            node.heard = node.heard or agent.seconds_since_heartbeat < now - node.started_s
            yield node
