"""An optimiser that leaves out every step which would bring a number that is not finite into its network."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Steps:
    """How many steps an optimiser was asked for, and how many of them it left out as not finite."""

    tried: int
    left_out: int


class GuardedSteps:
    """Takes the steps of one fused Adam, but those whose loss or gradient is not finite.

    Nor is a gradient whose square float32 cannot hold, which would stay in Adam's second moment for
    ever. A step that is left out changes neither weights nor moments nor Adam's own count. Never waits
    for the device but in `take`: Adam reads on the device whether it shall step, as it does for
    torch.amp.GradScaler.
    """

    def __init__(self, optimizer: torch.optim.Adam) -> None:
        self._optimizer = optimizer
        self._parameters: list[Tensor] = optimizer.param_groups[0]["params"]
        self._left_out = torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)
        self._tried = 0

    def minimise(self, loss: Tensor, *, skip: Tensor | None = None) -> Tensor:
        """One gradient step, none where the float `skip` is 1; returns the loss without its graph."""
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        bad = self._not_finite(loss)
        self._left_out += bad
        self._tried += 1
        # not in torch's stubs
        self._optimizer.found_inf = bad if skip is None else torch.maximum(bad, skip)  # type: ignore[attr-defined]
        self._optimizer.step()
        return loss.detach()

    def take(self) -> Steps:
        """The steps since the last call; waits for the device."""
        steps = Steps(self._tried, int(self._left_out))
        self._left_out.zero_()
        self._tried = 0
        return steps

    @torch.no_grad()
    def _not_finite(self, loss: Tensor) -> Tensor:
        """1.0 where the loss or the norm of a gradient is not finite, else 0.0; a float32 scalar."""
        norms = torch._foreach_norm([p.grad for p in self._parameters if p.grad is not None])
        total = torch.stack((*norms, loss)).sum()
        return total.sub_(total).ne(0).float()  # x - x is 0, or NaN where x is not finite
