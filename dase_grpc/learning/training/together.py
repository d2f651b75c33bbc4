"""Updates of K agents at once, DPS included, as work that can be recorded; one agent is a stack of one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from operator import itemgetter
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.batch import Batch, Staged, counted
from dase_grpc.learning.agents.equations import TD_ERROR
from dase_grpc.learning.agents.graphs import Captured, Recorder
from dase_grpc.learning.agents.memory import StackedMemory
from dase_grpc.learning.similarity.measure import Similarity
from dase_grpc.learning.similarity.measured import StackedWeighers
from dase_grpc.learning.similarity.moments import SIMILARITY, RunningMoments
from dase_grpc.learning.similarity.weigher import SimilarityWeigher, Weigher, Weighing, each_tensor
from dase_grpc.learning.training.parts import LearnerParts, PrioritisedBatch
from dase_grpc.learning.training.statistics import DeviceTotals
from dase_grpc.schema import Array

LIVE, EXTERNAL, MOVES = range(3)
_FLAGS: Final = 3
_IN_FULL: Final = "highest"

P = ParamSpec("P")
R = TypeVar("R")


def with_torch_defaults(work: Callable[P, R]) -> Callable[P, R]:
    """The work, done with gradients and products as torch has them from the start, whoever changes that."""

    @wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return _in_full(work, *args, **kwargs)
        with torch.inference_mode(False), torch.enable_grad():
            return _in_full(work, *args, **kwargs)

    return done


def _in_full(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The work, with no product of float32 rounded to fewer bits, as some processors do where they may."""
    found = torch.get_float32_matmul_precision()
    if found == _IN_FULL:
        return work(*args, **kwargs)
    torch.set_float32_matmul_precision(_IN_FULL)
    try:
        return work(*args, **kwargs)
    finally:
        torch.set_float32_matmul_precision(found)


@dataclass(frozen=True)
class Taken:
    """A batch for one update: (B, width) packed rows, and which of them, (B,), are the agent's own.

    Where it was drawn by priorities, `prioritised` takes the TD errors, and `importance`, (B,) float32, are
    the weights that correct for it.
    """

    rows: Array
    own: npt.NDArray[np.bool_]
    prioritised: PrioritisedBatch | None = None
    importance: Array | None = None

    def effective_size(self, weighing: Weighing | None) -> float:
        """(Σ w)² / Σ w² of the weights of the loss: how many rows of equal weight are worth as much."""
        weights = np.ones(len(self.rows)) if weighing is None else weighing.weight.cpu().double().numpy()
        if self.importance is not None:
            weights = weights * self.importance
        squares = float(weights @ weights)
        return float(weights.sum()) ** 2 / squares if squares else 0.0

    def tell(self, errors: Tensor | None) -> None:
        """Gives the rows' TD errors, (B,), back where they were drawn by priorities; waits for the device.

        None says that they weighed nothing, as errors of 0 do.
        """
        if self.prioritised is not None:
            none = np.zeros(len(self.rows), np.float32)
            self.prioritised.tell(none if errors is None else errors.cpu().numpy())


@dataclass(frozen=True)
class Made:
    """An update of a stack, K in front of all: the weights, None where each row weighed 1, and the losses.

    errors are the rows' TD errors, (K, B), 0 of those that weighed nothing.
    """

    weighing: Weighing | None
    losses: Mapping[str, Tensor]
    errors: Tensor


@dataclass(frozen=True)
class Seen:
    """What an update of a stack shows, read from the device once."""

    made: Made
    sources: Similarity | None

    def of(self, place: int) -> tuple[Weighing | None, Mapping[str, Tensor], Similarity | None]:
        """The part of the agent at this place, as `Updates.look` wants it."""
        losses = {name: values[place] for name, values in self.made.losses.items()}
        if self.made.weighing is None or self.sources is None:
            return None, losses, None
        part = itemgetter(place)
        return each_tensor(self.made.weighing, part), losses, each_tensor(self.sources, part)


class StackedUpdate:
    """Has each agent of a stack learn from a batch of its own, all at once.

    An agent without a batch, or whose batch weighs nothing, stays as it is. A kind of update is whether any
    agent moves its actor (TD3 does so every second time) and whether any batch has external rows: without any
    nothing is weighed, and memory of earlier batches (`dps.memory`) does not age. Each kind is recorded when
    its turn has come often enough, on a device that records. What an update does to Python's state, and what
    it draws, comes before the recorded work, each time. Owned by one thread.

    Args:
        parts: of the learners, whose agents and weighers were made with `memory`, as their totals were.
        memory: of as many agents.
        recorder: what records; None does all as it is.
    """

    def __init__(
        self, parts: Sequence[LearnerParts], memory: StackedMemory, *, recorder: Recorder | None
    ) -> None:
        first = parts[0]
        self._agents = [_learns_by_itself(each) for each in parts]
        self._stack = self._agents[0].stack_of(memory)
        self._weigher = _joint(parts, memory)
        self._totals = DeviceTotals(memory.held)
        shape = (len(parts), first.config.agent.batch_size, first.schema.width)
        self._rows = Staged(shape, torch.float32, first.device)
        self._flags = Staged((_FLAGS, len(parts)), torch.bool, first.device)
        self._batch = Batch.from_rows(first.schema, self._rows.tensor)
        self._all_internal = torch.ones_like(self._batch.reward)
        self._importance: Staged | None = None
        if first.config.replay.sampling == "prioritised":
            self._importance = Staged(shape[:2], torch.float32, first.device)
        each = (Batch.from_rows(first.schema, rows) for rows in self._rows.tensor)
        rooms = [agent.room_for_noise(batch) for agent, batch in zip(self._agents, each, strict=True)]
        self._noise = [torch.stack(drawn) for drawn in zip(*rooms, strict=True)]
        self._noise_of = [[drawn[place] for drawn in self._noise] for place in range(len(parts))]
        self._recorder = recorder
        self._name = "the update of the stack" if len(parts) > 1 else f"the update of agent {first.agent_id}"
        self._kinds: dict[tuple[bool, bool], Captured[Made]] = {}

    def __call__(self, taken: Sequence[Taken | None]) -> tuple[list[bool], Made | None]:
        """One update of each agent that has taken a batch, `load` and `make`."""
        self.load(taken)
        return self.make(taken)

    def load(self, taken: Sequence[Taken | None]) -> None:
        """Brings the batches to the device."""

        def write(place: npt.NDArray[Any]) -> None:
            for rows, each in zip(place, taken, strict=True):
                if each is not None:
                    rows[:] = each.rows

        def write_importance(place: npt.NDArray[Any]) -> None:
            for weights, each in zip(place, taken, strict=True):
                weights[:] = 1 if each is None or each.importance is None else each.importance

        if any(each is not None for each in taken):
            self._rows.fill(write)
            if self._importance is not None:
                self._importance.fill(write_importance)

    @with_torch_defaults
    def make(self, taken: Sequence[Taken | None]) -> tuple[list[bool], Made | None]:
        """The update from what `load` was given last; whose was made, and what it gave.

        Waits for the device only where a batch has no row of its agent's own, to see whether it weighs
        anything. Tensors are valid until the next call.
        """
        live = [each is not None for each in taken]
        external = [each is not None and not each.own.all() for each in taken]
        weighing = None
        aside = any(external) and not self._weigher.records
        if aside or any(each is not None and not each.own.any() for each in taken):
            self._set({EXTERNAL: external})
            weighing = self._weigh()
            weighs = self._loss_weight(weighing).any(-1).tolist()
            live = [turn and some for turn, some in zip(live, weighs, strict=True)]
        moves = [
            turn and agent.begin_update(noise)
            for turn, agent, noise in zip(live, self._agents, self._noise_of, strict=True)
        ]
        if not any(live):
            return live, None
        self._set({LIVE: live, EXTERNAL: external, MOVES: moves})
        if weighing is not None:
            return live, self._learn(weighing, with_actor=any(moves))
        return live, self._recorded(any(moves), any(external))()

    def see(self, made: Made) -> Seen:
        """What the last update shows, in host memory; waits for the device."""
        sources = None
        if made.weighing is not None:
            actions = self._stack.policy_actions(self._batch.observation)
            sources = each_tensor(self._weigher.by_source(self._batch, actions), Tensor.cpu)
        weighing = None if made.weighing is None else each_tensor(made.weighing, Tensor.cpu)
        losses = {name: values.cpu() for name, values in made.losses.items()}
        return Seen(Made(weighing, losses, made.errors), sources)

    def _recorded(self, with_actor: bool, weighs: bool) -> Captured[Made]:
        kind = with_actor, weighs
        if kind not in self._kinds:
            work = partial(self._make, with_actor=with_actor, weighs=weighs)
            self._kinds[kind] = Captured(work, self._recorder, name=self._name)
        return self._kinds[kind]

    def _make(self, *, with_actor: bool, weighs: bool) -> Made:
        return self._learn(self._weigh() if weighs else None, with_actor=with_actor)

    def _weigh(self) -> Weighing:
        external = self._flags.tensor[EXTERNAL]
        actions = self._stack.policy_actions(self._batch.observation)
        weighing = self._weigher.weigh(self._batch, actions, live=external)
        self._totals.add(weighing, live=external)
        return weighing

    def _learn(self, weighing: Weighing | None, *, with_actor: bool) -> Made:
        weight, flags = self._loss_weight(weighing), self._flags.tensor
        moves = flags[MOVES] if with_actor else None
        losses = dict(self._stack.learn(self._batch, weight, self._noise, live=flags[LIVE], moves=moves))
        errors = counted(losses.pop(TD_ERROR), weight)
        return Made(weighing, losses, errors)

    def _loss_weight(self, weighing: Weighing | None) -> Tensor:
        """What each row weighs in the losses, (K, B)."""
        weight = self._all_internal if weighing is None else weighing.weight
        return weight if self._importance is None else weight * self._importance.tensor

    def _set(self, flags: Mapping[int, Sequence[bool]]) -> None:
        def write(place: npt.NDArray[np.bool_]) -> None:
            for flag, values in flags.items():
                place[flag] = values

        self._flags.fill(write)


def _learns_by_itself(parts: LearnerParts) -> ActorCritic:
    if not isinstance(parts.agent, ActorCritic):
        raise TypeError(f"agent {parts.agent_id} learns from others' policies and cannot be stacked")
    return parts.agent


def _joint(parts: Sequence[LearnerParts], memory: StackedMemory) -> Weigher:
    """The weigher of all, whose running moments are those of each, if there are any."""
    first = parts[0]
    for each in parts:
        if not isinstance(each.weigher, SimilarityWeigher):
            return StackedWeighers([each.weigher for each in parts])
        each.weigher.remember(first.schema.action_size, first.device)
    options, running = first.weigher.options, None
    if options.memory:
        running = RunningMoments(options.memory, memory.under(SIMILARITY))
    own = torch.tensor([[each.agent_id] for each in parts], dtype=torch.int32, device=first.device)
    agents = first.config.train.agents
    return SimilarityWeigher(options, own_id=own, agents=agents, masked=True, running=running)
