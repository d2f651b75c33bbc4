"""Copies of the policy that a learner acts by, and who says which copy that is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.agent import Agent
from dase_grpc.learning.agents.networks import Actor
from dase_grpc.learning.agents.normaliser import Normaliser
from dase_grpc.learning.agents.optimiser import Flat
from dase_grpc.learning.agents.policy import NORMALISER, ActorPolicy
from dase_grpc.learning.agents.transfers import AtOnce, CudaLane, Lane, Mark, pinned
from dase_grpc.learning.envs.explorer import Policy
from dase_grpc.schema import TransitionSchema


class Trained(Protocol):
    """An agent whose policy can be copied."""

    @property
    def updates(self) -> int:
        """See Agent."""
        ...

    @property
    def policy(self) -> ActorPolicy:
        """See Agent."""
        ...

    @property
    def flat_actor(self) -> Flat:
        """The parameters of its actor."""
        ...


class _PinnedMemory:
    """See Memory; host memory that a device can write to by itself."""

    stacked = False

    def __init__(self, reader: torch.device) -> None:
        self._reader = reader

    def zeros(self, name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return pinned(torch.zeros(tuple(shape), dtype=dtype, device=device), self._reader)


@dataclass
class _Snapshot:
    """One copy: the policy that acts, what is copied into it, which version that is, and until when."""

    policy: ActorPolicy
    places: tuple[Tensor, ...]
    version: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    arrived: Mark | None = None


def _room(config: AgentConfig, schema: TransitionSchema, device: torch.device) -> _Snapshot:
    """A policy on the host like those of an agent on `device`."""
    cpu, memory = torch.device("cpu"), _PinnedMemory(device)
    sizes = (schema.observation_size, *config.hidden, schema.action_size)
    actor = Actor(sizes, torch.Generator(), device=cpu, dtype=torch.float32).requires_grad_(False)
    places = [Flat(actor, name="actor", memory=memory).values]
    normaliser = None
    if config.normalise_observations:
        normaliser = Normaliser.new(schema.observation_size, cpu, memory=memory)
        places += [tensor for _, tensor in normaliser.named_tensors(NORMALISER)]
    return _Snapshot(ActorPolicy(actor, normaliser), tuple(places))


@dataclass(frozen=True)
class Behaviour:
    """What to act by: a policy and the training iterations it has had, or nothing, meaning uniformly."""

    policy: Policy | None
    version: int


class Snapshots:
    """Copies of an agent's policy on the host, queued behind each update; acting is NumPy on one of them.

    With a lag of 0 the policy acted by is the agent's own after its latest update, for which acting waits.
    With 1 it is the one before that update, always, so environment steps and updates overlap: acting waits
    only for the update before. Until there was an update both are the agent's own.

    Owned by the thread that trains the agent.

    Args:
        agent: on `device`.
        lag: 0 or 1, the updates that the policy acted by is behind.
        lane: where copies from the device are queued, in order with its updates; None for the device's own.
    """

    def __init__(
        self,
        agent: Trained,
        config: AgentConfig,
        schema: TransitionSchema,
        device: torch.device,
        *,
        lag: int,
        lane: Lane | None = None,
    ) -> None:
        self._agent = agent
        if lane is None:
            lane = CudaLane(device, own=False) if device.type == "cuda" else AtOnce()
        self._lane = lane
        self._snapshots = [_room(config, schema, device) for _ in range(lag + 1)]  # oldest first

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

    def tensors(self) -> dict[str, Tensor]:
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
        policy = self._agent.policy
        sources = [self._agent.flat_actor.values]
        if policy.normaliser is not None:
            sources += [tensor for _, tensor in policy.normaliser.named_tensors(NORMALISER)]
        for place, source in zip(snapshot.places, sources, strict=True):
            self._lane.copy(place, source.detach())
        snapshot.version.fill_(self._agent.updates)
        snapshot.arrived = self._lane.mark()


class Guide(Protocol):
    """Says what to act by; asked before each round."""

    def behaviour(self) -> Behaviour:
        """The latest; never waits.

        Raises:
            DaseError: what was published is no policy of this agent.
        """
        ...


class LearnersGuide(Protocol):
    """Says what a learner acts by that trains the policy itself. Owned by the thread that trains."""

    def behaviour(self) -> Behaviour:
        """What to act by now; may wait for the device."""
        ...

    def updated(self) -> None:
        """The agent has had an update, which may still be queued on its device."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """What a checkpoint has to keep, the tensors themselves; whoever writes into them sets them."""
        ...

    def resumed(self) -> None:
        """The agent and `tensors` have been set to what was saved."""
        ...


class Current:
    """A `LearnersGuide` to the agent as it is."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def behaviour(self) -> Behaviour:
        """See LearnersGuide; never waits."""
        return Behaviour(self._agent, self._agent.updates)

    def updated(self) -> None:
        """See LearnersGuide."""

    def tensors(self) -> Mapping[str, Tensor]:
        """See LearnersGuide."""
        return {}

    def resumed(self) -> None:
        """See LearnersGuide."""
