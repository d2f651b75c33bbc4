"""The state of a learner besides its agent's: counters, sums, exploration; as a checkpoint keeps it.

Numbers are such as JSON holds them, floats bit for bit; arrays are tensors. Nothing is a pickle.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from dase_grpc.learning.agents.networks import restore
from dase_grpc.learning.agents.registry import Agent
from dase_grpc.learning.agents.snapshots import LearnersGuide
from dase_grpc.learning.envs.explorer import Explorer
from dase_grpc.learning.similarity.weigher import Weigher
from dase_grpc.learning.training.statistics import DeviceTotals, Mean, Window

NOT_YET: Final = -1
_EXPLORATION: Final = "exploration."
_SIMILARITY: Final = "similarity."
_MEASURED_TIME: Final = ("started_at", "started_step", "started_updates")

_ADDED: Final = {
    "own_share",
    "effective_sample_size",
    "largest_priority",
    "mean_priority",
    "priorities_ignored",
}
"""What the windows of older checkpoints have not."""


@dataclass
class Counters:
    """How far a learner is.

    Attributes:
        evaluated: the last step with an evaluation that was due by eval.every; -1 before the first.
        logged: the last step with a line of metrics that was due by train.log_every.
        buffer_size: when the last batch was drawn.
        first_evaluation, due_evaluation: mean returns of the first evaluation and of the last due one.
        buffer_id, collected_before, base_steps, used: where the agent's actors collect its transitions: from
            where these are counted (pace.Origin), the steps by then, and the batches taken since.
    """

    steps: int = 0
    stored: int = 0
    evaluated: int = NOT_YET
    logged: int = 0
    buffer_size: int | None = None
    first_evaluation: float | None = None
    due_evaluation: float | None = None
    buffer_id: str = ""
    collected_before: int = 0
    base_steps: int = 0
    used: int = 0


@dataclass(frozen=True)
class Saved:
    """A learner at rest: what its agent's `state_dict` gave, and all else it goes on from."""

    agent: Mapping[str, Tensor]
    numbers: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class LearnerState:
    """The parts of a learner that change while it trains, but for its agent."""

    counters: Counters
    window: Window
    totals: DeviceTotals
    explorer: Explorer | None
    weigher: Weigher
    guide: LearnersGuide

    def save(self, agent: Agent) -> Saved:
        """Copies everything; waits for the device."""
        exploring, arrays = ({}, {}) if self.explorer is None else self.explorer.state()
        numbers = {
            "counters": asdict(self.counters),
            "window": {name: _plain(value) for name, value in _counted(self.window).items()},
            "exploration": exploring,
        }
        tensors = {f"{_EXPLORATION}{name}": torch.from_numpy(array.copy()) for name, array in arrays.items()}
        tensors |= {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        return Saved(agent.state_dict(), numbers, tensors)

    def resume(self, saved: Saved, agent: Agent) -> None:
        """Goes on from what `save` gave, once the explorer has replayed its episode.

        The window keeps when it began: time is not restored.

        Raises:
            KeyError, TypeError, ValueError: it is not what `save` of such a learner gave.
        """
        arrays = {name: tensor.numpy() for name, tensor in _under(_EXPLORATION, saved.tensors).items()}
        agent.load_state_dict(saved.agent)
        others = {name: tensor for name, tensor in saved.tensors.items() if not name.startswith(_EXPLORATION)}
        if moments := _under(_SIMILARITY, saved.tensors):
            self.weigher.make_room(moments, self.totals.tensors()["similarity"].device)
        else:
            others |= {f"{_SIMILARITY}{name}": tensor for name, tensor in self.weigher.untouched().items()}
        restore(self._tensors(), others)
        self.guide.resumed()
        vars(self.counters).update({**asdict(Counters()), **saved.numbers["counters"]})
        kept = saved.numbers["window"]
        for name, held in _counted(self.window).items():
            if name in _ADDED and name not in kept:
                continue
            found = _read(kept[name])
            if isinstance(held, MutableMapping):
                held.clear()
                held.update(found)
            else:
                setattr(self.window, name, found)
        if self.explorer is not None:
            self.explorer.resume(saved.numbers["exploration"], arrays)

    def _tensors(self) -> dict[str, Tensor]:
        named = {
            "totals": self.totals.tensors(),
            "similarity": self.weigher.tensors(),
            "behaviour": self.guide.tensors(),
        }
        return {f"{part}.{name}": tensor for part, held in named.items() for name, tensor in held.items()}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin with the prefix, by the rest of their names."""
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def _counted(window: Window) -> dict[str, Any]:
    """What of a window is kept: all but when it began."""
    return {name: value for name, value in vars(window).items() if name not in _MEASURED_TIME}


def _plain(value: Any) -> Any:
    """A count, a `Mean`, or a mapping of them, as JSON keeps it: a mapping's keys may be numbers."""
    if isinstance(value, Mean):
        return {"total": repr(value.total), "count": value.count}
    if isinstance(value, Mapping):
        return [[key, _plain(part)] for key, part in value.items()]
    return value


def _read(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Mean(float(value["total"]), int(value["count"]))
    if isinstance(value, list):
        return {key: _read(part) for key, part in value}
    return value if value is None or isinstance(value, float) else int(value)
