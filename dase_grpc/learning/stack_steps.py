"""The steps of K agents' optimisers at once: what guard.py and adam.py do for one, with K in front."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dase_grpc.learning.adam import fused_adam
from dase_grpc.learning.guard import LOSS_SHARE


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
