"""Policies that arrive: as tensors for learners and actors to use, and those due for an evaluator to take."""

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.errors import ConfigError, DaseError, WaitedTooLongError
from dase_grpc.learning.agents.policy import ActorPolicy, Published
from dase_grpc.learning.agents.registry import load_policy
from dase_grpc.learning.agents.snapshots import Behaviour
from dase_grpc.learning.training.parts import from_bytes, to_bytes
from dase_grpc.replay.buffer.policies import PolicyBytes
from dase_grpc.replay.client.connection import Connection
from dase_grpc.replay.client.handoff import Wait, Waited, WaitReason
from dase_grpc.replay.client.policies import PolicyExchange, follow
from dase_grpc.schema import TransitionSchema

CPU: Final = torch.device("cpu")


class FollowedPolicy:
    """A Guide (learning/agents/snapshots.py) that follows the policies which one agent publishes.

    `behaviour` belongs to the thread that explores and never waits; everything else belongs to the event
    loop. Of policies that come faster than they are used, the latest counts. `uniformly`: whether to act
    uniformly at random as long as the policy has not been trained at all.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        agent_id: int,
        config: AgentConfig,
        schema: TransitionSchema,
        uniformly: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._agent_id = agent_id
        self._config = config
        self._schema = schema
        self._uniformly = uniformly
        self._arrived: PolicyBytes | None = None  # set by the event loop
        self._came = asyncio.Event()
        self._missing = Waited(connection.timing)
        self._used: tuple[PolicyBytes, Behaviour] | None = None  # of the exploring thread alone

    def behaviour(self) -> Behaviour:
        """See Guide. ConfigError if the policy is that of an agent with other settings."""
        policy = self._arrived
        if policy is None:
            raise RuntimeError("there is no policy before `first` has returned")
        if policy.version == 0 and self._uniformly():
            return Behaviour(None, 0)
        if self._used is None or self._used[0] is not policy:
            self._used = policy, Behaviour(self._loaded(policy), policy.version)
        return self._used[1]

    @property
    def latest_version(self) -> int | None:
        """Training iterations of the latest policy that has come."""
        return None if self._arrived is None else self._arrived.version

    @property
    def wait(self) -> Wait | None:
        """The wait for the first policy, if it is a long one."""
        if not self._missing.long:
            return None
        return Wait(self._missing, WaitReason.POLICY, f"waiting for a policy of agent {self._agent_id}")

    async def first(self, *, timeout_s: float) -> None:
        """Returns once there is a policy. WaitedTooLongError if none has come in time."""
        self._missing.begin()
        try:
            async with asyncio.timeout(timeout_s):
                await self._came.wait()
            self._missing.end()
        except TimeoutError:
            raise WaitedTooLongError(
                f"the learner of agent {self._agent_id} has published no policy for {timeout_s:g} s, so this "
                f"actor ends; see the learner's log, or let it wait longer with --replay-timeout"
            ) from None

    async def run(self) -> None:
        """Takes what the agent publishes, until cancelled."""
        await follow(self._connection, [self._agent_id], self._take)

    def _take(self, policy: PolicyBytes) -> None:
        self._arrived = policy
        self._came.set()

    def _loaded(self, policy: PolicyBytes) -> ActorPolicy:
        tensors = unpacked(policy)
        try:
            return load_policy(self._config, self._schema, tensors, CPU)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"policy {policy.version} of agent {self._agent_id} is not one of this actor's settings "
                f"({error.args[0]}); start it with the settings of the learner"
            ) from error


def tensor_exchange(
    connection: Connection, *, follow: Collection[int]
) -> PolicyExchange[Mapping[str, Tensor], Published]:
    """`PeerPolicies` (learning/agents/policy.py) over the network."""
    return PolicyExchange(
        connection,
        follow=follow,
        pack=to_bytes,
        unpack=lambda policy: Published(policy.version, unpacked(policy)),
    )


def unpacked(policy: PolicyBytes) -> dict[str, Tensor]:
    """What a policy that has arrived is made of. DaseError if it is none."""
    try:
        return from_bytes(policy.payload)
    except DaseError as error:
        raise DaseError(
            f"policy {policy.version} of agent {policy.agent_id} cannot be read: {error}"
        ) from None


@dataclass
class _Agent:
    """One agent's policies: the newest that has arrived, and the one that is due and not taken yet.

    Attributes:
        total: the step at which it ends.
        claimed: the step of the last policy that was found due, evaluated or not; None before the first.
        evaluated: the step of the last one evaluated.
        ended: it has left, and `latest` was its last.
    """

    total: int
    claimed: int | None = None
    evaluated: int | None = None
    pending: PolicyBytes | None = None
    latest: PolicyBytes | None = None
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
        total: the step at which agents end, unless `heard` tells of a later one.
        skipped: called with an agent and how many evaluations of it will not be made; must not block.
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

    def offer(self, policy: PolicyBytes) -> None:
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

    def take(self) -> PolicyBytes | None:
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

    def done(self, policy: PolicyBytes) -> None:
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

    def _claim(self, agent: _Agent, policy: PolicyBytes) -> None:
        passed = policy.step // self._every - (-1 if agent.claimed is None else agent.claimed // self._every)
        left_out = max(0, passed - 1) + (agent.pending is not None)
        if left_out:
            self.skipped += left_out
            self._on_skipped(policy.agent_id, left_out)
        agent.claimed, agent.pending = policy.step, policy
        self._moved.notify_all()
