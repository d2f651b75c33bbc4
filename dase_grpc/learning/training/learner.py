"""One agent's training: explore, store, sample, weigh, update, evaluate; and that of a stack, in rounds.

Plain synchronous objects. The networked learner node and the lockstep launcher are two drivers of a Learner;
they differ in where transitions go and where batches come from.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event

from dase_grpc.errors import DivergedError, EnvironmentFailedError, Halted, RunDirectoryError
from dase_grpc.learning.agents.device import use
from dase_grpc.learning.agents.graphs import Recorder
from dase_grpc.learning.agents.memory import StackedMemory
from dase_grpc.learning.training.collection import count_restarts, make_collection
from dase_grpc.learning.training.parts import LearnerParts, StoppablePolicy
from dase_grpc.learning.training.state import NOT_YET, Counters, LearnerState, Saved
from dase_grpc.learning.training.statistics import DeviceTotals, Diagnosis, Window, finite, record
from dase_grpc.learning.training.together import StackedUpdate, Taken
from dase_grpc.learning.training.updates import Updates, require_finite
from dase_grpc.process.containment import Contained
from dase_grpc.progress import Progress, evaluation_line

_log = logging.getLogger("dase")


class Learner:
    """Trains one agent for `train.steps` environment steps, one update after each from `start_steps` on.

    Where the agent's actors explore, environment steps are theirs (collection.py), and updates come at the
    rate of `train.updates_per_step`.

    Steps whose transition was refused do not count towards `start_steps`, so that K agents before their
    first update have stored K * start_steps transitions, which is what `replay.min_size` relies on.
    After `refill`, for a buffer that holds too little, it stores as many anew before its next update.

    One thread's, but for `progress`, `steps`, `stored`, `refill`. The environment stays its maker's to close.

    Attributes:
        progress: how far it is, a new one each time.
    """

    def __init__(self, parts: LearnerParts) -> None:
        self.parts = parts
        self._config = parts.config
        self._totals = DeviceTotals.zero(parts.device, memory=parts.memory)
        self._halt = Event()
        self._at = Counters()
        self._resumed: Saved | None = None
        self._evaluated_at = NOT_YET
        self._stepped_from = 0
        self._started_at, self._elapsed_s = 0.0, 0.0
        self._window = Window(0.0, 0, 0)
        self._collection = make_collection(parts, self._at, self._window)
        self.updates = Updates(parts, self._at, self._collection, totals=self._totals, window=self._window)
        self._state = LearnerState(
            self._at, self._window, self._totals, parts.explorer, parts.weigher, parts.guide
        )
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

    @property
    def may_update(self) -> bool:
        """Whether what was collected is enough for updates."""
        return self._collection.may_update

    def resume(self, saved: Saved, *, elapsed_s: float) -> None:
        """Lets `begin` go on from what an earlier learner kept, after `elapsed_s` seconds of training."""
        self._resumed, self._elapsed_s = saved, elapsed_s

    def refill(self) -> None:
        """Has as many transitions stored before the next update as before the first."""
        self._collection.refill()

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
        use(self.parts.device)
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._go_on_from(resumed)

    def begin(self, halt: Event, *, midway: bool = False) -> None:
        """Evaluates the policy before any training, or goes on from what `resume` was given.

        Call once, first, on the thread that trains. Who was stopped `midway`, between a step and its update,
        does not `report` before that.

        Raises:
            RunDirectoryError: as `prepare`.
            Halted: `halt` was set meanwhile; it also ends every later evaluation.
        """
        self.prepare()
        self._halt = halt
        now = self.parts.clock()
        self._started_at = now - self._elapsed_s
        self._window.started_at = now
        self.updates.begin(now)
        if not midway:
            self.report()

    def step(self) -> None:
        """One environment step and what it brings: an update, an evaluation, metrics.

        The last step is followed by an evaluation in any case. A driver that updates several agents at once
        has its phases: `collect`, then `updates` if the learner `may_update`, `show` and `report`.

        Raises:
            DivergedError: the networks hold numbers that are not finite, or their losses do.
            EnvironmentFailedError: the environment raised too often; the step was not taken.
            Halted: the driver closed the sink or the source, or set `halt` during an evaluation.
        """
        self.collect()
        if self.may_update:
            self.show(self.updates.update())
        self.report()

    def collect(self) -> None:
        """The environment step of `step`."""
        self._stepped_from = self._at.steps
        episode = self._collection.step()
        if episode is not None:
            self.progress = replace(self._snapshot(), episode_return=finite(episode.return_))

    def show(self, seen: Diagnosis | None) -> None:
        """Takes what an update that was looked at shows into `progress`."""
        if seen is None:
            return
        shown, weight, rate = self._snapshot(), seen.similarity_weight, seen.updates_per_second
        self.progress = replace(
            shown,
            similarity={**shown.similarity, **seen.similarity},
            similarity_weight=shown.similarity_weight if weight is None else weight,
            updates_per_second=shown.updates_per_second if rate is None else rate,
        )

    def keep(self) -> None:
        """Keeps a checkpoint, but no ruined one, which would make room for itself.

        Raises:
            DivergedError: a number in it is not finite.
        """
        self.updates.count_left_out()
        self._keep(self._state.save(self.parts.agent))

    def finish(self) -> None:
        """Keeps the final checkpoint, and raises as `keep` does. Call once, last."""
        try:
            self._keep_last()
        finally:
            self.progress = replace(self._snapshot(), state="finished" if self.done else "stopped")

    def report(self) -> None:
        """The evaluation, unless others make it, and the line of metrics that are due and not made yet."""
        at, config = self._at, self._config
        regular = at.steps // config.eval.every * config.eval.every > at.evaluated
        due = regular or (self.done and at.evaluated != at.steps)
        self.parts.publish(due)
        if due and config.eval.by == "learner":
            self._evaluate()
        if due and regular:
            at.evaluated, at.due_evaluation = at.steps, self.progress.evaluation_return
        if at.steps // config.train.log_every * config.train.log_every > at.logged:
            self._log()
            at.logged = at.steps

    def _go_on_from(self, saved: Saved) -> None:
        agent, at = self.parts.agent, self._at
        try:
            self._state.resume(saved, agent)
        except (KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(
                f"the checkpoint of agent {self.parts.agent_id} cannot be gone on from: {error.args[0]}; it "
                f"was written by another version or for other settings"
            ) from error
        if self.parts.explorer is not None:
            self.parts.explorer.replay()
        self._window.started_step, self._window.started_updates = at.steps, agent.updates
        self._evaluated_at = at.evaluated
        self.progress = replace(
            self._snapshot(),
            first_evaluation_return=at.first_evaluation,
            evaluation_return=at.due_evaluation,
        )

    def _keep_last(self) -> None:
        self.updates.count_left_out()
        if self._window.restarts and self._at.logged == self._at.steps:
            self._log()  # beside the line that was due here; a resumed run keeps both and counts on
        saved = self._state.save(self.parts.agent)  # before a line of metrics that is not due
        if self._window.restarts or self._at.steps > self._window.started_step:
            self._log()
        self._keep(saved)

    def _keep(self, saved: Saved) -> None:
        require_finite(saved.agent, of=self.parts.name_at(self._at.steps))
        evaluated_at = None if self._evaluated_at == NOT_YET else self._evaluated_at
        scores = {"evaluation": finite(self.progress.evaluation_return), "evaluation_step": evaluated_at}
        self.parts.journal.checkpoint(step=self._at.steps, saved=saved, scores=scores)
        self.parts.metrics.checkpointed()

    def _evaluate(self) -> None:
        parts, at = self.parts, self._at
        started = parts.clock()
        policy = StoppablePolicy(parts.agent, self._halt, parts.name_at(at.steps))
        result = parts.evaluator.evaluate(policy)
        now = parts.clock()
        count_restarts(parts, self._window, ["evaluation"] * result.restarts)
        self.updates.passed(now - started)
        parts.metrics.evaluated(result.return_mean, seconds=now - started)
        parts.journal.evaluation(
            step=at.steps,
            return_mean=result.return_mean,
            return_std=result.return_std,
            episodes=result.episodes,
            wall_seconds=now - self._started_at,
        )
        latest, self._evaluated_at = finite(result.return_mean), at.steps
        if at.steps == 0:
            at.first_evaluation = latest
        self.progress = replace(
            self._snapshot(), first_evaluation_return=at.first_evaluation, evaluation_return=latest
        )
        _log.info("%s", evaluation_line(self.progress))

    def _log(self) -> None:
        parts, at, now = self.parts, self._at, self.parts.clock()
        self.updates.count_left_out()
        values = record(
            self._window,
            step=at.steps,
            updates=parts.agent.updates,
            now=now,
            wall_seconds=now - self._started_at,
            totals=self._totals,
        )
        parts.journal.metrics({**values, "buffer_size": at.buffer_size, **parts.notes()})
        self.progress = self._snapshot()
        self._window.begin_anew(now, at.steps, parts.agent.updates)

    def _snapshot(self) -> Progress:
        return replace(
            self.progress,
            step=self._at.steps,
            updates=self.parts.agent.updates,
            state="training" if self._collection.may_update else "exploring",
        )


class StackedLearners:
    """Takes the steps of K learners in rounds: one environment step of each and one update of all.

    In a round each explores, one after the other; then each takes its batch, so that a batch may hold rows
    of this very round; then all are updated, and then each evaluates and writes what is due. One thread's.

    Args:
        learners: of one kind, made with `memory`, by agent id.
    """

    def __init__(
        self, learners: Sequence[Learner], memory: StackedMemory, *, recorder: Recorder | None = None
    ) -> None:
        self._learners = learners
        self._update = StackedUpdate([learner.parts for learner in learners], memory, recorder=recorder)

    def begin(self, halt: Event) -> None:
        """Has each begin, once all are prepared.

        Who is ahead of the others was stopped between its step and the update, which is of all.

        Raises:
            Halted: `halt` was set meanwhile.
        """
        done = self._done
        for learner in self._learners:
            learner.begin(halt, midway=learner.steps > done)

    @property
    def _done(self) -> int:
        """Steps that all have had."""
        return min(learner.steps for learner in self._learners)

    def round(self) -> None:
        """One step of each; after a stop within a round, of those that have not had it, and the update.

        Raises:
            DivergedError, EnvironmentFailedError, Halted: as `Learner.step`.
        """
        done = self._done
        for learner in self._learners:
            if learner.steps == done:
                learner.collect()
        self._learn([learner.updates.take() if learner.may_update else None for learner in self._learners])
        for learner in self._learners:
            learner.report()

    def _learn(self, taken: Sequence[Taken | None]) -> None:
        made_for, made = self._update(taken)
        errors = None
        if made is not None and any(each is not None and each.prioritised is not None for each in taken):
            errors = made.errors.cpu()  # of all agents at once
        looks: list[tuple[Learner, Taken, int]] = []
        for place, (learner, batch) in enumerate(zip(self._learners, taken, strict=True)):
            if batch is None:
                continue
            if not made_for[place] or made is None:
                learner.updates.skip("no_weight")
                batch.tell(None)
                continue
            if errors is not None:
                batch.tell(errors[place])
            if learner.updates.settle():
                looks.append((learner, batch, place))
        if looks and made is not None:
            seen = self._update.see(made)
            for learner, batch, place in looks:
                learner.show(learner.updates.look(batch, *seen.of(place)))
