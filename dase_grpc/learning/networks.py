"""The networks of deterministic actor-critics, initialised from a generator of their own.

Weights and biases start uniform within ±1/sqrt(inputs), torch's default for a linear layer, as in
the released code of TD3 (Fujimoto et al. 2018, arXiv 1802.09477) and of DASE.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor, nn

from dase_grpc.schema import Array


class Actor(nn.Module):
    """π(s): ReLU layers, then tanh; also the policy that evaluation runs.

    `sizes` is (m, *hidden, n). Layer k has `weight.k` (out, in) and `bias.k` (out,), as in nn.Linear.
    """

    def __init__(
        self, sizes: Sequence[int], generator: torch.Generator, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        drawn = _draw(sizes, 1, generator, device=device, dtype=dtype)
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

    @torch.inference_mode()
    def act(self, observation: Array) -> Array:
        """Noise-free actions in [-1, 1]; (B, m) float32 -> (B, n) float32, a new array."""
        weight = self._layers[0][0]
        actions = self.actions(torch.tensor(observation, dtype=weight.dtype, device=weight.device))
        result: Array = actions.to("cpu", torch.float32).numpy()
        return result

    def frozen_copy(self) -> Self:
        """A target network: equal values of its own, without gradients."""
        return copy.deepcopy(self).requires_grad_(False)


class TwinCritic(nn.Module):
    """Q1 and Q2 of (s, a), evaluated together: one batched product a layer instead of two products.

    `sizes` is (m + n, *hidden, 1). Layer k has `weight.k` (2, in, out) and `bias.k` (2, 1, out).
    """

    def __init__(
        self, sizes: Sequence[int], generator: torch.Generator, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        drawn = _draw(sizes, 2, generator, device=device, dtype=dtype)
        self.weight = nn.ParameterList(weight for weight, _ in drawn)
        self.bias = nn.ParameterList(bias for _, bias in drawn)
        self._layers = tuple(zip(self.weight, self.bias, strict=True))

    def both(self, state_action: Tensor) -> Tensor:
        """Both values; (B, m + n) -> (2, B)."""
        *inner, (last_weight, last_bias) = self._layers
        hidden = state_action.expand(2, *state_action.shape)
        for weight, bias in inner:
            hidden = torch.relu_(torch.baddbmm(bias, hidden, weight))
        # One output: a batched product of width 1 costs 5 % of a whole update more than this sum.
        values: Tensor = torch.linalg.vecdot(hidden, last_weight.mT) + last_bias.squeeze(-1)
        return values

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


def restore(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Copies `state` into the `tensors` of the same names, or changes nothing.

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
    with torch.no_grad():
        for name, ours in tensors.items():
            ours.copy_(state[name])


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _draw(
    sizes: Sequence[int],
    count: int,
    generator: torch.Generator,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> list[tuple[Tensor, Tensor]]:
    """For each layer a (count, in, out) weight and a (count, 1, out) bias.

    Drawn on the CPU in float32, so that every device starts from the same bits.
    """

    def uniform(*shape: int, bound: float) -> Tensor:
        values = torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        return values.to(device, dtype)

    return [
        (
            uniform(count, inputs, outputs, bound=inputs**-0.5),
            uniform(count, 1, outputs, bound=inputs**-0.5),
        )
        for inputs, outputs in pairwise(sizes)
    ]
