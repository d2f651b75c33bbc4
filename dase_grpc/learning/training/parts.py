"""The parts of a learner and what it is connected to: transitions out, batches in, results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

import torch

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import Halted
from dase_grpc.learning.agents.graphs import Recorder
from dase_grpc.learning.agents.memory import OWN, Memory
from dase_grpc.learning.agents.registry import Agent
from dase_grpc.learning.agents.snapshots import LearnersGuide
from dase_grpc.learning.envs.evaluation import Evaluator
from dase_grpc.learning.envs.explorer import Explorer, Policy, require_finite_action
from dase_grpc.learning.similarity.weigher import SimilarityWeigher
from dase_grpc.learning.training.publishing import to_nobody
from dase_grpc.learning.training.state import Saved
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.pace import Origin
from dase_grpc.schema import Array, TransitionSchema


class TransitionSink(Protocol):
    """Where an agent's transitions go."""

    def store(self, row: Array) -> None:
        """Takes one (width,) packed transition; may block.

        Raises:
            Halted: training shall end.
        """
        ...


class BatchSource(Protocol):
    """Where batches come from."""

    def next(self) -> tuple[Array, int] | None:
        """A (B, width) batch, read-only, and the number of transitions in the buffer; may block.

        None where the buffer holds too little and waiting would not change that: the update is left out.

        Raises:
            Halted: training shall end.
        """
        ...


class ActorSteps(Protocol):
    """The environment steps that an agent's actors collect.

    Attributes:
        origin: from where they are counted; another one where the buffer was lost.
    """

    @property
    def origin(self) -> Origin:
        """From where they are counted now."""
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
class LearnerParts:
    """What a learner is made of.

    Attributes:
        notes: what else each line of its metrics shall say.
        explorer: None where the agent's actors explore; `actor_steps` are theirs then.
        guide: what the explorer acts by; None for the agent as it is.
        recorder: what records whole updates (whole.py); None where they are made as they are.
        memory: gives out the tensors that a checkpoint keeps, the agent's and the weigher's among them.
        publish: called after each step and before its evaluation, with whether one is due (publishing.py).
    """

    config: RunConfig
    schema: TransitionSchema
    agent_id: int
    device: torch.device
    agent: Agent
    explorer: Explorer | None
    evaluator: Evaluator
    weigher: SimilarityWeigher
    sink: TransitionSink
    source: BatchSource
    journal: Journal
    metrics: LearnerMetrics
    clock: Callable[[], float]
    notes: Callable[[], Mapping[str, Any]] = dict
    publish: Callable[[bool], None] = to_nobody
    actor_steps: ActorSteps | None = None
    memory: Memory = OWN
    guide: LearnersGuide | None = None
    recorder: Recorder | None = None

    @property
    def acts_by(self) -> LearnersGuide:
        """What the explorer acts by."""
        return LearnersGuide(self.agent) if self.guide is None else self.guide

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
        """The policy's actions.

        Raises:
            Halted: training shall end.
            DivergedError: an action is not finite.
        """
        if self.halt.is_set():
            raise Halted
        actions = self.policy.act(observation)
        require_finite_action(actions, of=self.name)
        return actions
