"""Puts a learner together from the run's configuration and seed."""

import time
from functools import partial

import torch

from dase_grpc import seeding
from dase_grpc.config import RunConfig
from dase_grpc.learning.agents import make_agent
from dase_grpc.learning.dps import DpsOptions
from dase_grpc.learning.envs import Environment, make_env
from dase_grpc.learning.evaluation import Evaluator
from dase_grpc.learning.exploration import Explorer
from dase_grpc.learning.learner import BatchSource, Journal, Learner, LearnerParts, TransitionSink
from dase_grpc.learning.similarity import SimilarityWeigher
from dase_grpc.schema import TransitionSchema
from dase_grpc.telemetry import LearnerMetrics


def build_learner(
    config: RunConfig,
    schema: TransitionSchema,
    *,
    env: Environment,
    agent_id: int,
    device: torch.device,
    sink: TransitionSink,
    source: BatchSource,
    journal: Journal,
    metrics: LearnerMetrics,
) -> Learner:
    """A learner for one agent; `env` is its own until it has ended, then the caller closes it."""
    seed, purpose = config.train.seed, seeding.Purpose
    explorer = Explorer(
        env,
        schema,
        agent_id=agent_id,
        rng=seeding.generator(seed, purpose.EXPLORATION, agent_id),
        env_seed=seeding.integer(seed, purpose.ENVIRONMENT, agent_id),
        start_steps=config.agent.start_steps,
        noise=config.agent.exploration_noise,
    )
    evaluator = Evaluator(
        partial(make_env, config.env.id, config.env.kwargs),
        schema,
        episodes=config.eval.episodes,
        max_episode_steps=config.eval.max_episode_steps,
        seed=seeding.integer(seed, purpose.EVALUATION),
    )
    weigher = SimilarityWeigher(
        DpsOptions(**config.dps.model_dump()), own_id=agent_id, agents=config.train.agents
    )
    return Learner(
        LearnerParts(
            config=config,
            schema=schema,
            agent_id=agent_id,
            device=device,
            agent=make_agent(config.agent, schema, seed=seed, agent_id=agent_id, device=device),
            explorer=explorer,
            evaluator=evaluator,
            weigher=weigher,
            sink=sink,
            source=source,
            journal=journal,
            metrics=metrics,
            clock=time.perf_counter,
        )
    )
