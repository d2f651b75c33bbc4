"""The policy that an agent acts by and exports: its actor, and its normaliser where it has one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from dase_grpc.agent_config import AgentConfig
from dase_grpc.learning.networks import Actor, restore
from dase_grpc.learning.normaliser import Normaliser
from dase_grpc.schema import Array, TransitionSchema

ACTOR: Final = "actor"
NORMALISER: Final = "normaliser"


@dataclass(frozen=True)
class ActorPolicy:
    """π(s) for raw observations: normalise, then the actor."""

    actor: Actor
    normaliser: Normaliser | None

    def actions(self, observation: Tensor) -> Tensor:
        """Actions in [-1, 1]; (B, m) -> (B, n) on the actor's device."""
        seen = observation if self.normaliser is None else self.normaliser.normalise(observation)
        return self.actor.actions(seen)

    @torch.inference_mode()
    def act(self, observation: Array) -> Array:
        """Noise-free actions in [-1, 1]; (B, m) float32 -> (B, n) float32, a new array."""
        weight = self.actor.weight[0]
        actions = self.actions(torch.tensor(observation, dtype=weight.dtype, device=weight.device))
        result: Array = actions.to("cpu", torch.float32).numpy()
        return result

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
    normaliser = Normaliser(schema.observation_size, device) if config.normalise_observations else None
    policy = ActorPolicy(actor, normaliser)
    restore(dict(policy.named_tensors()), policy_tensors(state))
    return policy
