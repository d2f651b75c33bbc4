"""The parts of a learner and what it is connected to: transitions out, batches in, policies shown, results.

`PeerPolicies` is all an algorithm needs that learns from other agents' policies. It has two implementations
that keep the same promises: `LocalPolicies` here, for agents of one process, and `PolicyExchange` in
replay/client/policies.py. What is published is `policy_tensors` of an agent's state, with DPD its critic too
(learning/agents/policy.py); between processes it travels as safetensors bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import DaseError, Halted
from dase_grpc.learning.agents.graphs import Recorder
from dase_grpc.learning.agents.memory import OWN, Memory, StackedMemory
from dase_grpc.learning.agents.policy import PeerPolicies, Published
from dase_grpc.learning.agents.registry import Agent
from dase_grpc.learning.agents.snapshots import LearnersGuide
from dase_grpc.learning.envs.evaluation import Evaluator
from dase_grpc.learning.envs.explorer import Explorer, Policy, require_finite_action
from dase_grpc.learning.similarity.weigher import Weigher
from dase_grpc.learning.training.state import Saved
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.pace import Origin
from dase_grpc.progress import is_newer
from dase_grpc.schema import Array, TransitionSchema


class TransitionSink(Protocol):
    """Where an agent's transitions go."""

    def store(self, row: Array) -> None:
        """Takes one (width,) packed transition; may block.

        Raises:
            Halted: training shall end.
        """
        ...


class PrioritisedBatch(Protocol):
    """How a batch was drawn by priorities, and where its TD errors go."""

    @property
    def likelihood(self) -> Array:
        """How many times as likely as by uniform draws each row was drawn, (B,) float32, above 0."""
        ...

    @property
    def largest(self) -> float:
        """The agent's largest mass so far."""
        ...

    @property
    def mean(self) -> float:
        """The mean mass of the transitions that there are."""
        ...

    @property
    def ignored(self) -> int:
        """How many priorities the agent has told in vain."""
        ...

    def tell(self, errors: Array) -> None:
        """Gives the TD errors of the rows, (B,) float32, back; never blocks."""
        ...


class BatchSource(Protocol):
    """Where batches come from."""

    @property
    def prioritised(self) -> PrioritisedBatch | None:
        """How the last batch was drawn, if that was by priorities."""
        ...

    def next(self) -> tuple[Array, int] | None:
        """A (B, width) batch, read-only, and the number of transitions in the buffer; may block.

        None where the buffer holds too little and waiting would not change that: the update is left out.

        Raises:
            Halted: training shall end.
        """
        ...


class ActorSteps(Protocol):
    """The environment steps that an agent's actors collect."""

    @property
    def origin(self) -> Origin:
        """From where they are counted now; another one where the buffer was lost."""
        ...

    def reach(self, steps: int) -> int:
        """How many there are since the origin; waits a moment where there are fewer than `steps`.

        Raises:
            Halted: training shall end.
        """
        ...


class Journal(Protocol):
    """Where results are written."""

    def evaluation(
        self, *, step: int, return_mean: float, return_std: float, episodes: int, wall_seconds: float
    ) -> None:
        """Notes one evaluation."""
        ...

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Notes one line of metrics."""
        ...

    def checkpoint(self, *, step: int, saved: Saved, scores: Mapping[str, Any]) -> None:
        """Keeps the learner's state."""
        ...


@dataclass(frozen=True)
class Audience:
    """Where a learner's policy is shown, and whether anybody looks; `followed` is asked at every step.

    Attributes:
        publish_every: updates between two publications.
        always_when_due: show it at each step with an evaluation due, whether or not anybody looks.
    """

    policies: PeerPolicies
    followed: Callable[[], bool]
    publish_every: int
    always_when_due: bool = False


class Publication:
    """Publishes an agent's actor and normaliser; else it copies nothing and waits for no device."""

    def __init__(self, agent: Agent, audience: Audience) -> None:
        self._agent = agent
        self._audience = audience
        self._published: int | None = None  # the version, while somebody follows

    def look(self, due: bool) -> None:
        """Publishes the policy where that is due: call once after each environment step.

        That is as soon as somebody follows, then every `publish_every` updates, and at each step with an
        evaluation, which `due` says.
        """
        audience, updates = self._audience, self._agent.updates
        followed = audience.followed()
        if not followed:
            self._published = None
        is_old = self._published is None or updates - self._published >= audience.publish_every
        if (due and (followed or audience.always_when_due)) or (followed and is_old):
            self._published = updates if followed else None
            audience.policies.publish(updates, dict(self._agent.policy.named_tensors()))


class LocalPolicies:
    """`PeerPolicies` among agents of one process, which share `table` and see at once what is published."""

    def __init__(self, agent_id: int, table: dict[int, Published]) -> None:
        self._agent_id = agent_id
        self._table = table

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See PeerPolicies."""
        held = self._table.get(self._agent_id)
        if is_newer(version, None if held is None else held.version):
            copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            self._table[self._agent_id] = Published(version, copies)

    def latest(self, agent_id: int) -> Published | None:
        """See PeerPolicies."""
        return self._table.get(agent_id)


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as safetensors bytes; copies them, and waits for their device."""
    # safetensors takes no views and nothing that shares memory
    plain = {name: each.detach().to("cpu", copy=True).contiguous() for name, each in tensors.items()}
    data: bytes = safetensors.torch.save(plain)
    return data


def from_bytes(payload: bytes) -> dict[str, Tensor]:
    """The tensors that `to_bytes` packed, on the CPU; reading them runs no code of the sender's.

    Raises:
        DaseError: the bytes are not of that form.
    """
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(payload)
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise DaseError(f"{len(payload)} bytes are not tensors in safetensors format") from error
    return tensors


@dataclass(frozen=True)
class LearnerParts:
    """What a learner is made of.

    Attributes:
        notes: what else each line of its metrics shall say.
        explorer: None where the agent's actors explore; `actor_steps` are theirs then.
        guide: what the explorer acts by.
        memory: gives out the tensors that a checkpoint keeps, the agent's and the weigher's among them.
        alone: the whole of that memory where it is a stack of this agent alone, whose updates are recorded.
        recorder: what records them.
        publish: called after each step and before its evaluation, with whether one is due (`Publication`).
    """

    config: RunConfig
    schema: TransitionSchema
    agent_id: int
    device: torch.device
    agent: Agent
    explorer: Explorer | None
    evaluator: Evaluator
    weigher: Weigher
    sink: TransitionSink
    source: BatchSource
    journal: Journal
    metrics: LearnerMetrics
    clock: Callable[[], float]
    guide: LearnersGuide
    notes: Callable[[], Mapping[str, Any]] = dict
    publish: Callable[[bool], None] = lambda due: None
    actor_steps: ActorSteps | None = None
    memory: Memory = OWN
    alone: StackedMemory | None = None
    recorder: Recorder | None = None

    def name_at(self, step: int) -> str:
        """Who the learner is and how far, for messages."""
        return f"agent {self.agent_id} at step {step:,}"


@dataclass(frozen=True)
class StoppablePolicy:
    """A policy that raises Halted once `halt` is set, so that no evaluation outlives its run."""

    policy: Policy
    halt: Event
    name: str

    def act(self, observation: Array) -> Array:
        """The policy's actions; a DivergedError where one is not finite."""
        if self.halt.is_set():
            raise Halted
        actions = self.policy.act(observation)
        require_finite_action(actions, of=self.name)
        return actions
