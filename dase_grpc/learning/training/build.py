"""A learner put together from the run's configuration and seed."""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from dase_grpc import seeding
from dase_grpc.config.algorithms import SIMILARITY
from dase_grpc.config.resolve import RunConfig
from dase_grpc.learning.agents.dpd import DPD, Pairing
from dase_grpc.learning.agents.graphs import Recorder, recorder_for
from dase_grpc.learning.agents.memory import OWN, Memory, StackedMemory
from dase_grpc.learning.agents.policy import PeerPolicies
from dase_grpc.learning.agents.promises import try_out_agents
from dase_grpc.learning.agents.registry import Agent, as_actor_critic, exploration, make_agent
from dase_grpc.learning.agents.snapshots import LearnersGuide, Snapshots
from dase_grpc.learning.envs.evaluation import Evaluator
from dase_grpc.learning.envs.explorer import Explorer
from dase_grpc.learning.envs.make import Environment, make_env
from dase_grpc.learning.envs.restarts import WatchedEnv, evaluation_env
from dase_grpc.learning.similarity.measured import MeasureWeigher, try_out
from dase_grpc.learning.similarity.weigher import SimilarityWeigher, Weigher
from dase_grpc.learning.training.learner import Learner
from dase_grpc.learning.training.parts import (
    ActorSteps,
    Audience,
    BatchSource,
    Journal,
    LearnerParts,
    Publication,
    TransitionSink,
)
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.schema import TransitionSchema

Notes = Callable[[], Mapping[str, Any]]

_log = logging.getLogger("dase")


def peer_of(agent_id: int) -> int:
    """The other agent of a pair."""
    return 1 - agent_id


def pairing(config: RunConfig, agent_id: int, policies: PeerPolicies) -> Pairing:
    """How an agent of a pair sees the other; `config` is the whole run's."""
    peer = peer_of(agent_id)
    return Pairing(peer, config.for_agent(peer).agent, policies)


def build_evaluator(
    config: RunConfig, schema: TransitionSchema, *, agent_id: int, make: Callable[[], Environment]
) -> Evaluator:
    """What evaluates an agent's policies, by the run's evaluation seeds, in environments from `make`."""
    return Evaluator(
        make,
        schema,
        episodes=config.eval.episodes,
        max_episode_steps=config.eval.max_episode_steps,
        seed=seeding.integer(config.train.seed, seeding.Purpose.EVALUATION),
        max_restarts=config.env.max_restarts,
        name=f"evaluation of agent {agent_id}",
    )


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
    pair: Pairing | None = None,
    audience: Audience | None = None,
    actor_steps: ActorSteps | None = None,
    memory: Memory = OWN,
    stored_since: int = 0,
) -> Learner:
    """A learner for one agent; `env` is its own until it has ended, then the caller closes it.

    Evaluations' environments have the watch of a `WatchedEnv`, too. With a `pair` the agent also distils its
    peer's policy; an `audience` is shown its own. `actor_steps` says what actors collect where they explore.
    `memory` gives out its tensors; a stack's updates others record. `stored_since`: see `_explorer`.
    """
    recorder = None if memory.stacked else recorder_of(config, device)
    alone = None if recorder is None or pair is not None else StackedMemory(1)
    memory = memory if alone is None else alone.of(0)
    agent, notes = _agent(config, schema, agent_id, device=device, pair=pair, metrics=metrics, memory=memory)
    parts = LearnerParts(
        config=config,
        schema=schema,
        agent_id=agent_id,
        device=device,
        agent=agent,
        explorer=_explorer(config, schema, env, agent_id, stored_since) if config.train.explore else None,
        evaluator=build_evaluator(config, schema, agent_id=agent_id, make=_evaluated(config, env)),
        weigher=_weigher(config, schema, agent_id, agent=agent, memory=memory, metrics=metrics),
        sink=sink,
        source=source,
        journal=journal,
        metrics=metrics,
        clock=time.perf_counter,
        notes=notes,
        publish=(lambda due: None) if audience is None else Publication(agent, audience).look,
        actor_steps=actor_steps,
        memory=memory,
        alone=alone,
        recorder=recorder,
        guide=_guide(config, schema, agent, device),
    )
    return Learner(parts)


def _weigher(
    config: RunConfig,
    schema: TransitionSchema,
    agent_id: int,
    *,
    agent: Agent,
    memory: Memory,
    metrics: LearnerMetrics,
) -> Weigher:
    """What weighs the agent's batches; a measure of a user's is tried out first."""
    options, agents = config.dps, config.train.agents
    if agents > 1 and not isinstance(agent, DPD):
        metrics.measured_by(options.measure)
    if options.measure == SIMILARITY:
        return SimilarityWeigher(options, own_id=agent_id, agents=agents, memory=memory)
    asked = as_actor_critic(agent, use=f"dps.measure = {options.measure}")
    try_out(options, schema, agents=agents)
    return MeasureWeigher(
        options,
        own_id=agent_id,
        agents=agents,
        policy=asked.policy_actions,
        q=asked.value,
        version=lambda: asked.updates,
    )


def _evaluated(config: RunConfig, env: Environment) -> Callable[[], Environment]:
    """What makes an environment for an evaluation."""
    if isinstance(env, WatchedEnv):
        return partial(evaluation_env, config.env, env.watch)
    return partial(make_env, config.env.id, config.env.kwargs)


def _guide(config: RunConfig, schema: TransitionSchema, agent: Agent, device: torch.device) -> LearnersGuide:
    if not config.train.explore or (device.type == "cpu" and not config.train.overlap):
        return LearnersGuide(agent)
    return Snapshots(agent, config.agent, schema, device, lag=int(config.train.overlap))


def recorder_of(config: RunConfig, device: torch.device) -> Recorder | None:
    """What records the updates of a run on this device, if they shall be."""
    if not config.train.cuda_graph:
        return None
    recorder = recorder_for(device)
    if recorder is None:
        _log.warning("train.cuda_graph = true changes nothing on a CPU; give --gpu to train on a GPU")
    return recorder


def _explorer(
    config: RunConfig, schema: TransitionSchema, env: Environment, agent_id: int, stored_since: int
) -> Explorer:
    """What explores for the agent.

    With `stored_since`, the rows that it had stored when it began again from before some of them, it explores
    otherwise than then: else its random steps would be stored a second time. 0 where it did not.
    """
    seed, purpose = config.train.seed, seeding.Purpose
    streams = (agent_id, stored_since) if stored_since else (agent_id,)
    return Explorer(
        env,
        schema,
        agent_id=agent_id,
        rng=seeding.generator(seed, purpose.EXPLORATION, *streams),
        episode_seed=partial(seeding.integer, seed, purpose.ENVIRONMENT, *streams),
        start_steps=config.agent.start_steps,
        noise=exploration(config.agent, schema),
        n_step=config.agent.n_step,
        discount=config.agent.gamma,
        anew=stored_since > 0,
    )


def _agent(
    config: RunConfig,
    schema: TransitionSchema,
    agent_id: int,
    *,
    device: torch.device,
    pair: Pairing | None,
    metrics: LearnerMetrics,
    memory: Memory,
) -> tuple[Agent, Notes]:
    """The agent, and what it adds to each line of metrics; an algorithm of a user's is tried out first."""
    try_out_agents(config, schema, stacked=memory.stacked, on_cpu=device.type == "cpu")
    make = partial(make_agent, schema=schema, seed=config.train.seed, device=device)
    own = make(config.agent, agent_id=agent_id, memory=memory)
    if pair is None:
        return own, dict
    peer = make(pair.config, agent_id=pair.agent_id)
    first, second = (as_actor_critic(each, use="train.method = dpd") for each in (own, peer))
    dpd = DPD(first, second, pairing=pair, config=config.dpd)

    def notes() -> Mapping[str, Any]:
        statistics = dpd.take_statistics()
        metrics.distillation.show(statistics)
        return statistics

    return dpd, notes
