"""Forward passes by autograd, K agents in front (K = 1 is one agent): the reference of passes.py.

A network here is made of tensors that already hold the parameters of all K. What goes in is (K, B, ...).
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

Layer = tuple[Tensor, Tensor]
"""A batch of weights (…, in, out) and of biases (…, 1, out)."""


N = TypeVar("N", "StackedActor", "StackedTwins", "StackedLate")


def of_one(kind: type[N], network: nn.Module) -> N:
    """One agent's network as a stack of one has it; a gradient reaches its own parameters."""
    return kind({name: kind.of(name, value[None]) for name, value in network.named_parameters()})


class StackedActor:
    """π(s) of K agents; `of` puts the parameters into the form that batched products want."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._layers = _layers(parameters)

    @staticmethod
    def of(name: str, parameter: Tensor) -> Tensor:
        """Views: `weight.k` (K, out, in) as (K, in, out), `bias.k` (K, out) as (K, 1, out)."""
        return parameter.mT if name.startswith("weight") else parameter[:, None]

    def actions(self, observation: Tensor) -> Tensor:
        """Actions in [-1, 1]; (K, B, m) -> (K, B, n)."""
        *inner, (weight, bias) = self._layers
        return torch.tanh(torch.baddbmm(bias, _hidden(inner, observation), weight))


class StackedTwins:
    """Q1 and Q2 of K agents, 2K networks at once."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._layers = _layers(parameters)
        self._fixed = [(weight.detach(), bias.detach()) for weight, bias in self._layers]
        self._first = [(weight[::2], bias[::2]) for weight, bias in self._fixed]

    @staticmethod
    def of(name: str, parameter: Tensor) -> Tensor:
        """Views: `weight.k` (K, 2, in, out) as (2K, in, out), `bias.k` (K, 2, 1, out) as (2K, 1, out)."""
        return parameter.view(-1, *parameter.shape[2:])

    def both(self, state_action: Tensor) -> Tensor:
        """Both values; (K, B, m + n) -> (2, K, B)."""
        return _both(self._layers, state_action)

    def lowest(self, state_action: Tensor) -> Tensor:
        """min(Q1, Q2) with the parameters held constant, so a gradient reaches the input only; -> (K, B)."""
        return _both(self._fixed, state_action).amin(dim=0)

    def first(self, state_action: Tensor) -> Tensor:
        """Q1 with the parameters held constant, so a gradient reaches the input only; -> (K, B)."""
        *inner, last = self._first
        return _value(_hidden(inner, state_action), last)


class StackedLate:
    """The critics of K agents whose action enters at the second layer."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._layers = _layers(parameters)
        self._entry = parameters["action_weight"]

    @staticmethod
    def of(name: str, parameter: Tensor) -> Tensor:
        """Views: weights as they are, `bias.k` (K, out) as (K, 1, out)."""
        return parameter[:, None] if name.startswith("bias") else parameter

    def value(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q(s, a); (K, B, m) and (K, B, n) -> (K, B)."""
        return _late(self._layers, self._entry, observation, action)

    def fixed_value(self, observation: Tensor, action: Tensor) -> Tensor:
        """`value` with the parameters held constant, so a gradient reaches the inputs only."""
        layers = [(weight.detach(), bias.detach()) for weight, bias in self._layers]
        return _late(layers, self._entry.detach(), observation, action)


def _layers(parameters: Mapping[str, Tensor]) -> list[Layer]:
    count = sum(name.startswith("weight.") for name in parameters)
    return [(parameters[f"weight.{index}"], parameters[f"bias.{index}"]) for index in range(count)]


def _hidden(layers: Sequence[Layer], hidden: Tensor) -> Tensor:
    for weight, bias in layers:
        hidden = torch.relu_(torch.baddbmm(bias, hidden, weight))
    return hidden


def _value(hidden: Tensor, last: Layer) -> Tensor:
    """The one output of each, as a sum: a batched product of width 1 costs 5 % of a whole update more."""
    weight, bias = last
    value: Tensor = torch.linalg.vecdot(hidden, weight.mT) + bias.squeeze(-1)
    return value


def _both(layers: Sequence[Layer], state_action: Tensor) -> Tensor:
    *inner, last = layers
    agents, rows, size = state_action.shape
    twice = state_action[:, None].expand(agents, 2, rows, size).reshape(2 * agents, rows, size)
    return _value(_hidden(inner, twice), last).view(agents, 2, rows).transpose(0, 1)


def _late(layers: Sequence[Layer], entry: Tensor, observation: Tensor, action: Tensor) -> Tensor:
    (weight, bias), *others = layers
    linear = torch.baddbmm(bias, observation, weight)
    for index, (weight, bias) in enumerate(others):
        given = torch.baddbmm(bias, action, entry) if index == 0 else bias
        linear = torch.baddbmm(given, torch.relu_(linear), weight)
    return linear.squeeze(-1)
