"""Policies as tensors: what a learner publishes and sees of its peers, what an actor follows."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.errors import ConfigError, DaseError, WaitedTooLongError
from dase_grpc.learning.agents.policy import ActorPolicy, Published, load_policy
from dase_grpc.learning.agents.snapshots import Behaviour
from dase_grpc.learning.training.publishing import from_bytes, is_newer, to_bytes
from dase_grpc.replay.buffer.policies import Policy
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.policies import PolicyPublisher, follow
from dase_grpc.replay.client.waits import Wait, Waited, WaitReason
from dase_grpc.schema import TransitionSchema

CPU: Final = torch.device("cpu")


class FollowedPolicy:
    """A Guide (learning/training/acting.py) that follows the policies which one agent publishes.

    `behaviour` belongs to the thread that explores and never waits; everything else belongs to the event
    loop. Of policies that come faster than they are used, the latest counts. The stream begins again when
    it breaks (replay/client/connection.py).

    Args:
        connection: to the replay that serves the policies.
        agent_id, config, schema: whose policies they are.
        uniformly: whether to act uniformly at random as long as the policy has not been trained at all.
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
        self._arrived: Policy | None = None  # set by the event loop
        self._came = asyncio.Event()
        self._missing = Waited()
        self._used: tuple[Policy, Behaviour] | None = None  # of the exploring thread alone

    def behaviour(self) -> Behaviour:
        """See Guide.

        Raises:
            ConfigError: the policy is that of an agent with other settings.
            DaseError: it cannot be read.
        """
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
        """Returns once there is a policy.

        Raises:
            WaitedTooLongError: none has come in time.
        """
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
        """Takes what the agent publishes, until cancelled.

        Raises:
            RefusalError: see Connection.keep.
        """
        await follow(self._connection, [self._agent_id], self._take)

    def _take(self, policy: Policy) -> None:
        self._arrived = policy
        self._came.set()

    def _loaded(self, policy: Policy) -> ActorPolicy:
        tensors = unpacked(policy)
        try:
            return load_policy(self._config, self._schema, tensors, CPU)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"policy {policy.version} of agent {self._agent_id} is not one of this actor's settings "
                f"({error}); start it with the settings of the learner"
            ) from error


@dataclass(frozen=True)
class _Outgoing:
    version: int
    step: int
    payload: bytes


class PolicyExchange:
    """`PeerPolicies` (learning/training/publishing.py) over the network.

    `publish` and `latest` belong to the compute thread and never wait for the network; `run` and `flush`
    belong to the event loop that made the exchange. Each direction keeps the latest policy only: one that
    has not been sent yet is replaced by the next, and so is one that nobody has looked at. The threads
    meet in single references that one side sets and the other reads, so neither needs a lock.

    Both streams begin again when they break (replay/client/connection.py). The service keeps policies in
    memory, so the latest is sent again when it was started anew.

    A learner node makes one exchange, gives it to its learner, and runs `run` among its streams::

        exchange = PolicyExchange(connection, follow=[agent for agent in range(agents) if agent != own])
        async with asyncio.TaskGroup() as tasks:
            exchanging = tasks.create_task(exchange.run())
            ...                        # the compute thread calls publish and latest
            await exchange.flush()     # after it has ended: let the last policy arrive
            exchanging.cancel()

    Args:
        connection: to the replay, as the agent whose policies are published.
        follow: the agents that `latest` may be asked for, those that join later included; may be empty.

    Attributes:
        steps: how many environment steps the agent has had; called by `publish`.
    """

    def __init__(self, connection: Connection, *, follow: Collection[int]) -> None:
        self._connection = connection
        self._follow = frozenset(follow)
        self._loop = asyncio.get_running_loop()
        self.steps: Callable[[], int] = lambda: 0
        self._outgoing: _Outgoing | None = None  # set by the compute thread
        self._accepted: _Outgoing | None = None  # set by the event loop
        self._moved = asyncio.Event()
        self._arrived: dict[int, Policy] = {}  # set by the event loop
        self._seen: dict[int, tuple[Policy, Published]] = {}  # of the compute thread alone
        connection.on_restart(self._send_again)

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See PeerPolicies; the policy is packed here, and sent by `run`.

        The version last published goes out again where the agent has had more steps since.
        """
        before, step = self._outgoing, self.steps()
        if before is None or is_newer(version, before.version) or step > before.step:
            self._outgoing = _Outgoing(version, step, to_bytes(tensors))
            self._loop.call_soon_threadsafe(self._moved.set)

    def latest(self, agent_id: int) -> Published | None:
        """See PeerPolicies; a policy is unpacked when it is first looked at.

        Raises:
            KeyError: the exchange does not follow this agent.
        """
        if agent_id not in self._follow:
            raise KeyError(f"agent {agent_id} is not among those followed: {sorted(self._follow)}")
        policy = self._arrived.get(agent_id)
        if policy is None:
            return None
        seen = self._seen.get(agent_id)
        if seen is None or seen[0] is not policy:
            seen = self._seen[agent_id] = (policy, Published(policy.version, unpacked(policy)))
        return seen[1]

    async def run(self) -> None:
        """Sends what is published and takes what the peers publish, until cancelled.

        Raises:
            ExceptionGroup: of the refusal that ended a stream, as errors.py names it; `publish` and
                `latest` go on harmlessly.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._connection.keep(Stream.PUBLISH, self._send))
            if self._follow:
                tasks.create_task(follow(self._connection, self._follow, self._take))

    async def flush(self) -> None:
        """Returns once the policy published last is the service's; waits for good if `run` does not run."""
        while True:
            self._moved.clear()
            if self._outgoing is self._accepted:
                return
            await self._moved.wait()

    def _send_again(self) -> None:
        self._accepted = None
        self._moved.set()

    async def _send(self, target: StreamTarget) -> None:
        while True:
            self._moved.clear()
            outgoing = self._outgoing
            if outgoing is None or outgoing is self._accepted:
                await self._moved.wait()
                continue
            incarnation = self._connection.incarnation
            await self._publish(target, outgoing)
            self._connection.up(Stream.PUBLISH)
            if incarnation == self._connection.incarnation:
                self._accepted = outgoing
            self._moved.set()

    @staticmethod
    async def _publish(target: StreamTarget, policy: _Outgoing) -> None:
        await PolicyPublisher(target).publish(policy.version, policy.payload, step=policy.step)

    def _take(self, policy: Policy) -> None:
        self._arrived[policy.agent_id] = policy


def unpacked(policy: Policy) -> dict[str, Tensor]:
    """What a policy that has arrived is made of.

    Raises:
        DaseError: it is none.
    """
    try:
        return from_bytes(policy.payload)
    except DaseError as error:
        raise DaseError(
            f"policy {policy.version} of agent {policy.agent_id} cannot be read: {error}"
        ) from None
