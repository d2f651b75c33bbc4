"""The collection of environment steps: a learner's own, those of its agent's actors, and an actor's thread.

Plain and synchronous; where policies come from and where transitions go are small interfaces.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import floor
from threading import Event
from typing import Final

import numpy as np

from dase_grpc import seeding
from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.errors import EnvironmentFailedError, Halted
from dase_grpc.learning.agents.registry import exploration
from dase_grpc.learning.agents.snapshots import Behaviour, Guide
from dase_grpc.learning.envs.explorer import Explorer, Policy
from dase_grpc.learning.envs.make import Environment
from dase_grpc.learning.envs.steps import Episode, ExploredStep, count
from dase_grpc.learning.training.parts import ActorSteps, LearnerParts, TransitionSink
from dase_grpc.learning.training.state import Counters
from dase_grpc.learning.training.statistics import Window
from dase_grpc.metrics.nodes import ExplorerMetrics
from dase_grpc.pace import Schedule
from dase_grpc.process.containment import Contained
from dase_grpc.schema import Array, TransitionSchema

RATE_OVER_S: Final = 2.0
"""An actor's environment steps per second are those of about so long."""

_log = logging.getLogger("dase")


class OwnSteps:
    """A learner that explores: one environment step, and from `start_steps` stored on an update after each.

    It counts in `at`, shared with the learner, and in `window`.

    Attributes:
        refilling: whether `refill` was called and what it asks for has not begun.
    """

    def __init__(self, parts: LearnerParts, explorer: Explorer, at: Counters, window: Window) -> None:
        self._parts = parts
        self._explorer = explorer
        self._guide = parts.guide
        self._at = at
        self._window = window
        self._stored_before = 0
        self._refusals = Refusals(advice=" (they are counted in metrics.jsonl)")
        self.refilling = False

    @property
    def may_update(self) -> bool:
        """Whether what was collected is enough for updates."""
        due = self._stored_before + self._parts.config.agent.stored_before_updates
        return self._at.stored >= due and not self.refilling

    def step(self) -> Episode | None:
        """Comes by the next environment step, if one is due before the next update; the episode it ended.

        Raises:
            EnvironmentFailedError: the environment raised too often; the step was not taken.
            Halted: training shall end.
        """
        parts, at, window = self._parts, self._at, self._window
        if self.refilling:
            self.refilling, self._stored_before = False, at.stored
        try:
            behaviour = self._guide.behaviour()
            explored = self._explorer.step(behaviour.policy, behaviour.version)
        except EnvironmentFailedError:
            count_restarts(parts, window, self._explorer.restarts)
            raise
        at.steps += 1
        count(parts.metrics, explored)
        window.restarts.update(explored.restarts)
        if explored.episode is not None:
            window.episodes += 1
            window.episode_returns.add(explored.episode.return_)
        for row in explored.rows:
            parts.sink.store(row)
            at.stored += 1
        if explored.reason is not None:
            window.refused[explored.reason] += 1
            self._refusals.say(parts.name_at(at.steps), explored.reason)
        return explored.episode

    def took_batch(self) -> None:
        """Notes that a batch was taken for an update."""

    def refill(self) -> None:
        """Has as many transitions collected before the next update as before the first; any thread."""
        self.refilling = True


class ActorsSteps:
    """A learner whose agent's actors explore: environment steps are theirs, as the replay counts them.

    Before the first update the steps are those collected so far. From then on they are those that the
    updates made so far stand for, `1 / ratio` each, so that the same updates come before the same step
    whatever the actors' speed; the replay lets the actors be ahead of that by the error buffer at most.
    """

    def __init__(self, schedule: Schedule, source: ActorSteps, at: Counters) -> None:
        self._schedule = schedule
        self._source = source
        self._at = at

    @property
    def may_update(self) -> bool:
        """See OwnSteps."""
        return not self.refilling and self._at.steps >= self._first_update

    @property
    def refilling(self) -> bool:
        """See OwnSteps."""
        origin = self._source.origin
        return (origin.buffer_id, origin.collected) != (self._at.buffer_id, self._at.collected_before)

    def step(self) -> Episode | None:
        """See OwnSteps; returns after a while without a step where none was collected."""
        at = self._at
        if self.refilling:
            origin = self._source.origin
            at.buffer_id, at.collected_before = origin.buffer_id, origin.collected
            at.base_steps, at.used = at.steps, 0
        if not self.may_update:
            until = min(self._schedule.next_mark(at.steps), self._first_update)
            collected = self._source.reach(until - at.base_steps)
            self._count(at.base_steps + min(collected, until - at.base_steps))
        return None

    def took_batch(self) -> None:
        """See OwnSteps."""
        self._at.used += 1
        target = self._first_update + floor(self._at.used / self._schedule.ratio)
        self._count(self._schedule.stop(self._at.steps, target))

    def refill(self) -> None:
        """Nothing: the source has another origin then, which is noticed."""

    @property
    def _first_update(self) -> int:
        """The step after which the first update comes."""
        return self._at.base_steps + self._schedule.first_steps - 1

    def _count(self, steps: int) -> None:
        self._at.steps = self._at.stored = max(self._at.steps, steps)


Collection = OwnSteps | ActorsSteps
"""What counts the environment steps of a learner, and says when an update is due."""


def make_collection(parts: LearnerParts, at: Counters, window: Window) -> Collection:
    """How this learner comes by its environment steps; `window` is what it counts in."""
    if parts.explorer is not None:
        return OwnSteps(parts, parts.explorer, at, window)
    if parts.actor_steps is None:
        raise ValueError("a learner that does not explore needs actors' steps")
    config = parts.config
    schedule = Schedule(
        Fraction(str(config.train.updates_per_step)),
        config.agent.stored_before_updates,
        config.train.steps,
        (config.eval.every, config.train.log_every, config.train.checkpoint_every),
    )
    return ActorsSteps(schedule, parts.actor_steps, at)


def count_restarts(parts: LearnerParts, window: Window, calls: Sequence[str]) -> None:
    """Counts environments that were made anew, by what raised."""
    window.restarts.update(calls)
    for call in calls:
        parts.metrics.restarted(call)


class Refusals:
    """Says once for each reason that transitions are left out; `advice` ends the sentence."""

    def __init__(self, *, advice: str = "") -> None:
        self._advice = advice
        self._said: set[str] = set()

    def say(self, who: str, reason: str) -> None:
        """A transition was left out because what `reason` names was not finite."""
        if reason not in self._said:
            self._said.add(reason)
            _log.warning(
                "%s: a transition is left out because its %s is not finite in float32, and so is every later "
                "one; make the environment return finite numbers%s",
                who,
                reason,
                self._advice,
            )


# --- an actor -----------------------------------------------------------------------------------------------


class Rollout:
    """Explorers that step in turn, with one call of the policy for all of them. One thread at a time.

    Each resets by itself at the beginning of a step: no row is between two episodes, and none is made up.
    Each has its own n-step returns.
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

    def flush(self) -> list[Array]:
        """What the explorers hold back (`Explorer.flush`)."""
        return [row for explorer in self._explorers for row in explorer.flush()]


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
        self._refusals = Refusals()
        self._rate_from: tuple[float, int] | None = None
        self.env_steps = 0
        self.env_steps_per_second = 0.0
        self.version: int | None = None

    def explore(self, halt: Event) -> None:
        """Explores until `halt` is set; each transition went to the sink when this returns.

        Those too that were held back for an n-step return, unless the sink was closed.

        Raises:
            DivergedError: the policy's actions are not finite.
            EnvironmentFailedError: an environment raised too often.
            DaseError: what was published is no policy of this agent.
            Exception: whatever the environment raises.
        """
        with Contained(), suppress(Halted):
            while not halt.is_set():
                self._round()
            for row in self._rollout.flush():
                self._sink.store(row)

    def _round(self) -> None:
        behaviour = self._guide.behaviour()
        self.version = behaviour.version
        for explored in self._rollout.round(behaviour):
            self.env_steps += 1
            count(self._metrics, explored)
            for row in explored.rows:
                self._sink.store(row)
            if explored.reason is not None:
                self._refusals.say(self._name, explored.reason)
        self._measure()

    def _measure(self) -> None:
        now = self._clock()
        if self._rate_from is None:
            self._rate_from = now, self.env_steps
        since, steps = self._rate_from
        if now - since >= RATE_OVER_S:
            self.env_steps_per_second = (self.env_steps - steps) / (now - since)
            self._rate_from = now, self.env_steps


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
            noise=exploration(config, schema),
            n_step=config.n_step,
            discount=config.gamma,
        )
        for index, env in enumerate(envs)
    ]
