"""Policies that are due for an evaluator: the event loop offers what arrives, a thread takes."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dase_grpc.replay.buffer.policies import Policy


@dataclass
class _Agent:
    """One agent's policies.

    Attributes:
        total: the step at which it ends.
        claimed: the step of the last policy that was found due, evaluated or not; None before the first.
        evaluated: the step of the last one evaluated.
        pending: due, and not taken yet.
        latest: the newest that has arrived.
        ended: it has left, and `latest` was its last.
    """

    total: int
    claimed: int | None = None
    evaluated: int | None = None
    pending: Policy | None = None
    latest: Policy | None = None
    ended: bool = False

    @property
    def complete(self) -> bool:
        """Whether nothing is left to evaluate, now and later."""
        if self.pending is not None or self.evaluated != self.claimed:
            return False
        return self.ended or (self.evaluated is not None and self.evaluated >= self.total)


class DuePolicies:
    """Of each agent the latest policy that is due, which is the first from each multiple of `every` steps on.

    One that is not taken before the next is due gives way to that, so whoever takes is never behind. An
    agent's last policy is due whatever its step. Every method may be called from any thread; `take` alone
    blocks.

    Args:
        evaluated: the agents, and the step of the last evaluation of each, None before the first.
        every: steps between evaluations.
        total: the step at which agents end, unless `heard` tells of a later one.
        skipped: called with an agent and how many evaluations of it will not be made; must not block.

    Attributes:
        skipped: how many evaluations will not be made, of all agents.
    """

    def __init__(
        self,
        evaluated: Mapping[int, int | None],
        *,
        every: int,
        total: int,
        skipped: Callable[[int, int], None] = lambda agent_id, count: None,
    ) -> None:
        self._every = every
        self._on_skipped = skipped
        self.skipped = 0
        self._agents = {
            agent_id: _Agent(total, claimed=step, evaluated=step) for agent_id, step in evaluated.items()
        }
        self._moved = threading.Condition()
        self._closed = False

    def offer(self, policy: Policy) -> None:
        """A policy has arrived."""
        with self._moved:
            agent = self._agents[policy.agent_id]
            agent.latest = policy
            if self._is_due(agent, policy.step):
                self._claim(agent, policy)

    def heard(self, agent_id: int, *, total: int, finished: bool, version: int | None) -> None:
        """What is known of an agent: its last step, whether it left at that, its latest policy's version.

        One that has left before `total` steps may be resumed, so it has not ended.
        """
        with self._moved:
            agent = self._agents[agent_id]
            finished = finished and total >= agent.total
            agent.total = max(total, agent.total)
            arrived = version is None or (agent.latest is not None and agent.latest.version >= version)
            agent.ended = finished and arrived
            latest = agent.latest
            if agent.ended and latest is not None and (agent.claimed is None or latest.step > agent.claimed):
                self._claim(agent, latest)
            self._moved.notify_all()

    def latest(self, agent_id: int) -> Policy | None:
        """The newest policy of an agent that has arrived."""
        with self._moved:
            return self._agents[agent_id].latest

    def take(self) -> Policy | None:
        """The next policy to evaluate, of the agent that is furthest behind; blocks until there is one.

        None after `close`, and once every agent has ended and its last policy is evaluated.
        """
        with self._moved:
            while not self._closed and not all(agent.complete for agent in self._agents.values()):
                waiting = [agent for agent in self._agents.values() if agent.pending is not None]
                if not waiting:
                    self._moved.wait()
                    continue
                agent = min(waiting, key=lambda each: -1 if each.evaluated is None else each.evaluated)
                policy, agent.pending = agent.pending, None
                return policy
            return None

    def done(self, policy: Policy) -> None:
        """A policy that was taken has been evaluated."""
        with self._moved:
            self._agents[policy.agent_id].evaluated = policy.step
            self._moved.notify_all()

    def close(self) -> None:
        """Lets `take` give nothing more."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()

    def _is_due(self, agent: _Agent, step: int) -> bool:
        if agent.claimed is None:
            return True
        return step // self._every > agent.claimed // self._every or agent.claimed < agent.total <= step

    def _claim(self, agent: _Agent, policy: Policy) -> None:
        passed = policy.step // self._every - (-1 if agent.claimed is None else agent.claimed // self._every)
        left_out = max(0, passed - 1) + (agent.pending is not None)
        if left_out:
            self.skipped += left_out
            self._on_skipped(policy.agent_id, left_out)
        agent.claimed, agent.pending = policy.step, policy
        self._moved.notify_all()
