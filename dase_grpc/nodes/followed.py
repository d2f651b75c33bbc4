"""Policies as tensors: what a learner publishes and sees of its peers, what an actor follows."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Final

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.errors import ConfigError, DaseError, WaitedTooLongError
from dase_grpc.learning.agents.policy import ActorPolicy, Published
from dase_grpc.learning.agents.registry import load_policy
from dase_grpc.learning.agents.snapshots import Behaviour
from dase_grpc.learning.training.publishing import from_bytes, to_bytes
from dase_grpc.replay.buffer.policies import Policy
from dase_grpc.replay.client.connection import Connection
from dase_grpc.replay.client.policies import PolicyExchange, follow
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


def tensor_exchange(
    connection: Connection, *, follow: Collection[int]
) -> PolicyExchange[Mapping[str, Tensor], Published]:
    """`PeerPolicies` (learning/training/publishing.py) over the network."""
    return PolicyExchange(
        connection,
        follow=follow,
        pack=to_bytes,
        unpack=lambda policy: Published(policy.version, unpacked(policy)),
    )


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
