"""One agent's training: explore, store, sample, weigh, update, evaluate.

A plain synchronous object. The networked learner node and the lockstep launcher are two drivers of
it; they differ in where transitions go and where batches come from.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from dase_grpc.config import RunConfig
from dase_grpc.learning.agent import Agent, Policy
from dase_grpc.learning.batch import Batch
from dase_grpc.learning.containment import Contained
from dase_grpc.learning.device import use
from dase_grpc.learning.evaluation import Evaluator
from dase_grpc.learning.exploration import ExploredStep, Explorer, diverged, require_finite_action
from dase_grpc.learning.similarity import SimilarityWeigher, Weighing
from dase_grpc.learning.staging import Staging
from dase_grpc.learning.statistics import DeviceTotals, Diagnosis, Window, fold, record, show
from dase_grpc.progress import Progress, evaluation_line
from dase_grpc.schema import Array, TransitionSchema
from dase_grpc.telemetry import LearnerMetrics

DIAGNOSE_EVERY: Final = 50
"""Updates between two looks at losses and similarity; each look waits for the device once."""


_log = logging.getLogger("dase")


class Halted(Exception):
    """The driver closed the sink or the source: training shall end."""


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

    def checkpoint(self, *, step: int, tensors: Mapping[str, Tensor], scores: Mapping[str, Any]) -> None:
        """Keeps the agent's state."""
        ...


@dataclass(frozen=True)
class LearnerParts:
    """What a learner is made of; `notes` is what else each line of its metrics shall say."""

    config: RunConfig
    schema: TransitionSchema
    agent_id: int
    device: torch.device
    agent: Agent
    explorer: Explorer
    evaluator: Evaluator
    weigher: SimilarityWeigher
    sink: TransitionSink
    source: BatchSource
    journal: Journal
    metrics: LearnerMetrics
    clock: Callable[[], float]
    notes: Callable[[], Mapping[str, Any]] = dict


class Learner:
    """Trains one agent for `train.steps` environment steps, one update after each from `start_steps` on.

    Steps whose transition was refused do not count towards `start_steps`, so that K agents before their
    first update have stored K * start_steps transitions, which is what `replay.min_size` relies on.

    Owned by one thread; `progress` may be read from any. The environment stays its maker's to close.
    """

    def __init__(self, parts: LearnerParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._staging = Staging(parts.schema, parts.config.agent.batch_size, parts.device)
        self._all_internal = torch.ones(parts.config.agent.batch_size, device=parts.device)
        self._totals = DeviceTotals(parts.device)
        self._halt = Event()
        self._steps = 0
        self._stored = 0
        self._buffer_size: int | None = None
        self._started_at = 0.0
        self._window = Window(0.0, 0, 0)
        self._pace_from, self._paced_updates = 0.0, 0
        self._refused: Counter[str] = Counter()
        self.progress = Progress(total_steps=parts.config.train.steps)

    @property
    def done(self) -> bool:
        """Whether the budget of environment steps is spent."""
        return self._steps >= self._config.train.steps

    def train(self, halt: Event) -> None:
        """Trains until the budget is spent or `halt` is set; then keeps a final checkpoint.

        Raises:
            DivergedError: the networks hold numbers that are not finite.
            Exception: whatever the environment or the agent raises.
        """
        with Contained(), suppress(Halted):
            self.begin(halt)
            while not self.done and not halt.is_set():
                self.step()
        self.finish()

    def begin(self, halt: Event) -> None:
        """Evaluates the policy before any training. Call once, first, on the thread that trains.

        Raises:
            Halted: `halt` was set meanwhile; it also ends every later evaluation.
        """
        use(self._parts.device)
        self._halt = halt
        now = self._parts.clock()
        self._started_at = now
        self._window = Window(now, 0, 0)
        self._evaluate()

    def step(self) -> None:
        """One environment step and what it brings: an update, a checkpoint, an evaluation, metrics.

        The last step is followed by an evaluation in any case; its checkpoint is `finish`'s.

        Raises:
            DivergedError: the networks hold numbers that are not finite.
            Halted: the driver closed the sink or the source, or set `halt` during an evaluation.
        """
        parts, config = self._parts, self._config
        explored = parts.explorer.step(parts.agent, parts.agent.updates)
        self._steps += 1
        self._note(explored)
        if explored.row is not None:
            parts.sink.store(explored.row)
            self._stored += 1
        if self._may_update:
            self._update()
        if self._steps % config.train.checkpoint_every == 0 and not self.done:
            self._keep(self._finite_state())
        if self._steps % config.eval.every == 0 or self.done:
            self._evaluate()
        if self._steps % config.train.log_every == 0:
            self._log()

    def finish(self) -> None:
        """Keeps the final checkpoint. Call once, last."""
        if self._steps > self._window.started_step:
            self._log()
        self.progress = replace(self._snapshot(), state="finished" if self.done else "stopped")
        self._keep(self._parts.agent.state_dict())

    def _keep(self, state: Mapping[str, Tensor]) -> None:
        self._parts.journal.checkpoint(
            step=self._steps,
            tensors=state,
            scores={"evaluation": _plain(self.progress.evaluation_return)},
        )

    @property
    def _may_update(self) -> bool:
        return self._stored >= self._config.agent.stored_before_updates

    def _update(self) -> None:
        parts = self._parts
        asked_at = parts.clock()
        received = parts.source.next()
        if received is None:
            self._skip("no_batch")
            return
        rows, self._buffer_size = received
        got_at = parts.clock()
        if not parts.agent.updates:
            self._pace_from = got_at
        own = parts.schema.agent_ids(rows) == parts.agent_id
        batch = self._staging.load(rows)
        weighing = None if own.all() else self._weigh(batch)
        if weighing is not None and not own.any() and not bool(weighing.weight.any()):
            self._skip("no_weight")
            return
        losses = parts.agent.update(batch, self._all_internal if weighing is None else weighing.weight)
        parts.metrics.updates.inc()
        parts.metrics.sample_seconds.observe(got_at - asked_at)
        now = parts.clock()
        parts.metrics.update_seconds.observe(now - got_at)
        if parts.agent.updates % DIAGNOSE_EVERY == 0:
            self._measure_pace(now)
            self._diagnose(batch, weighing, losses)
            self._measure_lag(rows[own])

    def _skip(self, reason: str) -> None:
        self._window.skipped += 1
        self._parts.metrics.skipped(reason)

    def _weigh(self, batch: Batch) -> Weighing:
        weighing = self._parts.weigher.weigh(batch, self._parts.agent.policy_actions(batch.observation))
        self._totals.add(weighing)
        return weighing

    @property
    def _name(self) -> str:
        return f"agent {self._parts.agent_id} at step {self._steps:,}"

    def _finite_state(self) -> Mapping[str, Tensor]:
        """The agent's state, so that no checkpoint worth going back to makes room for a ruined one.

        Raises:
            DivergedError: a number in it is not finite.
        """
        state = self._parts.agent.state_dict()
        for name, tensor in state.items():
            if not bool(tensor.isfinite().all()):
                raise diverged(self._name, f"{name} is not finite")
        return state

    def _diagnose(self, batch: Batch, weighing: Weighing | None, losses: Mapping[str, Tensor]) -> None:
        parts, sources = self._parts, None
        if weighing is not None:
            sources = parts.weigher.by_source(batch, parts.agent.policy_actions(batch.observation))
        seen = Diagnosis.read(losses, weighing, sources, batch_size=len(batch.reward))
        critic_loss = seen.losses.get("critic_loss", 0.0)
        if not math.isfinite(critic_loss):
            raise diverged(self._name, f"its critic loss is {critic_loss}")
        fold(self._window, seen)
        show(parts.metrics, seen)
        known = {**self.progress.similarity, **seen.similarity}
        self.progress = replace(self._snapshot(), similarity=known)
        if seen.similarity_weight is not None:
            self.progress = replace(self.progress, similarity_weight=seen.similarity_weight)

    def _measure_pace(self, now: float) -> None:
        """The rate of the updates since the last look, or since the first update; evaluations left out."""
        updates, seconds = self._parts.agent.updates - self._paced_updates, now - self._pace_from
        if seconds > 0:
            self.progress = replace(self.progress, updates_per_second=updates / seconds)
        self._pace_from, self._paced_updates = now, self._parts.agent.updates

    def _measure_lag(self, own_rows: Array) -> None:
        if len(own_rows):
            column = self._parts.schema.columns["policy_version"].start
            versions = own_rows[:, column].view(np.uint32)
            self._window.policy_lag.add(self._parts.agent.updates - float(versions.mean()))

    def _note(self, explored: ExploredStep) -> None:
        parts = self._parts
        parts.metrics.env_steps.inc()
        if explored.reason is not None:
            self._refuse(explored.reason)
        if explored.episode is not None:
            self._window.episodes += 1
            self._window.episode_returns.add(explored.episode.return_)
            parts.metrics.episodes.inc()
            parts.metrics.episode_return.set(explored.episode.return_)
            self.progress = replace(self._snapshot(), episode_return=_plain(explored.episode.return_))

    def _refuse(self, reason: str) -> None:
        self._window.refused[reason] += 1
        self._parts.metrics.refused(reason)
        if not self._refused[reason]:
            _log.warning(
                "%s: a transition is left out because its %s is not finite in float32, and so is every later "
                "one; make the environment return finite numbers (they are counted in metrics.jsonl)",
                self._name,
                reason,
            )
        self._refused[reason] += 1

    def _evaluate(self) -> None:
        parts = self._parts
        started = parts.clock()
        result = parts.evaluator.evaluate(_Evaluated(parts.agent, self._halt, self._name))
        now = parts.clock()
        self._pace_from += now - started
        parts.metrics.evaluation_seconds.observe(now - started)
        parts.metrics.evaluation_return.set(result.return_mean)
        parts.journal.evaluation(
            step=self._steps,
            return_mean=result.return_mean,
            return_std=result.return_std,
            episodes=result.episodes,
            wall_seconds=now - self._started_at,
        )
        latest = _plain(result.return_mean)
        first = latest if self._steps == 0 else self.progress.first_evaluation_return
        self.progress = replace(self._snapshot(), first_evaluation_return=first, evaluation_return=latest)
        _log.info("%s", evaluation_line(self.progress))

    def _log(self) -> None:
        parts, now = self._parts, self._parts.clock()
        values = record(
            self._window,
            step=self._steps,
            updates=parts.agent.updates,
            now=now,
            wall_seconds=now - self._started_at,
            totals=self._totals,
        )
        parts.journal.metrics({**values, "buffer_size": self._buffer_size, **parts.notes()})
        self.progress = self._snapshot()
        self._window = Window(now, self._steps, parts.agent.updates)

    def _snapshot(self) -> Progress:
        return replace(
            self.progress,
            step=self._steps,
            updates=self._parts.agent.updates,
            state="training" if self._may_update else "exploring",
        )


@dataclass(frozen=True)
class _Evaluated:
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


def _plain(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
