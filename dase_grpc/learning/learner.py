"""One agent's training: explore, store, sample, weigh, update, evaluate.

A plain synchronous object. The networked learner node and the lockstep launcher are two drivers of
it; they differ in where transitions go and where batches come from.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from threading import Event
from typing import Final

import torch
from torch import Tensor

from dase_grpc.errors import DivergedError, EnvironmentFailedError, RunDirectoryError
from dase_grpc.learning.batch import Batch
from dase_grpc.learning.collecting import ActorsSteps, Collecting, OwnSteps, Schedule, count_restarts
from dase_grpc.learning.containment import Contained
from dase_grpc.learning.device import use
from dase_grpc.learning.exploration import diverged
from dase_grpc.learning.health import Health, require_finite
from dase_grpc.learning.learner_parts import LearnerParts
from dase_grpc.learning.learner_state import NOT_YET, Counters, LearnerState, Saved
from dase_grpc.learning.ports import Halted, StoppablePolicy
from dase_grpc.learning.similarity import Weighing
from dase_grpc.learning.staging import Staging
from dase_grpc.learning.statistics import DeviceTotals, Diagnosis, Window, finite, fold, record, show
from dase_grpc.learning.timing import UpdateTiming
from dase_grpc.learning.weighing import weighed
from dase_grpc.progress import Progress, evaluation_line

DIAGNOSE_EVERY: Final = 50
"""Updates between two looks at losses and similarity; each look waits for the device once."""

_log = logging.getLogger("dase")


class Learner:
    """Trains one agent for `train.steps` environment steps, one update after each from `start_steps` on.

    Where the agent's actors explore, environment steps are theirs (collecting.py), and updates come at the
    rate of `train.updates_per_step`.

    Steps whose transition was refused do not count towards `start_steps`, so that K agents before their
    first update have stored K * start_steps transitions, which is what `replay.min_size` relies on.
    After `refill`, for a buffer that holds too little, it stores as many anew before its next update.

    One thread's, but for `progress`, `steps`, `stored`, `refill`. The environment stays its maker's to close.
    """

    def __init__(self, parts: LearnerParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._staging = Staging(parts.schema, parts.config.agent.batch_size, parts.device)
        self._all_internal = torch.ones(parts.config.agent.batch_size, device=parts.device)
        self._totals = DeviceTotals(parts.device)
        self._health = Health(parts.agent, parts.metrics)
        self._timing = UpdateTiming(parts.metrics, parts.clock)
        self._halt = Event()
        self._at = Counters()
        self._resumed: Saved | None = None
        self._evaluated_at = NOT_YET
        self._stepped_from = 0
        self._started_at, self._elapsed_s = 0.0, 0.0
        self._window = Window(0.0, 0, 0)
        self._pace_from, self._paced_updates, self._began_with = 0.0, 0, 0
        self._collecting = self._collect()
        self.progress = Progress(total_steps=parts.config.train.steps)

    @property
    def done(self) -> bool:
        """Whether the budget of environment steps is spent."""
        return self._at.steps >= self._config.train.steps

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return self._at.steps

    @property
    def checkpoint_due(self) -> bool:
        """Whether `keep` is to be called now; the checkpoint after the last step is `finish`'s."""
        every = self._config.train.checkpoint_every
        return self._at.steps // every > self._stepped_from // every and not self.done

    @property
    def stored(self) -> int:
        """Transitions that went to the sink so far; those before a resume count once it has gone on."""
        return self._at.stored

    def resume(self, saved: Saved, *, elapsed_s: float) -> None:
        """Lets `begin` go on from what an earlier learner kept, after `elapsed_s` seconds of training."""
        self._resumed, self._elapsed_s = saved, elapsed_s

    def refill(self) -> None:
        """Has as many transitions stored before the next update as before the first."""
        self._collecting.refill()

    def train(self, halt: Event) -> None:
        """Trains until the budget is spent or `halt` is set; then keeps a final checkpoint.

        Raises:
            DivergedError: the networks hold numbers that are not finite, or their losses do.
            EnvironmentFailedError: the environment raised too often; a checkpoint is kept, unless that was
                before the learner had gone on from its last one.
            Exception: whatever the environment or the agent raises.
        """
        with Contained():
            self.prepare()  # where this fails nothing is kept: it is not what had been saved
        try:
            with Contained(), suppress(Halted):
                self.begin(halt)
                while not self.done and not halt.is_set():
                    self.step()
                    if self.checkpoint_due:
                        self.keep()
        except EnvironmentFailedError:
            try:
                self._keep_last()
            except DivergedError as error:
                _log.error("%s", error)
            raise
        self.finish()

    def prepare(self) -> None:
        """Goes on from what `resume` was given, if it was, and from then on is what had been saved.

        On the thread that trains; learners that take turns prepare before any of them begins.

        Raises:
            RunDirectoryError: what `resume` was given is not the state of such a learner.
            Exception: whatever the environment raises.
        """
        use(self._parts.device)
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._go_on_from(resumed)

    def begin(self, halt: Event) -> None:
        """Evaluates the policy before any training, or goes on from what `resume` was given.

        Call once, first, on the thread that trains.

        Raises:
            RunDirectoryError: what `resume` was given is not the state of such a learner.
            Halted: `halt` was set meanwhile; it also ends every later evaluation.
        """
        self.prepare()
        self._halt = halt
        now = self._parts.clock()
        self._started_at = now - self._elapsed_s
        self._window.started_at, self._pace_from = now, now
        self._report()

    def step(self) -> None:
        """One environment step and what it brings: an update, an evaluation, metrics.

        The last step is followed by an evaluation in any case.

        Raises:
            DivergedError: the networks hold numbers that are not finite, or their losses do.
            EnvironmentFailedError: the environment raised too often; the step was not taken.
            Halted: the driver closed the sink or the source, or set `halt` during an evaluation.
        """
        self._stepped_from = self._at.steps
        episode = self._collecting.step()
        if episode is not None:
            self.progress = replace(self._snapshot(), episode_return=finite(episode.return_))
        if self._collecting.may_update:
            self._update()
        self._report()

    def keep(self) -> None:
        """Keeps a checkpoint, but no ruined one, which would make room for itself.

        Raises:
            DivergedError: a number in it is not finite.
        """
        self._health.count(self._window)
        self._keep(self._state.save(self._parts.agent))

    def finish(self) -> None:
        """Keeps the final checkpoint, and raises as `keep` does. Call once, last."""
        try:
            self._keep_last()
        finally:
            self.progress = replace(self._snapshot(), state="finished" if self.done else "stopped")

    def _keep_last(self) -> None:
        self._health.count(self._window)
        if self._window.restarts and self._at.logged == self._at.steps:
            self._log()  # beside the line that was due here; a resumed run keeps both and counts on
        saved = self._state.save(self._parts.agent)  # before a line of metrics that is not due
        if self._window.restarts or self._at.steps > self._window.started_step:
            self._log()
        self._keep(saved)

    def _report(self) -> None:
        """The evaluation, unless others make it, and the line of metrics that are due and not made yet."""
        at, config = self._at, self._config
        regular = at.steps // config.eval.every * config.eval.every > at.evaluated
        due = regular or (self.done and at.evaluated != at.steps)
        self._parts.publish(due)
        if due and config.eval.by == "learner":
            self._evaluate()
        if due and regular:
            at.evaluated, at.due_evaluation = at.steps, self.progress.evaluation_return
        if at.steps // config.train.log_every * config.train.log_every > at.logged:
            self._log()
            at.logged = at.steps

    def _collect(self) -> Collecting:
        parts, config = self._parts, self._config
        if parts.explorer is not None:
            return OwnSteps(parts, parts.explorer, self._at, lambda: self._window)
        if parts.actor_steps is None:
            raise ValueError("a learner that does not explore needs actors' steps")
        schedule = Schedule(
            Fraction(str(config.train.updates_per_step)),
            config.agent.stored_before_updates,
            config.train.steps,
            (config.eval.every, config.train.log_every, config.train.checkpoint_every),
        )
        return ActorsSteps(schedule, parts.actor_steps, self._at)

    @property
    def _state(self) -> LearnerState:
        return LearnerState(self._at, self._window, self._totals, self._parts.explorer, self._parts.weigher)

    def _go_on_from(self, saved: Saved) -> None:
        agent, at = self._parts.agent, self._at
        try:
            self._state.resume(saved, agent)
        except (KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(
                f"the checkpoint of agent {self._parts.agent_id} cannot be gone on from: {error}; it was "
                f"written by another version or for other settings"
            ) from error
        if self._parts.explorer is not None:
            self._parts.explorer.replay()
        self._window.started_step, self._window.started_updates = at.steps, agent.updates
        self._paced_updates = self._began_with = agent.updates
        self._evaluated_at = at.evaluated
        self.progress = replace(
            self._snapshot(),
            first_evaluation_return=at.first_evaluation,
            evaluation_return=at.due_evaluation,
        )

    def _keep(self, saved: Saved) -> None:
        require_finite(saved.agent, of=self._name)
        self._parts.journal.checkpoint(
            step=self._at.steps,
            saved=saved,
            scores={
                "evaluation": finite(self.progress.evaluation_return),
                "evaluation_step": None if self._evaluated_at == NOT_YET else self._evaluated_at,
            },
        )
        self._parts.metrics.checkpointed()

    def _update(self) -> None:
        parts, timing = self._parts, self._timing
        timing.begin()
        received = parts.source.next()
        if received is not None:
            self._collecting.took_batch()
        if (
            received is None or self._collecting.refilling
        ):  # drawn from a handful of rows it would ruin the agent
            self._skip("no_batch")
            return
        rows, self._at.buffer_size = received
        got_at = timing.lap("sample")
        if parts.agent.updates == self._began_with:
            self._pace_from = got_at
        own = parts.schema.agent_ids(rows) == parts.agent_id
        batch = self._staging.load(rows)
        timing.lap("load")
        weighing, actions = (None, None) if own.all() else self._weigh(batch)
        if weighing is not None and not own.any() and not bool(weighing.weight.any()):
            self._skip("no_weight")
            return
        timing.lap("weigh")
        weight = self._all_internal if weighing is None else weighing.weight
        losses = parts.agent.update(batch, weight, actions=actions)
        parts.metrics.updates.inc()
        looks = parts.agent.updates % DIAGNOSE_EVERY == 0
        now = timing.finish(parts=looks)
        if looks:
            self._measure_pace(now)
            self._diagnose(batch, weighing, losses)
            if own.any():
                age = parts.agent.updates - float(parts.schema.policy_versions(rows[own]).mean())
                self._window.policy_lag.add(age)
                parts.metrics.sample_age.set(age)

    def _skip(self, reason: str) -> None:
        self._window.skipped += 1
        self._parts.metrics.skipped(reason)

    def _weigh(self, batch: Batch) -> tuple[Weighing, Tensor | None]:
        weighing, actions = weighed(self._parts.agent, self._parts.weigher, batch)
        self._totals.add(weighing)
        return weighing, actions

    @property
    def _name(self) -> str:
        return f"agent {self._parts.agent_id} at step {self._at.steps:,}"

    def _diagnose(self, batch: Batch, weighing: Weighing | None, losses: Mapping[str, Tensor]) -> None:
        parts, sources = self._parts, None
        if weighing is not None:
            sources = parts.weigher.by_source(batch, parts.agent.policy_actions(batch.observation))
        seen = Diagnosis.read(losses, weighing, sources, batch_size=len(batch.reward))
        self._health.count(self._window)
        if self._health.finding is not None:
            raise diverged(self._name, self._health.finding)
        fold(self._window, seen)
        show(parts.metrics, seen)
        self.progress = replace(self._snapshot(), similarity={**self.progress.similarity, **seen.similarity})
        if seen.similarity_weight is not None:
            self.progress = replace(self.progress, similarity_weight=seen.similarity_weight)

    def _measure_pace(self, now: float) -> None:
        """The rate of the updates since the last look, or since the first update; evaluations left out."""
        updates, seconds = self._parts.agent.updates - self._paced_updates, now - self._pace_from
        if seconds > 0:
            self.progress = replace(self.progress, updates_per_second=updates / seconds)
        self._pace_from, self._paced_updates = now, self._parts.agent.updates

    def _evaluate(self) -> None:
        parts = self._parts
        started = parts.clock()
        result = parts.evaluator.evaluate(StoppablePolicy(parts.agent, self._halt, self._name))
        now = parts.clock()
        count_restarts(parts, self._window, ["evaluation"] * result.restarts)
        self._pace_from += now - started
        parts.metrics.evaluated(result.return_mean, seconds=now - started)
        parts.journal.evaluation(
            step=self._at.steps,
            return_mean=result.return_mean,
            return_std=result.return_std,
            episodes=result.episodes,
            wall_seconds=now - self._started_at,
        )
        latest = finite(result.return_mean)
        self._evaluated_at = self._at.steps
        if self._at.steps == 0:
            self._at.first_evaluation = latest
        self.progress = replace(
            self._snapshot(), first_evaluation_return=self._at.first_evaluation, evaluation_return=latest
        )
        _log.info("%s", evaluation_line(self.progress))

    def _log(self) -> None:
        parts, now = self._parts, self._parts.clock()
        self._health.count(self._window)
        values = record(
            self._window,
            step=self._at.steps,
            updates=parts.agent.updates,
            now=now,
            wall_seconds=now - self._started_at,
            totals=self._totals,
        )
        parts.journal.metrics({**values, "buffer_size": self._at.buffer_size, **parts.notes()})
        self.progress = self._snapshot()
        self._window = Window(now, self._at.steps, parts.agent.updates)

    def _snapshot(self) -> Progress:
        return replace(
            self.progress,
            step=self._at.steps,
            updates=self._parts.agent.updates,
            state="training" if self._collecting.may_update else "exploring",
        )
