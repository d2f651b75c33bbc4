"""The networks of one agent: their parameters, initialised from a generator of their own.

Values and gradients of critics are those of passes.py on a CPU and of stack.py elsewhere.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor, nn

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.schema import TransitionSchema

Bounds = Callable[[int, int], tuple[float, float]]
"""From a layer's inputs and outputs to the bounds that its weights and its biases start uniform within."""


def linear_bounds(inputs: int, outputs: int) -> tuple[float, float]:
    """±1/sqrt(inputs), torch's default, as in the released code of TD3 and of DASE's DDPG and TD3."""
    return inputs**-0.5, inputs**-0.5


def xavier_bounds(inputs: int, outputs: int) -> tuple[float, float]:
    """Glorot & Bengio 2010 for the weights, biases of zero, as in the released code of DASE's SAC."""
    return (6 / (inputs + outputs)) ** 0.5, 0.0


@dataclass(frozen=True)
class Sizes:
    """Of an agent's networks: m observations, n actions, and the units of each hidden layer."""

    m: int
    n: int
    hidden: Sequence[int]

    @classmethod
    def of(cls, config: AgentConfig, schema: TransitionSchema) -> Self:
        """Those of an agent with this configuration."""
        return cls(schema.observation_size, schema.action_size, config.hidden)


@dataclass(frozen=True)
class Start:
    """Draws initial numbers, on the CPU in float32, so that every device starts from the same bits."""

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype = torch.float32
    bounds: Bounds = linear_bounds

    def draw(self, layers: Iterable[tuple[int, int]], count: int = 1) -> list[tuple[Tensor, Tensor]]:
        """For each layer of (inputs, outputs) a (count, in, out) weight and a (count, 1, out) bias."""
        drawn = []
        for inputs, outputs in layers:
            weight_bound, bias_bound = self.bounds(inputs, outputs)
            weight = self._uniform(count, inputs, outputs, bound=weight_bound)
            drawn.append((weight, self._uniform(count, 1, outputs, bound=bias_bound)))
        return drawn

    def _uniform(self, *shape: int, bound: float) -> Tensor:
        values = torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=self.generator)
        return values.to(self.device, self.dtype)


class _Network(nn.Module):
    def frozen_copy(self) -> Self:
        """A target network: equal values of its own, without gradients."""
        return copy.deepcopy(self).requires_grad_(False)


class Actor(_Network):
    """π(s): ReLU layers, then tanh; layer k has `weight.k` (out, in) and `bias.k` (out,), as in nn.Linear."""

    def __init__(self, sizes: Sizes, start: Start) -> None:
        super().__init__()
        drawn = start.draw(pairwise((sizes.m, *sizes.hidden, sizes.n)))
        self.weight = nn.ParameterList(weight[0].T.contiguous() for weight, _ in drawn)
        self.bias = nn.ParameterList(bias[0, 0] for _, bias in drawn)
        self._layers = tuple(zip(self.weight, self.bias, strict=True))  # the lists are slow to index

    def actions(self, observation: Tensor) -> Tensor:
        """Actions in [-1, 1]; (B, m) -> (B, n)."""
        *inner, last = self._layers
        hidden = observation
        for weight, bias in inner:
            hidden = torch.relu_(F.linear(hidden, weight, bias))
        return torch.tanh(F.linear(hidden, *last))


class TwinCritic(_Network):
    """The parameters of Q1 and Q2 of (s, a); layer k has `weight.k` (2, in, out) and `bias.k` (2, 1, out)."""

    def __init__(self, sizes: Sizes, start: Start) -> None:
        super().__init__()
        drawn = start.draw(pairwise((sizes.m + sizes.n, *sizes.hidden, 1)), 2)
        self.weight = nn.ParameterList(weight for weight, _ in drawn)
        self.bias = nn.ParameterList(bias for _, bias in drawn)


class LateActionCritic(_Network):
    """A Q(s, a) whose action enters at the second layer, beside what the first gives (Lillicrap et al. 2015).

    Layer k has `weight.k` (in, out) and `bias.k` (out,); the rows of the second layer that multiply the
    action are `action_weight` (n, out).
    """

    def __init__(self, sizes: Sizes, start: Start) -> None:
        super().__init__()
        first, second, *others = pairwise((sizes.m, *sizes.hidden, 1))
        drawn = start.draw([first, (second[0] + sizes.n, second[1]), *others])
        weights = [weight[0] for weight, _ in drawn]
        beside = weights[1]
        weights[1] = beside[: second[0]].clone()
        self.weight = nn.ParameterList(weights)
        self.action_weight = nn.Parameter(beside[second[0] :].clone())
        self.bias = nn.ParameterList(bias[0, 0] for _, bias in drawn)


def restore(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Copies `state` into the `tensors` of the same names, or changes nothing; raises as `require_fit`."""
    require_fit(tensors, state)
    with torch.no_grad():
        for name, ours in tensors.items():
            ours.copy_(state[name])


def require_fit(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Checks that `restore` could copy `state`.

    Raises:
        KeyError: `state` lacks a name.
        ValueError: `state` has another name, or a value of another shape or dtype.
    """
    reason = "the state was saved by another algorithm or with other sizes"
    for name in tensors:
        if name not in state:
            raise KeyError(f"the saved state lacks {name}: {reason}")
    for name, value in state.items():
        if name not in tensors:
            raise ValueError(f"the saved state holds {name}, which this agent does not have: {reason}")
        found, wanted = _describe(value), _describe(tensors[name])
        if found != wanted:
            raise ValueError(f"the saved state has {found} for {name}, not {wanted}: {reason}")


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
