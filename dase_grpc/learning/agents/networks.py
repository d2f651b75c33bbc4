"""The networks of deterministic actor-critics, initialised from a generator of their own."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor, nn

Bounds = Callable[[int, int], tuple[float, float]]
"""From a layer's inputs and outputs to the bounds that its weights and its biases start uniform within."""


def linear_bounds(inputs: int, outputs: int) -> tuple[float, float]:
    """±1/sqrt(inputs), torch's default for a linear layer.

    As in the released code of TD3 (Fujimoto et al. 2018, arXiv 1802.09477) and DASE's DDPG and TD3.
    """
    return inputs**-0.5, inputs**-0.5


def xavier_bounds(inputs: int, outputs: int) -> tuple[float, float]:
    """Glorot & Bengio 2010 for the weights, biases of zero, as in the released code of DASE's SAC."""
    return (6 / (inputs + outputs)) ** 0.5, 0.0


class Policy(Protocol):
    """What an actor is for whoever only asks for actions."""

    def actions(self, observation: Tensor) -> Tensor:
        """Actions in [-1, 1]; (B, m) -> (B, n)."""
        ...


class Twins(Protocol):
    """What a twin critic is for whoever only asks for both values."""

    def both(self, state_action: Tensor) -> Tensor:
        """Both values; (B, m + n) -> (2, B)."""
        ...


class TwinValues(Twins, Protocol):
    """What a twin critic is for its own update, and for the actor's."""

    def first(self, state_action: Tensor) -> Tensor:
        """Q1 with the parameters held constant, so a gradient reaches the input only; -> (B,)."""
        ...

    def lowest(self, state_action: Tensor) -> Tensor:
        """min(Q1, Q2) with the parameters held constant, so a gradient reaches the input only; -> (B,)."""
        ...


class Value(Protocol):
    """What a critic whose action enters apart is for whoever only asks for its value."""

    def value(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q(s, a); (B, m) and (B, n) -> (B,)."""
        ...


class LateValues(Value, Protocol):
    """What a critic whose action enters apart is for its own update, and for the actor's."""

    def fixed_value(self, observation: Tensor, action: Tensor) -> Tensor:
        """`value` with the parameters held constant, so a gradient reaches the inputs only."""
        ...


class Actor(nn.Module):
    """π(s): ReLU layers, then tanh.

    `sizes` is (m, *hidden, n). Layer k has `weight.k` (out, in) and `bias.k` (out,), as in nn.Linear.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        generator: torch.Generator,
        *,
        device: torch.device,
        dtype: torch.dtype,
        bounds: Bounds = linear_bounds,
    ) -> None:
        super().__init__()
        drawn = _draw(pairwise(sizes), 1, generator, bounds=bounds, device=device, dtype=dtype)
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

    def frozen_copy(self) -> Self:
        """A target network: equal values of its own, without gradients."""
        return copy.deepcopy(self).requires_grad_(False)


class TwinCritic(nn.Module):
    """Q1 and Q2 of (s, a), evaluated together: one batched product a layer instead of two products.

    `sizes` is (m + n, *hidden, 1). Layer k has `weight.k` (2, in, out) and `bias.k` (2, 1, out).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        generator: torch.Generator,
        *,
        device: torch.device,
        dtype: torch.dtype,
        bounds: Bounds = linear_bounds,
    ) -> None:
        super().__init__()
        drawn = _draw(pairwise(sizes), 2, generator, bounds=bounds, device=device, dtype=dtype)
        self.weight = nn.ParameterList(weight for weight, _ in drawn)
        self.bias = nn.ParameterList(bias for _, bias in drawn)
        self._layers = tuple(zip(self.weight, self.bias, strict=True))

    def both(self, state_action: Tensor) -> Tensor:
        """Both values; (B, m + n) -> (2, B)."""
        return _both(self._layers, state_action)

    def lowest(self, state_action: Tensor) -> Tensor:
        """min(Q1, Q2) with the parameters held constant, so a gradient reaches the input only; -> (B,)."""
        return _both([(w.detach(), b.detach()) for w, b in self._layers], state_action).amin(dim=0)

    def first(self, state_action: Tensor) -> Tensor:
        """Q1 with the parameters held constant, so a gradient reaches the input only; -> (B,)."""
        *inner, (last_weight, last_bias) = ((w.detach()[0], b.detach()[0]) for w, b in self._layers)
        hidden = state_action
        for weight, bias in inner:
            hidden = torch.relu_(torch.addmm(bias, hidden, weight))
        return torch.addmm(last_bias, hidden, last_weight).squeeze(-1)

    def frozen_copy(self) -> Self:
        """A target network: equal values of its own, without gradients."""
        return copy.deepcopy(self).requires_grad_(False)


class LateActionCritic(nn.Module):
    """Q(s, a) whose action enters at the second layer, beside the first one's output (Lillicrap et al. 2015).

    `sizes` is (m, *hidden, 1), n the action's size. Layer k has `weight.k` (in, out) and `bias.k` (out,);
    the rows of the second layer that multiply the action are `action_weight` (n, out).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        action_size: int,
        generator: torch.Generator,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        first, second, *others = pairwise(sizes)
        layers = [first, (second[0] + action_size, second[1]), *others]
        drawn = _draw(layers, 1, generator, bounds=linear_bounds, device=device, dtype=dtype)
        weights = [weight[0] for weight, _ in drawn]
        beside = weights[1]
        weights[1] = beside[: second[0]].clone()
        self.weight = nn.ParameterList(weights)
        self.action_weight = nn.Parameter(beside[second[0] :].clone())
        self.bias = nn.ParameterList(bias[0, 0] for _, bias in drawn)
        self._layers = tuple(zip(self.weight, self.bias, strict=True))

    def value(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q(s, a); (B, m) and (B, n) -> (B,)."""
        return _late(self._layers, self.action_weight, observation, action)

    def fixed_value(self, observation: Tensor, action: Tensor) -> Tensor:
        """`value` with the parameters held constant, so a gradient reaches the inputs only."""
        layers = [(weight.detach(), bias.detach()) for weight, bias in self._layers]
        return _late(layers, self.action_weight.detach(), observation, action)

    def frozen_copy(self) -> Self:
        """A target network: equal values of its own, without gradients."""
        return copy.deepcopy(self).requires_grad_(False)


def restore(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Copies `state` into the `tensors` of the same names, or changes nothing.

    Raises:
        KeyError, ValueError: as `require_fit`.
    """
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
        ours = tensors[name]
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (ours.shape, ours.dtype):
            raise ValueError(
                f"the saved state has {_describe(value)} for {name}, not {_describe(ours)}: {reason}"
            )


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _both(layers: Sequence[tuple[Tensor, Tensor]], state_action: Tensor) -> Tensor:
    *inner, (last_weight, last_bias) = layers
    hidden = state_action.expand(2, *state_action.shape)
    for weight, bias in inner:
        hidden = torch.relu_(torch.baddbmm(bias, hidden, weight))
    # One output: a batched product of width 1 costs 5 % of a whole update more than this sum.
    values: Tensor = torch.linalg.vecdot(hidden, last_weight.mT) + last_bias.squeeze(-1)
    return values


def _late(
    layers: Sequence[tuple[Tensor, Tensor]], action_weight: Tensor, observation: Tensor, action: Tensor
) -> Tensor:
    (weight, bias), *others = layers
    linear = torch.addmm(bias, observation, weight)
    for index, (weight, bias) in enumerate(others):
        given = torch.addmm(bias, action, action_weight) if index == 0 else bias
        linear = torch.addmm(given, torch.relu_(linear), weight)
    return linear.squeeze(-1)


def _draw(
    layers: Iterable[tuple[int, int]],
    count: int,
    generator: torch.Generator,
    *,
    bounds: Bounds,
    device: torch.device,
    dtype: torch.dtype,
) -> list[tuple[Tensor, Tensor]]:
    """For each layer of (inputs, outputs) a (count, in, out) weight and a (count, 1, out) bias.

    Drawn on the CPU in float32, so that every device starts from the same bits.
    """

    def uniform(*shape: int, bound: float) -> Tensor:
        values = torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        return values.to(device, dtype)

    drawn = []
    for inputs, outputs in layers:
        weight_bound, bias_bound = bounds(inputs, outputs)
        weight = uniform(count, inputs, outputs, bound=weight_bound)
        drawn.append((weight, uniform(count, 1, outputs, bound=bias_bound)))
    return drawn
