"""Flat parameters, fused Adam, and the guard against steps that are not finite, for one agent or K."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from dase_grpc.learning.agents.memory import OWN, Memory

ALIGNMENT: Final = 16
"""Every parameter begins at a multiple of this many elements, a cache line of float32."""

BETA1: Final = 0.9
BETA2: Final = 0.999
EPSILON: Final = 1e-8

LOSS_SHARE: Final = 1e-8
"""The share of float32's largest number that a loss may have, 3e30.

Beyond it a gradient's square may be too large for Adam's second moment, which would stay so for ever.
"""


class Flat:
    """All values and all gradients of a network, and the layout that its parameters have in them.

    From then on the parameters are views of `values`, under the names and in the shapes they had, and
    their gradients views of `gradient`, where autograd adds to what is there. The gaps that alignment
    leaves hold zeros and get no gradient. Optimiser and target steps work on the flat tensors.

    Args:
        network: its parameters' values stay what they are; none is shared with another network.
        name: of the network, in the memory.
        copies: equal parts that the network is made of, as the first dimension of its parameters has them;
            all of one part come before all of the next. 1 where they have no such dimension.
    """

    def __init__(
        self, network: nn.Module, *, name: str = "network", copies: int = 1, memory: Memory = OWN
    ) -> None:
        self.name = name
        self.memory = memory
        self._copies = copies
        self._layout: list[tuple[str, torch.Size, int]] = []
        size = 0
        for parameter_name, parameter in network.named_parameters():
            shape = parameter.shape if copies == 1 else parameter.shape[1:]
            self._layout.append((parameter_name, shape, size))
            size += -(-shape.numel() // ALIGNMENT) * ALIGNMENT
        first = next(network.parameters())
        room = partial(memory.zeros, shape=(copies * size,), dtype=first.dtype, device=first.device)
        self.values = room(f"{name}.values")
        self.gradient = room(f"{name}.gradient")
        views, gradients = dict(self.named(self.values)), dict(self.named(self.gradient))
        for parameter_name, parameter in network.named_parameters():
            views[parameter_name].copy_(parameter.detach())
            parameter.data = views[parameter_name]
            if parameter.requires_grad:
                parameter.grad = gradients[parameter_name]

    def named(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The parts of a flat tensor under the parameters' names, as views in their shapes.

        It is (size,), or (K, size) of K such networks; their parts have K in front, too.
        """
        front = tensor.shape[:-1] if self._copies == 1 else (*tensor.shape[:-1], self._copies)
        parts = tensor.view(*front, -1)
        for name, shape, start in self._layout:
            yield name, parts[..., start : start + shape.numel()].view(*front, *shape)


def fused_adam(
    values: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    weight_decay: float,
    skip: Tensor | None = None,
) -> None:
    """One step of torch's fused kernel for each tensor, in place; none where the float `skip` is 1.

    The numbers of steps are the caller's to count, before the call.
    """
    torch._fused_adam_(
        values,
        gradients,
        means,
        squares,
        [],
        steps,
        lr=lr,
        beta1=BETA1,
        beta2=BETA2,
        weight_decay=weight_decay,
        eps=EPSILON,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=skip,
    )


class Adam:
    """torch's fused kernel, called directly: its optimiser adds 40 µs of Python to 70 µs of a step on a CPU.

    To the bit what torch.optim.Adam(fused=True) does with each parameter. Weight decay is the L2 term's
    gradient, added before the moments, on weights and biases.

    Args:
        name: of its tensors in the memory of `flat`; None for the network's.
    """

    def __init__(self, flat: Flat, *, lr: float, weight_decay: float = 0.0, name: str | None = None) -> None:
        self._flat = flat
        self.name = flat.name if name is None else name
        self.memory = flat.memory
        self._lr = lr
        self._weight_decay = weight_decay
        shape, device = flat.values.shape, flat.values.device
        self._mean = flat.memory.zeros(f"{self.name}.mean", shape, dtype=flat.values.dtype, device=device)
        self._square = flat.memory.zeros(f"{self.name}.square", shape, dtype=flat.values.dtype, device=device)
        self._step = flat.memory.zeros(f"{self.name}.step", (), dtype=torch.float32, device=device)

    @property
    def gradient(self) -> Tensor:
        """What the next step follows, flat; the caller writes it."""
        return self._flat.gradient

    @torch.no_grad()
    def step(self, skip: Tensor) -> None:
        """One step, or none where the float `skip` on the device is 1."""
        self._step += 1
        fused_adam(
            [self._flat.values],
            [self._flat.gradient],
            [self._mean],
            [self._square],
            [self._step],
            lr=self._lr,
            weight_decay=self._weight_decay,
            skip=skip,
        )
        self._step -= skip

    def named_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Its state as `prefix`.<parameter>.<moment or step>, views of it; the parameters share one step."""
        parts = zip(self._flat.named(self._mean), self._flat.named(self._square), strict=True)
        for (name, mean), (_, square) in parts:
            yield f"{prefix}.{name}.step", self._step
            yield f"{prefix}.{name}.exp_avg", mean
            yield f"{prefix}.{name}.exp_avg_sq", square


@dataclass(frozen=True)
class Steps:
    """How many steps an optimiser was asked for, and how many of them it left out as not finite."""

    tried: int
    left_out: int


class GuardedSteps:
    """Takes the steps of one Adam, but those whose gradient is not finite or whose loss is too large.

    A step that is left out changes neither weights nor moments nor Adam's own count. Never waits for the
    device but in `take`: the check and the step are those of torch.amp.GradScaler, with a scale of 1, and
    Adam reads on the device whether it shall step.
    """

    def __init__(self, optimizer: Adam) -> None:
        self._optimizer = optimizer
        device = optimizer.gradient.device
        self._found = torch.zeros((), dtype=torch.float32, device=device)
        self._unscaled = torch.ones((), dtype=torch.float32, device=device)
        name = f"{optimizer.name}.left_out"
        self._left_out = optimizer.memory.zeros(name, (), dtype=torch.float64, device=device)
        self._tried = 0

    def count(self) -> None:
        """Notes that a step is about to be tried; what tries it is tensor work alone and may be a replay."""
        self._tried += 1

    def minimise(self, loss: Tensor, *, skip: Tensor | None = None) -> Tensor:
        """One step by autograd, none where the float `skip` is 1; returns the loss without its graph."""
        self._optimizer.gradient.zero_()
        torch.autograd.backward(loss)
        loss = loss.detach()
        self.step(loss, skip=skip)
        return loss

    @torch.no_grad()
    def step(self, loss: Tensor, *, skip: Tensor | None = None) -> None:
        """One step along the gradient that is there, the one of `loss`; none where the float `skip` is 1."""
        bad = self._found.zero_()
        looked_at = [self._optimizer.gradient, loss * (1 / LOSS_SHARE)]
        torch._amp_foreach_non_finite_check_and_unscale_(looked_at, bad, self._unscaled)
        self._left_out += bad
        self._optimizer.step(bad if skip is None else torch.maximum(bad, skip))

    def take(self) -> Steps:
        """The steps since the last call; waits for the device."""
        steps = Steps(self._tried, int(self._left_out))
        self._left_out.zero_()
        self._tried = 0
        return steps


class StackedSteps:
    """Steps of one network of each of K agents, by one fused Adam; each agent has a guard of its own.

    A step is left out for an agent whose gradient is not finite or whose loss is too large, and counted
    there alone; it is skipped for agents whose turn it is not. Left out or skipped, it changes neither
    weights nor moments nor Adam's count: the step is taken for all, and then what these had is put back.
    Never waits for the device.

    Args:
        held: the agents' flat tensors of this network, by their names after its own: (K, size) values,
            gradient, mean and square, (K,) step and left_out.
        parameters: the leaves that a loss is derived by, views of values.
        places: views of gradient in the same shapes.
        lr, weight_decay: as Adam's.
    """

    def __init__(
        self,
        held: Mapping[str, Tensor],
        parameters: Sequence[Tensor],
        places: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float = 0.0,
    ) -> None:
        self._held = held
        self._parameters = list(parameters)
        self._places = list(places)
        self._lr = lr
        self._weight_decay = weight_decay
        self._rows = {
            name: list(held[name].unbind()) for name in ("values", "gradient", "mean", "square", "step")
        }

    def minimise(self, loss: Tensor, *, live: Tensor) -> Tensor:
        """One step down each of the (K,) losses by autograd; returns them without their graph.

        live is (K,) bool: whose turn it is. No agent's loss may depend on another's parameters.
        """
        gradients = torch.autograd.grad(loss.sum(), self._parameters)
        loss = loss.detach()
        with torch.no_grad():
            for place, gradient in zip(self._places, gradients, strict=True):
                place.copy_(gradient)
            finite = self._held["gradient"].abs().amax(-1).isfinite() & (loss * (1 / LOSS_SHARE)).isfinite()
            self._held["left_out"].add_(live & ~finite)
            self._step(live & finite)
        return loss

    def _step(self, taken: Tensor) -> None:
        moved = [self._held[name] for name in ("values", "mean", "square")]
        before = [tensor.clone() for tensor in moved]
        rows = self._rows
        self._held["step"].add_(1)
        fused_adam(
            rows["values"],
            rows["gradient"],
            rows["mean"],
            rows["square"],
            rows["step"],
            lr=self._lr,
            weight_decay=self._weight_decay,
        )
        for tensor, old in zip(moved, before, strict=True):
            tensor.copy_(torch.where(taken[:, None], tensor, old))
        self._held["step"].sub_((~taken).float())
