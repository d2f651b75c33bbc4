"""Memory: the place of an agent's tensors, by themselves or beside those of other agents in a stack."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

ALIGNMENT: Final = 16
"""Every parameter begins at a multiple of this many elements, a cache line of float32."""


class Memory:
    """Gives out the tensors that one agent keeps for life; this one, those of an agent by itself."""

    stacked: bool = False
    """Whether the same tensors of other agents lie beside them."""

    def zeros(self, name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros of that shape, under a name that no other tensor of the agent has."""
        return torch.zeros(tuple(shape), dtype=dtype, device=device)


OWN: Final = Memory()


class StackedMemory:
    """The memory of K agents of one kind: a tensor of one is a row of a (K, ...) tensor of all, in `held`."""

    def __init__(self, agents: int) -> None:
        self.agents = agents
        self.held: dict[str, Tensor] = {}

    def of(self, place: int) -> Memory:
        """The memory of the agent at this place, 0..K-1."""
        return _Row(self, place)

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors of all agents whose names begin with `prefix`, by the rest of their names."""
        start = f"{prefix}."
        return {name.removeprefix(start): held for name, held in self.held.items() if name.startswith(start)}


class _Row(Memory):
    stacked = True

    def __init__(self, of_all: StackedMemory, place: int) -> None:
        self._all = of_all
        self._place = place

    def zeros(self, name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See Memory; a part of the tensor of that name, which the first who asks for it makes."""
        held = self._all.held
        if name not in held:
            held[name] = torch.zeros((self._all.agents, *shape), dtype=dtype, device=device)
        row = held[name][self._place]
        if (row.shape, row.dtype) != (torch.Size(shape), dtype):
            raise ValueError(f"{name} of one agent is {list(shape)}, of the others {list(row.shape)}")
        return row


def overwrite(held: Tensor, new: Tensor, *, live: Tensor | None = None) -> None:
    """Writes `new` over `held`; of a stack, for those agents alone for which `live`, (K,) bool, is true."""
    if live is not None:
        new = torch.where(live.view(-1, *(1,) * (new.ndim - 1)), new, held)
    held.copy_(new)


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
