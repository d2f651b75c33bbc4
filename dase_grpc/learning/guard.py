"""An optimiser that leaves out every step which would bring a number that is not finite into its network."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dase_grpc.learning.adam import Adam

LOSS_SHARE: Final = 1e-8
"""The share of float32's largest number that a loss may have, 3e30.

Beyond it a gradient's square may be too large for Adam's second moment, which would stay so for ever.
"""


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
