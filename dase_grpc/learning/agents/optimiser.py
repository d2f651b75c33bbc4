"""The parameters of a network as views of one flat tensor, so that what holds for all of them is one call."""

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from dase_grpc.learning.agents.memory import OWN, Memory

ALIGNMENT: Final = 16
"""Every parameter begins at a multiple of this many elements, a cache line of float32."""


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
