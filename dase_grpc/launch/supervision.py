"""Nodes of a local cluster that fail or fall silent: said, written down, and started again or given up."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from dase_grpc.errors import LASTING_CODES, USAGE_CODE, NodeFailedError
from dase_grpc.launch.processes import STOP_S, Node
from dase_grpc.pace import pause_s
from dase_grpc.progress import several
from dase_grpc.replay.wire.v1 import cluster_pb2
from dase_grpc.runs.directory import RunDirectory, checkpoint_paths
from dase_grpc.runs.logs import Restart, append_restart

MAX_RESTARTS: Final = 5
IN_ALL: Final = 20
"""How many times its restarts in a row a node has in all, whatever it gets done in between."""

LONGEST_LOOK_S: Final = 5.0
"""More time passes between two looks only if the process that looks is stopped, or its machine asleep."""

BEFORE_THE_END: Final = "before its last step"


@dataclass(frozen=True)
class Timing:
    """Times of a local cluster."""

    ready_s: float = 30.0  # until a replay answers
    poll_s: float = 0.5  # between two looks at the cluster
    status_s: float = 2.0  # for a look
    actors_end_s: float = 15.0  # until actors notice that their agents have finished
    stop_s: float = STOP_S  # for nodes to drain
    hurry_s: float = 3.0  # the same, where this process's own launcher is gone
    first_pause_s: float = 1.0  # before a node that failed is started again
    longest_pause_s: float = 30.0
    healthy_s: float = 300.0  # of a replay that is well: what failed before counts no more
    silent_s: float = 60.0  # without an answer, or, of a learner, without a lease; see `silent_nodes`


USUAL: Final = Timing()


@dataclass
class RestartPolicy:
    """Decides for one node. Plain and synchronous; the caller brings the time.

    Attributes:
        limit: restarts in a row, without having got on in between, after which it is given up.
        failures: how many there have been in a row.
        restarts: how many there have been in all; `IN_ALL` times the limit is the most.
    """

    limit: int = MAX_RESTARTS
    timing: Timing = USUAL
    failures: int = field(default=0, init=False)
    restarts: int = field(default=0, init=False)
    _step: int | None = field(default=None, init=False)

    def pause_s(self, *, ran_s: float, step: int | None = None) -> float | None:
        """Seconds until the node that failed after having run for `ran_s` is started again.

        They double with each failure in a row; None when it is given up. `step` is the newest checkpoint of
        a learner. A learner has got on if that is newer than at its last failure: else it may fail at the
        same step for ever, however long it takes to get there. A replay has if it was well for a while.
        """
        got_on = ran_s >= self.timing.healthy_s if step is None else self._step is None or step > self._step
        self._step = step
        if got_on:
            self.failures = 0
        if self.failures >= self.limit or self.restarts >= IN_ALL * self.limit:
            return None
        self.failures += 1
        self.restarts += 1
        first_s, cap_s = self.timing.first_pause_s, self.timing.longest_pause_s
        return pause_s(self.failures - 1, first_s=first_s, cap_s=cap_s)

    def given_up(self, *, early: bool) -> str:
        """What became of the node; how it ended is said after it."""
        hint = " although nothing failed (does the environment end the process?)"
        how = f"ended {BEFORE_THE_END}{hint}" if early else "ended"
        if not self.restarts:
            return how
        count, comma = self.failures if self.failures >= self.limit else self.restarts, "," if early else ""
        return f"{how}{comma} again after {several(count, 'restart')}{comma} and is given up"


class Supervisor:
    """Decides about failures for all nodes of one cluster; lives on its event loop.

    Each node has `limit` restarts in a row; `say` gets a sentence for each failure.

    Attributes:
        resting: names of nodes that failed and wait to be started again.
    """

    def __init__(
        self,
        directory: RunDirectory,
        say: Callable[[str], None],
        *,
        limit: int = MAX_RESTARTS,
        timing: Timing = USUAL,
    ) -> None:
        self.resting: set[str] = set()
        self._directory = directory
        self._say = say
        self._limit = limit
        self._timing = timing
        self._policies: dict[str, RestartPolicy] = {}
        self._given_up: dict[str, NodeFailedError] = {}

    def has_given_up(self, node: Node) -> bool:
        """Whether a node is not started any more."""
        return node.name in self._given_up

    async def rest(self, node: Node, *, agent_id: int | None = None) -> bool:
        """Returns when the node that has failed is due again; False, at once, if it is given up.

        Cancelled and called again for the same failure, it counts it once and does not wait again.
        """
        if node.name in self.resting:
            return True
        policy = self._policies.setdefault(node.name, RestartPolicy(self._limit, self._timing))
        from_step = None if agent_id is None else self._newest_checkpoint(agent_id)
        ran_s = asyncio.get_running_loop().time() - node.started_s
        pause_s = policy.pause_s(ran_s=ran_s, step=from_step)
        early = agent_id is not None and node.process.returncode == 0
        why = f"{node.ending}, {BEFORE_THE_END}" if early else node.ending
        now = datetime.now(UTC).isoformat(timespec="seconds")
        append_restart(self._directory.restarts, Restart(now, node.name, why, from_step, pause_s))
        if pause_s is None:
            self._given_up[node.name] = node.failure(policy.given_up(early=early))
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
        """Checks that no node was given up."""
        for error in self._given_up.values():
            raise error

    def has_last_step(self, agent_id: int) -> bool:
        """Whether an agent has kept its last step: a learner that an environment ends exits well too."""
        return self._newest_checkpoint(agent_id) >= self._directory.config.train.steps

    def _newest_checkpoint(self, agent_id: int) -> int:
        return max(checkpoint_paths(self._directory.agent(agent_id).checkpoints), default=0)


def is_lasting(code: int, *, at_restart: bool = False) -> bool:
    """Whether a process that ended with this exit code would end so again, however often it is started.

    `at_restart` is before one that took the place of another was heard of. What it refuses as a matter of
    usage may pass then: its port, for example, which another program has taken in the pause.
    """
    return code in LASTING_CODES and not (at_restart and code == USAGE_CODE)


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
    silent_s: float,
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
        return {} if replay is None or not replay.runs else {replay: silent_s}
    holders = set(_heard(status, learners, now=now))
    limit_s = max(silent_s, env_timeout_s)
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
