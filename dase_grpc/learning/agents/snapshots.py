"""Copies of the policy that a learner acts by, and who says which copy that is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.device import CudaLane, Lane, Mark, pinned
from dase_grpc.learning.agents.memory import Memory
from dase_grpc.learning.agents.policy import ActorPolicy
from dase_grpc.learning.agents.registry import Agent
from dase_grpc.learning.envs.explorer import Policy
from dase_grpc.schema import TransitionSchema


@dataclass(frozen=True)
class Behaviour:
    """What to act by: a policy and the training iterations it has had, or nothing, meaning uniformly."""

    policy: Policy | None
    version: int


class Guide(Protocol):
    """Says what to act by; asked before each round."""

    def behaviour(self) -> Behaviour:
        """The latest; never waits.

        Raises:
            DaseError: what was published is no policy of this agent.
        """
        ...


class LearnersGuide:
    """Says what a learner acts by that trains the policy itself: the agent as it is. One thread's."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def behaviour(self) -> Behaviour:
        """What to act by now; may wait for the device."""
        return Behaviour(self._agent, self._agent.updates)

    def updated(self) -> None:
        """The agent has had an update, which may still be queued on its device."""

    def tensors(self) -> Mapping[str, Tensor]:
        """What a checkpoint has to keep, the tensors themselves; whoever writes into them sets them."""
        return {}

    def resumed(self) -> None:
        """The agent and `tensors` have been set to what was saved."""


class _PinnedMemory(Memory):
    """Host memory that a device can write to by itself."""

    def __init__(self, reader: torch.device) -> None:
        self._reader = reader

    def zeros(self, name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return pinned(super().zeros(name, shape, dtype=dtype, device=device), self._reader)


@dataclass
class _Snapshot:
    """One copy: the policy that acts, which version that is, and what it waits for."""

    policy: ActorPolicy
    version: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    arrived: Mark | None = None


class Snapshots(LearnersGuide):
    """Copies of an agent's policy on the host, queued behind each update; acting is NumPy on one of them.

    With a lag of 0 the policy acted by is the agent's own after its latest update, for which acting waits.
    With 1 it is the one before that update, always, so environment steps and updates overlap: acting waits
    only for the update before. Until there was an update both are the agent's own.

    `lane` is where copies from the device are queued, in order with its updates; None for the device's own.
    """

    def __init__(
        self,
        agent: Agent,
        config: AgentConfig,
        schema: TransitionSchema,
        device: torch.device,
        *,
        lag: int,
        lane: Lane | None = None,
    ) -> None:
        super().__init__(agent)
        if lane is None:
            lane = CudaLane(device, own=False) if device.type == "cuda" else Lane()
        self._lane = lane
        cpu, memory = torch.device("cpu"), _PinnedMemory(device)
        policies = (ActorPolicy.empty(config, schema, cpu, memory=memory) for _ in range(lag + 1))
        self._snapshots = [_Snapshot(policy) for policy in policies]  # oldest first

    def behaviour(self) -> Behaviour:
        """See LearnersGuide; waits for the copy, hence for the update that it was queued behind."""
        oldest = self._snapshots[0]
        if oldest.arrived is None:
            for snapshot in self._snapshots:
                self._take(snapshot)
        assert oldest.arrived is not None
        oldest.arrived.wait()
        return Behaviour(oldest.policy, int(oldest.version))

    def updated(self) -> None:
        """See LearnersGuide; queues a copy, and waits for nothing."""
        if self._snapshots[0].arrived is None:
            return  # nobody has acted by it yet
        self._snapshots.append(self._snapshots.pop(0))
        self._take(self._snapshots[-1])

    def tensors(self) -> Mapping[str, Tensor]:
        """See LearnersGuide: the policy acted by, where it may be another than the agent's own."""
        if len(self._snapshots) == 1:
            return {}
        oldest = self._snapshots[0]
        self.behaviour()
        return {"version": oldest.version, **dict(oldest.policy.named_tensors())}

    def resumed(self) -> None:
        """See LearnersGuide."""
        for snapshot in self._snapshots[min(1, len(self._snapshots) - 1) :]:
            self._take(snapshot)

    def _take(self, snapshot: _Snapshot) -> None:
        copied = zip(snapshot.policy.whole_tensors(), self._agent.policy.whole_tensors(), strict=True)
        for place, source in copied:
            self._lane.copy(place, source)
        snapshot.version.fill_(self._agent.updates)
        snapshot.arrived = self._lane.mark()
