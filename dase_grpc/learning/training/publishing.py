"""Policies shown to peers, actors and evaluators, and those seen of peers.

`PeerPolicies` is all an algorithm needs that learns from other agents' policies. It has two
implementations that keep the same promises: `LocalPolicies` here, for agents of one process, and
`PolicyExchange` in replay/client/policies.py, over the network. What is published is `policy_tensors` of an
agent's state (learning/agents/policy.py), with DPD its critic too; `load_policy` makes a policy of either and
checks names, shapes and dtypes. Between processes it travels as safetensors bytes, never as a pickle.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from dase_grpc.errors import DaseError
from dase_grpc.learning.agents.policy import PeerPolicies, Published
from dase_grpc.learning.agents.registry import Agent
from dase_grpc.progress import is_newer


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


def to_nobody(due: bool) -> None:
    """What a learner calls whose policy nobody can follow."""


@dataclass(frozen=True)
class Audience:
    """Where a learner's policy is shown, and whether anybody looks; `followed` is asked at every step.

    Attributes:
        publish_every: updates between two publications.
        always_when_due: show it at each step with an evaluation due, whether or not anybody looks.
    """

    policies: PeerPolicies
    followed: Callable[[], bool]
    publish_every: int
    always_when_due: bool = False


class Publication:
    """Publishes an agent's actor and normaliser; nothing is copied, and no device waited for, unless it does.

    Owned by the thread that trains the agent.
    """

    def __init__(self, agent: Agent, audience: Audience) -> None:
        self._agent = agent
        self._audience = audience
        self._published: int | None = None  # the version, while somebody follows

    def look(self, due: bool) -> None:
        """Publishes the policy where that is due: call once after each environment step.

        That is as soon as somebody follows, then every `publish_every` updates, and where `due` says so,
        which it does at each step with an evaluation.
        """
        followed = self._audience.followed()
        if not followed:
            self._published = None
        if (due and (followed or self._audience.always_when_due)) or (followed and self._is_old):
            self._published = self._agent.updates if followed else None
            self._audience.policies.publish(self._agent.updates, dict(self._agent.policy.named_tensors()))

    @property
    def _is_old(self) -> bool:
        if self._published is None:
            return True
        return self._agent.updates - self._published >= self._audience.publish_every
