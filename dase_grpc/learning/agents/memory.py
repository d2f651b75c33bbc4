"""Memory: the place of an agent's tensors, by themselves or beside those of other agents in a stack."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor


class Memory(Protocol):
    """Gives out the tensors that one agent keeps for life."""

    @property
    def stacked(self) -> bool:
        """Whether the same tensors of other agents lie beside them."""
        ...

    def zeros(self, name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros of that shape, under a name that no other tensor of the agent has."""
        ...


class OwnMemory:
    """The memory of an agent that is not stacked."""

    stacked: Final = False

    def zeros(self, name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See Memory."""
        return torch.zeros(tuple(shape), dtype=dtype, device=device)


OWN: Final = OwnMemory()


class StackedMemory:
    """The memory of K agents of one kind: a tensor of one of them is a row of a (K, ...) tensor of all.

    Args:
        agents: K.
    """

    def __init__(self, agents: int) -> None:
        self._agents = agents
        self._held: dict[str, Tensor] = {}

    @property
    def held(self) -> Mapping[str, Tensor]:
        """The tensors of all agents, by name."""
        return self._held

    def of(self, place: int) -> Memory:
        """The memory of the agent at this place, 0..K-1."""
        return _Row(self, place)

    def row(
        self, place: int, name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A part of the tensor of that name, which the first who asks for it makes."""
        if name not in self._held:
            self._held[name] = torch.zeros((self._agents, *shape), dtype=dtype, device=device)
        row = self._held[name][place]
        if (row.shape, row.dtype) != (torch.Size(shape), dtype):
            raise ValueError(f"{name} of one agent is {list(shape)}, of the others {list(row.shape)}")
        return row


def overwrite(held: Tensor, new: Tensor, *, live: Tensor | None = None) -> None:
    """Writes `new` over `held`; of a stack, for those agents alone for which `live`, (K,) bool, is true."""
    if live is not None:
        new = torch.where(live.view(-1, *(1,) * (new.ndim - 1)), new, held)
    held.copy_(new)


class _Row:
    stacked: Final = True

    def __init__(self, all_agents: StackedMemory, place: int) -> None:
        self._all_agents = all_agents
        self._place = place

    def zeros(self, name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See Memory."""
        return self._all_agents.row(self._place, name, shape, dtype=dtype, device=device)
