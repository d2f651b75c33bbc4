"""One agent's updates: take a batch, weigh it, learn from it, time it, and leave out what is not finite."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.batch import Batch, Staged, Staging
from dase_grpc.learning.agents.registry import Agent
from dase_grpc.learning.envs.explorer import diverged
from dase_grpc.learning.similarity.measure import Similarity
from dase_grpc.learning.similarity.weigher import Weighing, weighed
from dase_grpc.learning.training.collection import Collection
from dase_grpc.learning.training.parts import LearnerParts, PrioritisedBatch
from dase_grpc.learning.training.state import Counters
from dase_grpc.learning.training.statistics import DeviceTotals, Diagnosis, Window, fold, show
from dase_grpc.learning.training.together import StackedUpdate, Taken, with_torch_defaults
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.schema import Array

DIAGNOSE_EVERY: Final = 50
"""Updates between two looks at losses and similarity; each look waits for the device once."""

DIVERGED_AFTER: Final = 100
"""So many steps in a row that had to be left out mean that an agent learns nothing any more."""

_log = logging.getLogger("dase")


class Updates:
    """The updates of one agent, in phases: `take`, the update itself by whoever makes it, `settle`, `look`.

    `update` is all of them, made for this agent alone. One thread's.

    Args:
        at: counts, shared with the learner.
        window: what is counted since the last line of metrics.
    """

    def __init__(
        self,
        parts: LearnerParts,
        at: Counters,
        collection: Collection,
        *,
        totals: DeviceTotals,
        window: Window,
    ) -> None:
        self._parts = parts
        self._at = at
        self._collection = collection
        self._totals = totals
        self._window = window
        self._priorities = parts.config.priorities if parts.config.replay.sampling == "prioritised" else None
        if self._priorities is not None and isinstance(parts.agent, ActorCritic):
            parts.agent.tells_errors = True
        self._stack: StackedUpdate | None = None
        if parts.alone is not None:
            self._stack = StackedUpdate([parts], parts.alone, recorder=parts.recorder)
        batch_size = parts.config.agent.batch_size
        self._staging = Staging(parts.schema, batch_size, parts.device)
        self._importance: Staged | None = None
        if self._priorities is not None:
            self._importance = Staged((batch_size,), torch.float32, parts.device)
        self._all_internal = torch.ones(batch_size, dtype=torch.float32, device=parts.device)
        self._timing = UpdateTiming(parts.metrics, parts.clock)
        self._soundness = Soundness(parts.agent, parts.metrics)
        self._settled_at = 0.0
        self._pace_from, self._paced_updates, self._began_with = 0.0, 0, 0

    def begin(self, now: float) -> None:
        """Training begins, or goes on from what the agent is, at this time."""
        self._pace_from = now
        self._paced_updates = self._began_with = self._parts.agent.updates

    def passed(self, seconds: float) -> None:
        """So much time was spent on something else, which the rate of updates leaves out."""
        self._pace_from += seconds

    def count_left_out(self) -> None:
        """Counts, in the window, the optimisers' steps that were left out; waits for the device."""
        self._soundness.count(self._window)

    @with_torch_defaults
    def update(self) -> Diagnosis | None:
        """One update, if there is a batch for it that weighs anything; every 50th is looked at.

        Raises:
            DivergedError: its losses or gradients have not been finite for long.
            Halted: the driver closed the source.
        """
        taken = self.take()
        if taken is None:
            return None
        if self._stack is not None:
            return self._update_stack(self._stack, taken)
        parts, own = self._parts, taken.own
        batch = self._staging.load(taken.rows)
        self._timing.lap("load")
        weighing, actions, weight = None, None, self._all_internal
        if not own.all():
            weighing, actions = weighed(parts.agent, parts.weigher, batch)
            self._totals.add(weighing)
            weight = weighing.weight
        if taken.importance is not None and self._importance is not None:
            weight = weight * _filled(self._importance, taken.importance)
        if not own.any() and not bool(weight.any()):
            self.skip("no_weight")
            taken.tell(None)
            return None
        self._timing.lap("weigh")
        losses = parts.agent.update(batch, weight, actions=actions)
        if isinstance(parts.agent, ActorCritic):
            taken.tell(parts.agent.td_error)
        return self._seen(taken, batch, weighing, losses)

    def _update_stack(self, stack: StackedUpdate, taken: Taken) -> Diagnosis | None:
        """`update` of an agent that is a stack of its own."""
        stack.load([taken])
        self._timing.lap("load")
        (was_made,), made = stack.make([taken])
        if not was_made or made is None:
            self.skip("no_weight")
            taken.tell(None)
            return None
        taken.tell(made.errors[0])
        return self.look(taken, *stack.see(made).of(0)) if self.settle() else None

    def take(self) -> Taken | None:
        """The next batch; None, and the update is skipped, where there is none or not enough collected.

        Raises:
            Halted: the driver closed the source.
        """
        parts = self._parts
        self._timing.begin()
        received = parts.source.next()
        if received is not None:
            self._collection.took_batch()
        if received is None or self._collection.refilling:
            self.skip("no_batch")  # drawn from a handful of rows it would ruin the agent
            return None
        rows, self._at.buffer_size = received
        got_at = self._timing.lap("sample")
        if parts.agent.updates == self._began_with:
            self._pace_from = got_at
        own = parts.schema.agent_ids(rows) == parts.agent_id
        if self._priorities is None:
            return Taken(rows, own)
        prioritised = parts.source.prioritised
        assert prioritised is not None, "a source draws as its configuration says"
        return Taken(rows, own, prioritised, importance(prioritised.likelihood, self._beta))

    @property
    def _beta(self) -> float:
        """β of now: it grows evenly over the run's steps."""
        assert self._priorities is not None
        begins, ends = self._priorities.beta, self._priorities.beta_final
        return begins + (ends - begins) * min(1.0, self._at.steps / self._parts.config.train.steps)

    def settle(self) -> bool:
        """Counts the update that was made with what `take` gave; whether a look at it is due."""
        self._parts.guide.updated()
        self._parts.metrics.updates.inc()
        looks = self._parts.agent.updates % DIAGNOSE_EVERY == 0
        self._settled_at = self._timing.finish(parts=looks)
        return looks

    def look(
        self,
        taken: Taken,
        weighing: Weighing | None,
        losses: Mapping[str, Tensor],
        sources: Similarity | None,
    ) -> Diagnosis:
        """What the update shows; waits for the device.

        Args:
            taken: what `take` gave.
            weighing: of its rows; nothing where each is the agent's own.
            losses: what `Agent.update` gave.
            sources: what the weigher says of each collecting agent; as `weighing`.

        Raises:
            DivergedError: losses or gradients have not been finite for long.
        """
        parts, at, window = self._parts, self._at, self._window
        if taken.own.all():
            weighing = sources = None
        seen = Diagnosis.read(losses, weighing, sources, batch_size=len(taken.rows))
        self.count_left_out()
        if self._soundness.finding is not None:
            raise diverged(parts.name_at(at.steps), self._soundness.finding)
        fold(window, seen)
        show(parts.metrics, seen)
        updates = parts.agent.updates
        own_share = float(taken.own.mean())
        window.own_share.add(own_share)
        window.effective_sample_size.add(taken.effective_size(weighing))
        parts.metrics.own_share.set(own_share)
        if taken.prioritised is not None:
            self._show_priorities(taken.prioritised)
        if taken.own.any():
            age = updates - float(parts.schema.policy_versions(taken.rows[taken.own]).mean())
            window.policy_lag.add(age)
            parts.metrics.sample_age.set(age)
        made, seconds = updates - self._paced_updates, self._settled_at - self._pace_from
        self._pace_from, self._paced_updates = self._settled_at, updates
        return replace(seen, updates_per_second=made / seconds if seconds > 0 else None)

    def _show_priorities(self, prioritised: PrioritisedBatch) -> None:
        window, metrics = self._window, self._parts.metrics
        window.largest_priority, window.priorities_ignored = prioritised.largest, prioritised.ignored
        window.mean_priority = prioritised.mean
        metrics.largest_priority.set(prioritised.largest)
        metrics.mean_priority.set(prioritised.mean)
        metrics.priorities_ignored.set(prioritised.ignored)

    def skip(self, reason: str) -> None:
        """Counts an update that is not made."""
        self._window.skipped += 1
        self._parts.metrics.skipped(reason)

    def _seen(
        self, taken: Taken, batch: Batch, weighing: Weighing | None, losses: Mapping[str, Tensor]
    ) -> Diagnosis | None:
        if not self.settle():
            return None
        parts, sources = self._parts, None
        if weighing is not None:
            sources = parts.weigher.by_source(batch, parts.agent.policy_actions(batch.observation))
        return self.look(taken, weighing, losses, sources)


def _filled(staged: Staged, values: Array) -> Tensor:
    """The values beside the batch, on its device."""

    def write(place: npt.NDArray[Any]) -> None:
        place[:] = values

    staged.fill(write)
    return staged.tensor


def importance(likelihood: Array, beta: float) -> Array:
    """Weights that correct for how transitions were drawn, (B,): likelihood ^ −β, over the largest of them.

    Source: Schaul et al. 2016, arXiv 1511.05952, section 3.4; likelihood is N · P(i).
    """
    weights: Array = likelihood ** np.float32(-beta)
    weights /= weights.max()
    return weights


class UpdateTiming:
    """Times one update after another. On a GPU the parts of an update show how long it took to start them.

    `begin` comes first, then a `lap` at the end of each of sample, load and weigh, then `finish`, which ends
    learn; an update that is skipped is just not finished.
    """

    def __init__(self, metrics: LearnerMetrics, clock: Callable[[], float]) -> None:
        self._seconds = metrics.stage_seconds
        self._clock = clock
        self._laps: list[tuple[str, float]] = []
        self._last = 0.0

    def begin(self) -> None:
        """The batch is asked for."""
        self._laps.clear()
        self._last = self._clock()

    def lap(self, stage: str) -> float:
        """A stage ends; the time, by the clock."""
        now = self._clock()
        self._laps.append((stage, now - self._last))
        self._last = now
        return now

    def finish(self, *, parts: bool) -> float:
        """The update has been made; with `parts` what it consists of counts one by one, too. The time."""
        now = self.lap("learn")
        (_, sample_s), *rest = self._laps
        self._seconds["sample"].observe(sample_s)
        self._seconds["update"].observe(sum(seconds for _, seconds in rest))
        if parts:
            for stage, seconds in rest:
                self._seconds[stage].observe(seconds)
        return now


class Soundness:
    """How an agent's updates went; asks the agent, which waits for the device."""

    def __init__(self, agent: Agent, metrics: LearnerMetrics) -> None:
        self._agent = agent
        self._metrics = metrics
        self._in_a_row: Counter[str] = Counter()
        self._said = False
        self.finding: str | None = None

    def count(self, window: Window) -> None:
        """Adds what was left out since the last call; `finding` says if it has been everything for long."""
        for part, steps in self._agent.take_steps().items():
            if not steps.tried:
                continue
            if steps.left_out:
                window.skipped += steps.left_out
                self._metrics.skipped(f"{part}_not_finite", steps.left_out)
                self._say(part, steps.left_out)
            every_one = steps.left_out == steps.tried
            self._in_a_row[part] = self._in_a_row[part] + steps.tried if every_one else 0
            if self._in_a_row[part] >= DIVERGED_AFTER:
                self.finding = (
                    f"the last {self._in_a_row[part]} updates of its {part} had a loss or a gradient that is "
                    f"not finite and were left out"
                )

    def _say(self, part: str, count: int) -> None:
        if not self._said:
            _log.warning(
                "%d updates of the %s are left out because their loss or gradient is not finite, and so is "
                "every later one that is not (they are counted in metrics.jsonl)",
                count,
                part,
            )
        self._said = True


def require_finite(state: Mapping[str, Tensor], *, of: str) -> None:
    """Checks every number of an agent's state; waits for the device.

    Raises:
        DivergedError: one is not finite.
    """
    for name, tensor in state.items():
        if not bool(tensor.isfinite().all()):
            raise diverged(of, f"{name} is not finite")
