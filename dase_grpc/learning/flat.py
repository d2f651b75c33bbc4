"""The parameters of a network as views of one flat tensor, so that what holds for all of them is one call."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

ALIGNMENT: Final = 16
"""Every parameter begins at a multiple of this many elements, a cache line of float32."""


class Flat:
    """All values and all gradients of a network, and the layout that its parameters have in them.

    From then on the parameters are views of `values`, under the names and in the shapes they had, and
    their gradients views of `gradient`, where autograd adds to what is there. The gaps that alignment
    leaves hold zeros and get no gradient. Optimiser and target steps work on the flat tensors.

    Args:
        network: its parameters' values stay what they are; none is shared with another network.
    """

    def __init__(self, network: nn.Module) -> None:
        self._layout: list[tuple[str, torch.Size, int]] = []
        size = 0
        for name, parameter in network.named_parameters():
            self._layout.append((name, parameter.shape, size))
            size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        first = next(network.parameters())
        self.values = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.gradient = torch.zeros_like(self.values)
        views, gradients = dict(self.named(self.values)), dict(self.named(self.gradient))
        for name, parameter in network.named_parameters():
            views[name].copy_(parameter.detach())
            parameter.data = views[name]
            if parameter.requires_grad:
                parameter.grad = gradients[name]

    def named(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The parts of a flat tensor under the parameters' names, as views in their shapes."""
        for name, shape, start in self._layout:
            yield name, tensor[start : start + shape.numel()].view(shape)
