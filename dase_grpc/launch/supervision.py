"""What becomes of nodes of a local cluster that fail: said, written down, and started again or given up."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from dase_grpc.errors import NodeFailedError
from dase_grpc.launch.processes import Node
from dase_grpc.launch.restart_policy import MAX_RESTARTS, RestartPolicy
from dase_grpc.runs.directory import RunDirectory, checkpoint_paths
from dase_grpc.runs.restarts import Restart, append_restart


@dataclass(frozen=True)
class Supervision:
    """What a launcher does about failures: restarts in a row for each node, and where sentences go."""

    say: Callable[[str], None]
    limit: int = MAX_RESTARTS


class Supervisor:
    """Decides for all nodes of one cluster; lives on its event loop.

    Attributes:
        resting: names of nodes that failed and wait to be started again.
    """

    def __init__(self, directory: RunDirectory, supervision: Supervision) -> None:
        self.resting: set[str] = set()
        self._directory = directory
        self._supervision = supervision
        self._policies: dict[str, RestartPolicy] = {}
        self._given_up: dict[str, NodeFailedError] = {}

    def has_given_up(self, node: Node) -> bool:
        """Whether a node is not started any more."""
        return node.name in self._given_up

    async def rest(self, node: Node, *, agent_id: int | None = None) -> bool:
        """Returns when the node that has failed is due again; False, at once, if it is given up.

        Cancelled and called again for the same failure, it counts it once and does not wait again.

        Raises:
            RunDirectoryError: the failure cannot be written down.
        """
        if node.name in self.resting:
            return True
        policy = self._policies.setdefault(node.name, RestartPolicy(self._supervision.limit))
        pause_s = policy.pause_s(ran_s=asyncio.get_running_loop().time() - node.started_s)
        self._note(node, agent_id, pause_s)
        if pause_s is None:
            self._given_up[node.name] = node.failure(_given_up(policy.failures))
            self._say(f"{node.name} is given up ({node.ending}); its log is {node.log}")
            return False
        self._say(
            f"{node.name} ended ({node.ending}); it is started again in {pause_s:g} s "
            f"(restart {policy.failures} of {policy.limit}); its log is {node.log}"
        )
        self.resting.add(node.name)
        await asyncio.sleep(pause_s)
        return True

    def started(self, node: Node) -> None:
        """A node was started again."""
        self.resting.discard(node.name)

    def failure(self, node: Node) -> NodeFailedError:
        """Why a node was given up."""
        return self._given_up[node.name]

    def require_all(self) -> None:
        """Checks that no node was given up.

        Raises:
            NodeFailedError: one was.
        """
        for error in self._given_up.values():
            raise error

    def _note(self, node: Node, agent_id: int | None, pause_s: float | None) -> None:
        from_step = None
        if agent_id is not None:
            from_step = max(checkpoint_paths(self._directory.agent(agent_id).checkpoints), default=0)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        append_restart(self._directory.restarts, Restart(now, node.name, node.ending, from_step, pause_s))

    def _say(self, text: str) -> None:
        self._supervision.say(text)


def _given_up(failures: int) -> str:
    if not failures:
        return "ended"
    return f"ended again after {failures} restart{'s' if failures > 1 else ''} and is given up"
