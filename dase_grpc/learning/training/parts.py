"""What a learner is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dase_grpc.config.resolve import RunConfig
from dase_grpc.learning.agents.agent import Agent
from dase_grpc.learning.agents.graphs import Recorder
from dase_grpc.learning.agents.memory import OWN, Memory
from dase_grpc.learning.behaviour import Current, LearnersGuide
from dase_grpc.learning.envs.evaluation import Evaluator
from dase_grpc.learning.envs.explorer import Explorer
from dase_grpc.learning.ports import ActorSteps, BatchSource, Journal, TransitionSink
from dase_grpc.learning.publication import to_nobody
from dase_grpc.learning.similarity.weigher import SimilarityWeigher
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.schema import TransitionSchema


@dataclass(frozen=True)
class LearnerParts:
    """What a learner is made of.

    Attributes:
        notes: what else each line of its metrics shall say.
        explorer: None where the agent's actors explore; `actor_steps` are theirs then.
        guide: what the explorer acts by; None for the agent as it is.
        recorder: what records whole updates (whole_update.py); None where they are made as they are.
        memory: gives out the tensors that a checkpoint keeps, the agent's and the weigher's among them.
        publish: called after each step and before its evaluation, with whether one is due (publication.py).
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
        return Current(self.agent) if self.guide is None else self.guide

    def name_at(self, step: int) -> str:
        """Who the learner is and how far, for messages."""
        return f"agent {self.agent_id} at step {step:,}"
