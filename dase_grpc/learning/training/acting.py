"""An actor's thread: exploration of several environments with one policy that somebody else trains.

Plain and synchronous; where policies come from and where transitions go are two small interfaces.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Final

import numpy as np

from dase_grpc import seeding
from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.errors import Halted
from dase_grpc.learning.agents.snapshots import Behaviour, Guide
from dase_grpc.learning.envs.explorer import ExploredStep, Explorer, Policy, count
from dase_grpc.learning.envs.make import Environment
from dase_grpc.learning.training.parts import TransitionSink
from dase_grpc.metrics.nodes import ExplorerMetrics
from dase_grpc.process.containment import Contained
from dase_grpc.schema import Array, TransitionSchema

RATE_OVER_S: Final = 2.0
"""Environment steps per second are those of about so long."""

_log = logging.getLogger("dase")


class Rollout:
    """Explorers that step in turn, with one call of the policy for all of them.

    Each resets by itself when its episode ends, at the beginning of its next step: no row is between two
    episodes, and none is made up. One thread at a time.
    """

    def __init__(self, explorers: Sequence[Explorer]) -> None:
        self._explorers = tuple(explorers)

    def __len__(self) -> int:
        return len(self._explorers)

    def round(self, behaviour: Behaviour) -> Iterator[ExploredStep]:
        """One environment step of each explorer, in order, each done when it is asked for.

        Raises:
            Exception: as Explorer.step; a later round goes on from there.
        """
        policy, version = behaviour.policy, behaviour.version
        if policy is None:
            for explorer in self._explorers:
                yield explorer.step(None, version)
            return
        observations = np.stack([explorer.observe() for explorer in self._explorers])
        actions = policy.act(observations)
        for explorer, observation, action in zip(self._explorers, observations, actions, strict=True):
            yield explorer.step(_Chosen(observation, action, policy), version)


@dataclass(frozen=True)
class _Chosen:
    """A policy that has been asked already about one observation."""

    observation: Array
    action: Array
    policy: Policy

    def act(self, observation: Array) -> Array:
        """The policy's actions; (B, m) -> (B, n)."""
        if np.array_equal(observation, self.observation[np.newaxis]):
            return self.action[np.newaxis]
        return self.policy.act(observation)  # the environment broke, and another episode begins


class Acting:
    """Explores until it is halted. Owned by one thread, but for the numbers, which any may read.

    Attributes:
        env_steps: so far.
        version: of the policy acted by; None before the first step.
    """

    def __init__(
        self,
        rollout: Rollout,
        guide: Guide,
        sink: TransitionSink,
        *,
        metrics: ExplorerMetrics,
        name: str,
        clock: Callable[[], float],
    ) -> None:
        self._rollout = rollout
        self._guide = guide
        self._sink = sink
        self._metrics = metrics
        self._name = name
        self._clock = clock
        self._refused: Counter[str] = Counter()
        self._rate_from: tuple[float, int] | None = None
        self.env_steps = 0
        self.env_steps_per_second = 0.0
        self.version: int | None = None

    def explore(self, halt: Event) -> None:
        """Explores until `halt` is set; each transition went to the sink when this returns.

        Raises:
            DivergedError: the policy's actions are not finite.
            EnvironmentFailedError: an environment raised too often.
            DaseError: what was published is no policy of this agent.
            Exception: whatever the environment raises.
        """
        with Contained(), suppress(Halted):
            while not halt.is_set():
                self._round()

    def _round(self) -> None:
        behaviour = self._guide.behaviour()
        self.version = behaviour.version
        for explored in self._rollout.round(behaviour):
            self.env_steps += 1
            self._note(explored)
            if explored.row is not None:
                self._sink.store(explored.row)
        self._measure()

    def _measure(self) -> None:
        now = self._clock()
        if self._rate_from is None:
            self._rate_from = now, self.env_steps
        since, steps = self._rate_from
        if now - since >= RATE_OVER_S:
            self.env_steps_per_second = (self.env_steps - steps) / (now - since)
            self._rate_from = now, self.env_steps

    def _note(self, explored: ExploredStep) -> None:
        count(self._metrics, explored)
        if explored.reason is None:
            return
        if not self._refused[explored.reason]:
            _log.warning(
                "%s: a transition is left out because its %s is not finite in float32, and so is every later "
                "one; make the environment return finite numbers",
                self._name,
                explored.reason,
            )
        self._refused[explored.reason] += 1


def actor_explorers(
    envs: Sequence[Environment],
    schema: TransitionSchema,
    *,
    config: AgentConfig,
    agent_id: int,
    seed: int,
    actor: int,
) -> list[Explorer]:
    """An explorer for each environment of one actor of an agent.

    Their random streams and episodes are those of `seed`, the agent and `actor`, a number of that actor
    alone, so none repeats what another actor or a learner does, and none is an evaluation's.
    """
    purpose = seeding.Purpose
    return [
        Explorer(
            env,
            schema,
            agent_id=agent_id,
            rng=seeding.generator(seed, purpose.ACTOR_EXPLORATION, agent_id, actor, index),
            episode_seed=partial(seeding.integer, seed, purpose.ACTOR_ENVIRONMENT, agent_id, actor, index),
            start_steps=0,
            noise=config.exploration_noise,
        )
        for index, env in enumerate(envs)
    ]
