"""MeasureWeigher: weights of a learner's batches by a measure, a built-in one or a user's by import path."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from dase_grpc.config.algorithms import LARGEST, DpsConfig, is_own
from dase_grpc.errors import MeasureError
from dase_grpc.learning.agents.batch import Batch, made_up_rows
from dase_grpc.learning.envs.answers import RAISED, kind, summary
from dase_grpc.learning.envs.imports import named
from dase_grpc.learning.similarity import measures
from dase_grpc.learning.similarity.measure import PAPER, Similarity, measure
from dase_grpc.learning.similarity.measures import Context, Measure, Policy, Q, Rows
from dase_grpc.learning.similarity.weigher import Weigher, Weighing, external_rows, of_own
from dase_grpc.schema import TransitionSchema

TRIED_ROWS: Final = 64
"""Rows of the batches that a measure is tried out with, at least: half of them tell a covariance."""

S = TypeVar("S", bound=Similarity)

_STATE: Final = ("state_dict", "load_state_dict")


class MeasureWeigher(Weigher):
    """Asks a measure for the weights of one agent's batches, where these have external rows.

    A weight that is NaN, which says that the measure cannot tell, or no number from 0 to 1e30 becomes 0, and
    its batch counts as degenerate. ρ is
    −ln of the mean weight; its two terms are not told by `weigh`, and by source they are the paper's.
    """

    def __init__(
        self,
        options: DpsConfig,
        *,
        own_id: int,
        agents: int,
        policy: Policy,
        q: Q,
        version: Callable[[], int],
    ) -> None:
        self.options = options
        self._measure = load_measure(options.measure)
        self._own_id = own_id
        self._agents = agents
        self._policy = policy
        self._q = q
        self._version = version
        self._weight: Tensor | None = None
        self._unsound: Tensor | None = None

    def rows_to_judge(self, batch: Batch) -> Tensor | None:
        """See Weigher; on a CPU only."""
        return external_rows(batch, self._own_id)

    def weigh(
        self, batch: Batch, policy_actions: Tensor, *, rows: Tensor | None = None, live: Tensor | None = None
    ) -> Weighing:
        """See Weigher; waits for the device.

        Raises:
            MeasureError: the measure gave something else than one number for each external row.
        """
        external = batch.agent_id != self._own_id
        index = external.nonzero().squeeze(-1)
        given = torch.zeros(0, dtype=torch.float64, device=index.device)
        if len(index):
            own = (~external).nonzero().squeeze(-1)
            if rows is not None:
                sides = Rows(batch, index, lambda _: policy_actions), Rows(batch, own, self._policy)
            else:
                sides = (
                    Rows(batch, index, lambda _: policy_actions[index]),
                    Rows(batch, own, lambda _: policy_actions[own]),
                )
            given = self._ask(*sides)
        sound = given.isfinite() & (given >= 0) & (given <= LARGEST)
        found = torch.where(sound, given, 0.0)
        weight = torch.ones(len(external), dtype=torch.float32, device=index.device)
        self._weight = weight.index_copy_(0, index, found.float())
        self._unsound = torch.zeros_like(external).index_copy_(0, index, ~sound)
        mean = found.sum() / max(len(index), 1)
        unknown = torch.full_like(mean, torch.inf)
        return Weighing(
            weight=weight,
            similarity=mean,
            rho=-mean.log() if len(index) else unknown,
            covariance_term=unknown,
            mean_term=unknown,
            count=torch.tensor(len(index), device=index.device),
            degenerate=~sound.all(),
        )

    def by_source(self, batch: Batch, policy_actions: Tensor) -> Similarity:
        """See Weigher: the mean weight of each agent's rows in the batch that was weighed last."""
        agents = torch.arange(self._agents, device=batch.agent_id.device)
        member = batch.agent_id == agents[:, None]
        deviation = batch.action.detach().double() - policy_actions.detach().double()
        terms = measure(deviation, member, PAPER)
        weight = torch.zeros_like(batch.reward) if self._weight is None else self._weight
        unsound = torch.zeros_like(member[0]) if self._unsound is None else self._unsound
        mean = torch.where(member, weight.double(), 0.0).sum(-1) / terms.count.clamp(min=1)
        found = Similarity(
            similarity=mean,
            rho=-mean.log(),
            covariance_term=terms.covariance_term,
            mean_term=terms.mean_term,
            count=terms.count,
            degenerate=(member & unsound).any(-1),
        )
        return of_own(found, agents == self._own_id)

    def tensors(self) -> dict[str, Tensor]:
        """See Weigher: what the measure's `state_dict` gives, where it has one."""
        state_dict = getattr(self._measure, "state_dict", None)
        return {} if state_dict is None else dict(state_dict())

    def make_room(self, saved: Mapping[str, Tensor], device: torch.device) -> None:
        """See Weigher: lets the measure load what it had kept."""
        load = getattr(self._measure, "load_state_dict", None)
        if saved and load is not None:
            load({name: each.to(device, copy=True) for name, each in saved.items()})

    def _ask(self, external: Rows, own: Rows) -> Tensor:
        context = Context(
            external=external,
            own=own,
            own_id=self._own_id,
            agents=self._agents,
            version=self._version(),
            q=self._q,
            options=self.options,
        )
        return weights_of(self._measure, context, name=self.options.measure)


class StackedWeighers(Weigher):
    """The weighers of K agents as the one of their stack: each weighs its own batch, one after the other."""

    def __init__(self, weighers: Sequence[Weigher]) -> None:
        self.options = weighers[0].options
        self._weighers = weighers

    def weigh(
        self, batch: Batch, policy_actions: Tensor, *, rows: Tensor | None = None, live: Tensor | None = None
    ) -> Weighing:
        """See Weigher; waits for the device."""
        turns = [True] * len(self._weighers) if live is None else live.tolist()
        each = zip(self._weighers, turns, strict=True)
        found = [
            weigher.weigh(batch.of(place), policy_actions[place]) if turn else _unweighed(batch.of(place))
            for place, (weigher, turn) in enumerate(each)
        ]
        return _stacked(found)

    def by_source(self, batch: Batch, policy_actions: Tensor) -> Similarity:
        """See Weigher."""
        return _stacked(
            [
                weigher.by_source(batch.of(place), policy_actions[place])
                for place, weigher in enumerate(self._weighers)
            ]
        )


def load_measure(name: str) -> Measure:
    """The measure of a name, or of a path `package.module:name`; of a class, a new instance.

    Raises:
        MeasureError: there is none, or it cannot be called.
    """
    if not is_own(name):
        built_in: Measure = getattr(measures, name)
        return built_in
    wanted = "a function or class"
    found = named(name, what="measure", wanted=wanted, example="my_measure", error=MeasureError)
    if inspect.isclass(found):
        found = _guarded(found, name=name)
    if not callable(found):
        raise MeasureError(
            f"the measure {name!r} is {kind(found)}; name a function, or a class with __call__"
        )
    if any(hasattr(found, part) for part in _STATE) and not all(hasattr(found, part) for part in _STATE):
        raise MeasureError(f"the measure {name!r} has one of {' and '.join(_STATE)}; give it both or neither")
    measure: Measure = found
    return measure


def weights_of(measure: Measure, context: Context, *, name: str) -> Tensor:
    """What a measure gives for a batch, (E,) float64 and detached.

    Raises:
        MeasureError: it is not one number for each external row.
        Exception: whatever the measure raises.
    """
    count, device = len(context.external), context.external.agent_id.device
    with torch.no_grad():
        given: Any = measure(context)
        if isinstance(given, np.ndarray):
            given = torch.from_numpy(given)
    if not isinstance(given, Tensor):
        raise MeasureError(
            f"the measure {name!r} returned {kind(given)}; return a tensor of one weight a row"
        )
    if given.shape != (count,):
        raise MeasureError(
            f"the measure {name!r} returned shape {tuple(given.shape)} for {count} external rows; return one "
            f"weight for each, ({count},)"
        )
    if given.layout is not torch.strided:
        raise MeasureError(f"the measure {name!r} returned a sparse tensor; return a dense one")
    if given.is_complex():
        raise MeasureError(f"the measure {name!r} returned complex numbers; return real ones")
    return given.detach().to(device, torch.float64)


def try_out(options: DpsConfig, schema: TransitionSchema, *, agents: int) -> None:
    """Tries a measure of a user's with made-up batches, before there is anything to lose.

    Half of the rows are external in one, all but one and all in others, and one alone.

    Raises:
        MeasureError: it raises, its weights are not numbers ≥ 0, one for each external row, they are NaN for
            every row of all batches, or what it keeps is not tensors that it can load.
    """
    if not is_own(options.measure):
        return
    name = options.measure
    measure = load_measure(name)
    count, could_tell = max(TRIED_ROWS, 4 * schema.action_size), False
    for external in (count // 2, count - 1, count, 1):
        context = _made_up(options, schema, count, agents=max(agents, 2), external=external)
        given = _guarded(partial(weights_of, measure, context, name=name), name=name)
        _require_weights(given, name)
        could_tell |= bool(given.isfinite().any())
    if not could_tell:
        raise MeasureError(
            f"the measure {name!r} gave NaN for every row; give that where it cannot tell only"
        )
    if hasattr(measure, "state_dict"):
        _try_state(measure, name)


def _require_weights(given: Tensor, name: str) -> None:
    if bool(given.isinf().any()):
        raise MeasureError(f"the measure {name!r} gave an infinite weight; give NaN where it cannot tell")
    if bool((given < 0).any()):
        raise MeasureError(
            f"the measure {name!r} gave the weight {float(given[given < 0].min()):g}; give none below 0"
        )


def _try_state(measure: Any, name: str) -> None:
    """Has a measure give what it keeps, and load it."""
    given = _guarded(measure.state_dict, name=name)
    if not isinstance(given, Mapping):
        raise MeasureError(f"state_dict of the measure {name!r} gave {kind(given)}; give tensors by name")
    for key, each in given.items():
        if not (isinstance(key, str) and isinstance(each, Tensor)):
            raise MeasureError(
                f"state_dict of the measure {name!r} gave {kind(each)} as {key!r}; give tensors by name"
            )
    kept = {key: each.detach().clone() for key, each in given.items()}
    _guarded(partial(measure.load_state_dict, kept), name=name)


def _guarded(call: Callable[[], Any], *, name: str) -> Any:
    try:
        return call()
    except MeasureError:
        raise
    except RAISED as error:
        raise MeasureError(f"the measure {name!r} failed with {summary(error)}") from error


def _made_up(
    options: DpsConfig, schema: TransitionSchema, count: int, *, agents: int, external: int
) -> Context:
    """A batch of random rows of K agents, of which the first `external` are others'."""
    rng = np.random.default_rng(external)
    rows = made_up_rows(schema, count, rng)
    columns = schema.named(rows)
    columns["agent_id"] = np.where(np.arange(count) < external, rng.integers(1, agents, count), 0)
    columns["policy_version"] = rng.integers(0, 1_000, count)
    batch, index = Batch.from_rows(schema, torch.from_numpy(rows)), torch.arange(count)

    def policy(observation: Tensor) -> Tensor:
        size = schema.action_size
        return observation.mean(-1, keepdim=True).expand(-1, size).tanh() * torch.linspace(-1, 1, size)

    return Context(
        external=Rows(batch, index[:external], policy),
        own=Rows(batch, index[external:], policy),
        own_id=0,
        agents=agents,
        version=1_000,
        q=lambda observation, action: observation.sum(-1) - action.square().sum(-1),
        options=options,
    )


def _unweighed(batch: Batch) -> Weighing:
    """What is said of a batch that nobody weighs."""
    nothing = torch.zeros((), dtype=torch.float64, device=batch.reward.device)
    unknown = torch.full_like(nothing, torch.inf)
    return Weighing(
        weight=torch.ones_like(batch.reward),
        similarity=nothing,
        rho=unknown,
        covariance_term=unknown,
        mean_term=unknown,
        count=nothing.long(),
        degenerate=nothing.bool(),
    )


def _stacked(found: Sequence[S]) -> S:
    """The same of several agents, with them in front."""
    return type(found[0])(
        **{
            field.name: torch.stack([getattr(each, field.name) for each in found])
            for field in fields(found[0])
        }
    )
