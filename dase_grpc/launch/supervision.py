"""What becomes of nodes of a local cluster that fail: said, written down, and started again or given up."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from dase_grpc.errors import NodeFailedError
from dase_grpc.launch.processes import Node
from dase_grpc.launch.restart_policy import MAX_RESTARTS, RestartPolicy
from dase_grpc.runs.directory import RunDirectory, checkpoint_paths
from dase_grpc.runs.restarts import Restart, append_restart

BEFORE_THE_END: Final = "before its last step"


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
        from_step = None if agent_id is None else self._newest_checkpoint(agent_id)
        ran_s = asyncio.get_running_loop().time() - node.started_s
        pause_s = policy.pause_s(ran_s=ran_s, step=from_step)
        early = agent_id is not None and node.process.returncode == 0
        why = f"{node.ending}, {BEFORE_THE_END}" if early else node.ending
        now = datetime.now(UTC).isoformat(timespec="seconds")
        append_restart(self._directory.restarts, Restart(now, node.name, why, from_step, pause_s))
        if pause_s is None:
            self._given_up[node.name] = node.failure(_given_up(policy, early=early))
            self._say(f"{node.name} is given up ({why}); its log is {node.log}")
            return False
        self._say(
            f"{node.name} ended ({why}); it is started again in {pause_s:g} s "
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

    def has_last_step(self, agent_id: int) -> bool:
        """Whether an agent has kept its last step: a learner that an environment ends exits well too."""
        return self._newest_checkpoint(agent_id) >= self._directory.config.train.steps

    def _newest_checkpoint(self, agent_id: int) -> int:
        return max(checkpoint_paths(self._directory.agent(agent_id).checkpoints), default=0)

    def _say(self, text: str) -> None:
        self._supervision.say(text)


def _given_up(policy: RestartPolicy, *, early: bool) -> str:
    """What became of a node; how it ended is said after it."""
    how = (
        f" {BEFORE_THE_END} although nothing failed (does the environment end the process?)" if early else ""
    )
    if not policy.restarts:
        return f"ended{how}"
    in_a_row = policy.failures >= policy.limit
    count, comma = policy.failures if in_a_row else policy.restarts, "," if early else ""
    return f"ended{how}{comma} again after {count} restart{'s' if count > 1 else ''}{comma} and is given up"
