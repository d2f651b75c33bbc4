"""Learners whose agents are a stack: they explore, sample and evaluate one by one, and update at once."""

from collections.abc import Sequence
from threading import Event

from dase_grpc.learning.agents.graphs import Recorder
from dase_grpc.learning.agents.memory import StackedMemory
from dase_grpc.learning.stack_update import StackedUpdate
from dase_grpc.learning.training.learner import Learner
from dase_grpc.learning.training.updating import Taken


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
        self._learn([learner.updating.take() if learner.may_update else None for learner in self._learners])
        for learner in self._learners:
            learner.report()

    def _learn(self, taken: Sequence[Taken | None]) -> None:
        made_for, made = self._update(taken)
        looks: list[tuple[Learner, Taken, int]] = []
        for place, (learner, batch) in enumerate(zip(self._learners, taken, strict=True)):
            if batch is None:
                continue
            if not made_for[place]:
                learner.updating.skip("no_weight")
            elif learner.updating.settle():
                looks.append((learner, batch, place))
        if looks and made is not None:
            seen = self._update.see(made)
            for learner, batch, place in looks:
                weighing, losses, sources = seen.of(place)
                weighed = not batch.own.all()
                learner.show(
                    learner.updating.look(
                        batch, weighing if weighed else None, losses, sources if weighed else None
                    )
                )
