"""Steps of fused Adam, guarded against what is not finite, for one agent or for K."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from dase_grpc.learning.agents.memory import Flat

_ADAM: Final[Mapping[str, Any]] = {
    **{"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    **{"amsgrad": False, "maximize": False, "grad_scale": None},
}
LOSS_SHARE: Final = 1e-8
"""The share of float32's largest number that a loss may have, 3e30.

Beyond it a gradient's square may be too large for Adam's second moment, which would stay so for ever. Of huge
observations smaller losses have such gradients, so their squares are looked at, too.
"""

SURELY_SMALL: Final = 1e30
"""A loss below it is within that share, whatever the rounding."""

_SUBNORMAL: Final = sys.float_info.min / 2


@contextmanager
def subnormals_as_zero() -> Iterator[None]:
    """This thread's processor takes numbers below the smallest normal one, 1.2e-38 in float32, for 0."""
    already = _SUBNORMAL == 0  # compared by the processor, which takes it for 0 where it is told to
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


def fused_adam(
    moved: Sequence[list[Tensor]], *, lr: float, weight_decay: float, skip: Tensor | None = None
) -> None:
    """One step of torch's fused kernel, in place; none where the float `skip` is 1.

    moved holds values, gradients, means, squares and numbers of steps, as many of each.

    Called directly, because torch's optimiser adds 40 µs of Python to 70 µs of a step on a CPU. The numbers
    of steps are the caller's to count, before the call. Weight decay is the L2 term's gradient, added before
    the moments, on weights and biases.

    Moments below 1.2e-38 become 0. Those of a unit whose ReLU lets nothing through any more would stay
    just above 0 for ever, since nine tenths of the smallest number are rounded up to it. Processors take
    many times as long over such numbers, and what they move is too little to change a normal value.
    """
    values, gradients, means, squares, steps = moved
    with subnormals_as_zero():
        torch._fused_adam_(
            values,
            gradients,
            means,
            squares,
            [],
            steps,
            lr=lr,
            weight_decay=weight_decay,
            found_inf=skip,
            **_ADAM,
        )


def _largest_square(gradient: Tensor) -> Tensor:
    """(..., size) -> (...): no second moment of Adam's comes to be larger; NaN where a number is."""
    return gradient.square().amax(-1)


@dataclass(frozen=True)
class Steps:
    """How many steps an optimiser was asked for, and how many of them it left out as not finite."""

    tried: int
    left_out: int


class GuardedSteps:
    """Steps of torch.optim.Adam(fused=True), to the bit, but those not finite or of too large a loss.

    Moments are so where they are normal numbers; subnormal ones are 0 (`fused_adam`).

    A step that is left out changes neither weights nor moments nor Adam's own count. Never waits for the
    device but in `take`: the check and the step are those of torch.amp.GradScaler, with a scale of 1, and
    Adam reads on the device whether it shall step.

    Args:
        flat: what is moved, along the gradient in it, which the caller writes.
        name: of its tensors in the memory of `flat`; None for the network's.
    """

    def __init__(self, flat: Flat, *, lr: float, weight_decay: float = 0.0, name: str | None = None) -> None:
        name = name or flat.name
        self._flat = flat
        self._lr = lr
        self._weight_decay = weight_decay
        dtype, device = flat.values.dtype, flat.values.device
        room = partial(flat.memory.zeros, device=device)
        self._mean = room(f"{name}.mean", flat.values.shape, dtype=dtype)
        self._square = room(f"{name}.square", flat.values.shape, dtype=dtype)
        self._step = room(f"{name}.step", (), dtype=torch.float32)
        self._moved = [[flat.values], [flat.gradient], [self._mean], [self._square], [self._step]]
        self._found = torch.zeros((), dtype=torch.float32, device=device)
        self._unscaled = torch.ones((), dtype=torch.float32, device=device)
        self._left_out = room(f"{name}.left_out", (), dtype=torch.float64)
        self._tried = 0

    def count(self) -> None:
        """Notes that a step is about to be tried; what tries it is tensor work alone and may be a replay."""
        self._tried += 1

    def minimise(self, loss: Tensor, *, skip: Tensor | None = None) -> Tensor:
        """One step by autograd, none where the float `skip` is 1; returns the loss without its graph."""
        self._flat.gradient.zero_()
        torch.autograd.backward(loss)
        loss = loss.detach()
        with torch.no_grad():
            self.step(loss, skip=skip)
        return loss

    def step(self, loss: Tensor, *, skip: Tensor | None = None) -> None:
        """One step along the gradient that is there, the one of `loss`; none where the float `skip` is 1.

        Called under `torch.no_grad`.
        """
        if skip is None and self._surely_sound(loss):
            self._adam(None)
            return
        bad = self._found.zero_()
        looked_at = [_largest_square(self._flat.gradient), loss * (1 / LOSS_SHARE)]
        torch._amp_foreach_non_finite_check_and_unscale_(looked_at, bad, self._unscaled)
        self._left_out += bad
        self._adam(bad if skip is None else torch.maximum(bad, skip))

    def _surely_sound(self, loss: Tensor) -> bool:
        """Whether a look says so, for a third of the time; False where that would wait for the device."""
        if loss.device.type != "cpu" or not abs(float(loss)) < SURELY_SMALL:
            return False
        return math.isfinite(float(self._flat.gradient @ self._flat.gradient))

    def _adam(self, skip: Tensor | None) -> None:
        self._step += 1
        fused_adam(self._moved, lr=self._lr, weight_decay=self._weight_decay, skip=skip)
        if skip is not None:
            self._step -= skip

    def take(self) -> Steps:
        """The steps since the last call; waits for the device."""
        steps = Steps(self._tried, int(self._left_out))
        self._left_out.zero_()
        self._tried = 0
        return steps

    def named_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Its state as `prefix`.<parameter>.<moment or step>, views of it; the parameters share one step."""
        parts = zip(self._flat.named(self._mean), self._flat.named(self._square), strict=True)
        for (name, mean), (_, square) in parts:
            yield f"{prefix}.{name}.step", self._step
            yield f"{prefix}.{name}.exp_avg", mean
            yield f"{prefix}.{name}.exp_avg_sq", square


class StackedSteps:
    """Steps of one network of each of K agents, by one fused Adam; each agent has a guard of its own.

    A step is left out for an agent whose gradient is not finite or whose loss is too large, and counted
    there alone; it is skipped for agents whose turn it is not. Left out or skipped, it changes neither
    weights nor moments nor Adam's count: the step is taken for all, and then what these had is put back.
    Never waits for the device.

    Args:
        held: (K, size) values, gradient, mean and square of this network, (K,) step and left_out.
        parameters: the leaves that a loss is derived by, views of values; places: of gradient.
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
        self._held, self._parameters, self._places = held, parameters, places
        self._lr = lr
        self._weight_decay = weight_decay
        self._moved = [list(held[name].unbind()) for name in ("values", "gradient", "mean", "square", "step")]

    def minimise(self, loss: Tensor, *, live: Tensor) -> Tensor:
        """One step down each of the (K,) losses by autograd; returns them without their graph.

        live is (K,) bool: whose turn it is. No agent's loss may depend on another's parameters.
        """
        gradients = torch.autograd.grad(loss.sum(), self._parameters)
        loss = loss.detach()
        with torch.no_grad():
            for place, gradient in zip(self._places, gradients, strict=True):
                place.copy_(gradient)
            finite = _largest_square(self._held["gradient"]).isfinite() & (loss * (1 / LOSS_SHARE)).isfinite()
            self._held["left_out"].add_(live & ~finite)
            self._step(live & finite)
        return loss

    def _step(self, taken: Tensor) -> None:
        moved = [self._held[name] for name in ("values", "mean", "square")]
        before = [tensor.clone() for tensor in moved]
        self._held["step"].add_(1)
        fused_adam(self._moved, lr=self._lr, weight_decay=self._weight_decay)
        for tensor, old in zip(moved, before, strict=True):
            tensor.copy_(torch.where(taken[:, None], tensor, old))
        self._held["step"].sub_((~taken).float())
