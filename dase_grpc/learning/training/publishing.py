"""What an agent shows of its policy to the others, and sees of theirs.

`PeerPolicies` is all an algorithm needs that learns from other agents' policies. It has two
implementations that keep the same promises: `LocalPolicies` here, for agents of one process, and
`PolicyExchange` in nodes/policies.py, over the network. What is published is `policy_tensors` of an
agent's state (learning/agents/policy.py), with DPD its critic too; `load_policy` makes a policy of either and
checks names, shapes and dtypes. Between processes it travels as safetensors bytes, never as a pickle.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from dase_grpc.errors import DaseError


@dataclass(frozen=True)
class Published:
    """A policy as it was after `version` training iterations.

    The tensors are on the CPU, belong to all who look at them, and must not be changed.
    """

    version: int
    tensors: Mapping[str, Tensor]


class PeerPolicies(Protocol):
    """One agent's view of the policies of a run; for the thread that trains the agent."""

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Shows this agent's policy to the others; a later one takes its place.

        The tensors are copied to the CPU before this returns, which waits for their device but for
        nobody else. The version last published, given again, changes nothing.

        Raises:
            ValueError: the version is lower than one published before.
        """
        ...

    def latest(self, agent_id: int) -> Published | None:
        """The newest policy of another agent that has come here, None before the first.

        Never waits. As long as no newer one has come it is the same object, so `is` tells whether there
        is anything new. A peer that started again may come back with a lower version.

        Raises:
            DaseError: what the other agent published is not a policy; in one sentence.
        """
        ...


class LocalPolicies:
    """`PeerPolicies` among agents of one process, which share `table`. Single-threaded.

    A policy is seen as soon as it was published.
    """

    def __init__(self, agent_id: int, table: dict[int, Published]) -> None:
        self._agent_id = agent_id
        self._table = table

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See PeerPolicies."""
        held = self._table.get(self._agent_id)
        if is_newer(version, None if held is None else held.version):
            copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            self._table[self._agent_id] = Published(version, copies)

    def latest(self, agent_id: int) -> Published | None:
        """See PeerPolicies."""
        return self._table.get(agent_id)


def is_newer(version: int, published: int | None) -> bool:
    """Whether a version is to be published after `published`, which is None at first.

    Raises:
        ValueError: it is lower.
    """
    if published is not None and version < published:
        raise ValueError(f"policy {version} cannot be published after policy {published}")
    return published is None or version > published


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as safetensors bytes; copies them, and waits for their device."""
    # safetensors takes no views and nothing that shares memory
    plain = {name: each.detach().to("cpu", copy=True).contiguous() for name, each in tensors.items()}
    data: bytes = safetensors.torch.save(plain)
    return data


def from_bytes(payload: bytes) -> dict[str, Tensor]:
    """The tensors that `to_bytes` packed, on the CPU; reading them runs no code of the sender's.

    Raises:
        DaseError: the bytes are not of that form.
    """
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(payload)
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise DaseError(f"{len(payload)} bytes are not tensors in safetensors format") from error
    return tensors
