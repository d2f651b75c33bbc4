"""The networks of one agent: their parameters, initialised from a generator of their own.

Values and gradients of critics are those of passes.py on a CPU and of batched.py elsewhere.
"""

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


class Value(Protocol):
    """What a critic whose action enters apart is for whoever only asks for its value."""

    def value(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q(s, a); (B, m) and (B, n) -> (B,)."""
        ...


class _Network(nn.Module):
    def frozen_copy(self) -> Self:
        """A target network: equal values of its own, without gradients."""
        return copy.deepcopy(self).requires_grad_(False)


class Actor(_Network):
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


class TwinCritic(_Network):
    """Q1 and Q2 of (s, a): their parameters, each from a start of its own.

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


class LateActionCritic(_Network):
    """A Q(s, a) whose action enters at the second layer, beside what the first gives (Lillicrap et al. 2015).

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
