"""The policy that an agent acts by and publishes, and what it sees of those of its peers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.networks import Actor, restore
from dase_grpc.learning.agents.normaliser import Normaliser
from dase_grpc.schema import Array, TransitionSchema

ACTOR: Final = "actor"
NORMALISER: Final = "normaliser"


class ActorPolicy:
    """π(s) for raw observations: normalise, then the actor.

    On a CPU `act` is plain NumPy over the actor's memory, which has to stay where it is: 2 µs a layer for a
    single observation, where torch takes 8.
    """

    def __init__(self, actor: Actor, normaliser: Normaliser | None) -> None:
        self.actor = actor
        self.normaliser = normaliser
        layers = zip(actor.weight, actor.bias, strict=True)
        self._on_cpu = actor.weight[0].device.type == "cpu"
        self._layers = [(w.detach().numpy().T, b.detach().numpy()) for w, b in layers] if self._on_cpu else []

    def actions(self, observation: Tensor) -> Tensor:
        """Actions in [-1, 1]; (B, m) -> (B, n) on the actor's device."""
        seen = observation if self.normaliser is None else self.normaliser.normalise(observation)
        return self.actor.actions(seen)

    @torch.inference_mode()
    def act(self, observation: Array) -> Array:
        """Noise-free actions in [-1, 1]; (B, m) float32 -> (B, n) float32, a new array."""
        if not self._on_cpu:
            first = self.actor.weight[0]
            actions = self.actions(torch.tensor(observation, dtype=first.dtype, device=first.device))
            return cast("Array", actions.to("cpu", torch.float32).numpy())
        return self._act_on_cpu(observation)

    def _act_on_cpu(self, observation: Array) -> Array:
        *inner, (last_weight, last_bias) = self._layers
        hidden = observation.astype(last_bias.dtype)
        if self.normaliser is not None:
            hidden = self.normaliser.normalise(torch.from_numpy(hidden)).numpy()
        with np.errstate(all="ignore"):  # as in torch: what is not finite shows in the action
            for weight, bias in inner:
                hidden = hidden @ weight
                hidden += bias
                np.maximum(hidden, 0, out=hidden)
            actions: Array = np.tanh(hidden @ last_weight + last_bias)
        return actions.astype(np.float32, copy=False)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What the policy is made of, under the names it has in an agent's state: actor.*, normaliser.*."""
        yield from self.actor.named_parameters(prefix=ACTOR)
        if self.normaliser is not None:
            yield from self.normaliser.named_tensors(NORMALISER)


def policy_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an agent's state that its policy needs, which is what is published."""
    return {name: value for name, value in state.items() if name.split(".")[0] in (ACTOR, NORMALISER)}


def load_policy(
    config: AgentConfig, schema: TransitionSchema, state: Mapping[str, Any], device: torch.device
) -> ActorPolicy:
    """The policy alone, from the `policy_tensors` of an agent's state; other names are ignored.

    Raises:
        KeyError: a tensor of the policy is missing.
        ValueError: one too many, or one of another shape or dtype.
    """
    sizes = (schema.observation_size, *config.hidden, schema.action_size)
    actor = Actor(sizes, torch.Generator(), device=device, dtype=torch.float32).requires_grad_(False)
    normaliser = Normaliser.new(schema.observation_size, device) if config.normalise_observations else None
    policy = ActorPolicy(actor, normaliser)
    restore(dict(policy.named_tensors()), policy_tensors(state))
    return policy


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
