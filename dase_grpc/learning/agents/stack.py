"""K agents of one kind that learn at once: one update by autograd over batched products.

Each stays an agent of its own, which acts, is saved and is shown as always: its tensors are rows of those
that the stack moves. The equations are those of one agent's update by autograd, td3.py and its like.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents import ddpg, sac, td3
from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.batched import StackedActor, StackedLate, StackedTwins
from dase_grpc.learning.agents.equations import Learn, Moves, Networks
from dase_grpc.learning.agents.memory import StackedMemory
from dase_grpc.learning.agents.normaliser import Normaliser
from dase_grpc.learning.agents.optimiser import StackedSteps


@dataclass(frozen=True)
class _Kind:
    learn: Learn[Any]
    critic: type[StackedTwins | StackedLate]


KINDS: Final[Mapping[str, _Kind]] = {
    "td3": _Kind(td3.learn, StackedTwins),
    "sac": _Kind(sac.learn, StackedTwins),
    "ddpg": _Kind(ddpg.learn, StackedLate),
}


class _Network:
    """One network of all agents: the parameters in the form of batched products, and their gradients'."""

    def __init__(
        self, agents: Sequence[ActorCritic], memory: StackedMemory, name: str, form: Callable[..., Tensor]
    ) -> None:
        self.held = {
            key.removeprefix(f"{name}."): tensor
            for key, tensor in memory.held.items()
            if key.startswith(f"{name}.")
        }
        flat = agents[0].flats[name]
        self.leaves = {
            part: form(part, tensor).detach().requires_grad_(name in ("actor", "critic"))
            for part, tensor in flat.named(self.held["values"])
        }
        self.places = [form(part, tensor) for part, tensor in flat.named(self.held["gradient"])]

    def steps(self, *, lr: float, weight_decay: float = 0.0) -> StackedSteps:
        return StackedSteps(
            self.held, list(self.leaves.values()), self.places, lr=lr, weight_decay=weight_decay
        )


class Stack:
    """What K agents learn at once; only it may update them. Owned by one thread.

    All is tensor work on the agents' device that never waits for it and may be recorded (graphs.py).

    Args:
        agents: made with `memory.of(0)`, `memory.of(1)`, ..., all of `config`.
        config: how each of them learns.
        memory: of as many agents.
    """

    def __init__(self, agents: Sequence[ActorCritic], config: AgentConfig, memory: StackedMemory) -> None:
        self._config = config
        kind = KINDS[config.algorithm]
        self._learn = kind.learn
        forms = {"actor": StackedActor, "critic": kind.critic}
        networks = {
            name: _Network(agents, memory, name, forms[name.removeprefix("target_")].of)
            for name in agents[0].flats
        }
        actor = self._actor = StackedActor(networks["actor"].leaves)
        follows = networks.get("target_actor")
        self._networks = Networks(
            actor,
            kind.critic(networks["critic"].leaves),
            actor if follows is None else StackedActor(follows.leaves),
            kind.critic(networks["target_critic"].leaves),
        )
        self._actor_steps = networks["actor"].steps(lr=config.actor_lr)
        self._critic_steps = networks["critic"].steps(
            lr=config.critic_lr, weight_decay=config.critic_weight_decay
        )
        self._followed = [
            (network.held["values"], networks[name.removeprefix("target_")].held["values"])
            for name, network in networks.items()
            if name.startswith("target_")
        ]
        self._normaliser: Normaliser | None = None
        if config.normalise_observations:
            self._normaliser = Normaliser.stacked(memory.held)

    @torch.no_grad()
    def policy_actions(self, observation: Tensor) -> Tensor:
        """Each agent's π(s) for observations of its own; (K, B, m) -> (K, B, n), without gradient."""
        return self._actor.actions(self._as_seen(observation))

    def learn(
        self, batch: Batch, weight: Tensor, noise: Sequence[Tensor], *, live: Tensor, moves: Tensor | None
    ) -> Mapping[str, Tensor]:
        """The tensor work of one update of each agent for which `live` is true.

        Args:
            batch: a batch for each, (K, B, ...); of an agent that is not live it may hold anything.
            weight: (K, B); a live agent's does not sum to 0.
            noise: what the update of one agent draws, (K, B, n) each.
            live: (K,) bool.
            moves: (K,) bool, which of them move their actor too; None where none does.

        Returns the losses of `ActorCritic.update`, (K,) each, those of live agents alone meaning anything.
        """
        acting = None if moves is None else live & moves
        turns = Moves(
            _Turn(self._critic_steps, live),
            _Turn(self._actor_steps, live if acting is None else acting),
            partial(self._follow, live if acting is None else acting),
            with_actor=acting is not None,
        )
        seen = self._seen(batch, weight, live)
        share = weight / weight.sum(-1, keepdim=True)
        return self._learn(self._networks, turns, seen, share, noise, config=self._config)

    @torch.no_grad()
    def _follow(self, live: Tensor) -> None:
        for target, online in self._followed:
            target.lerp_(online, self._config.tau * live[:, None].to(target.dtype))

    def _as_seen(self, observation: Tensor) -> Tensor:
        return observation if self._normaliser is None else self._normaliser.normalise(observation)

    def _seen(self, batch: Batch, weight: Tensor, live: Tensor) -> Batch:
        if self._normaliser is None:
            return batch
        self._normaliser.learn(batch.observation, weight, live=live)
        return batch.seen_by(self._normaliser.normalise)


@dataclass(frozen=True)
class _Turn:
    """Steps of those agents alone whose turn it is."""

    steps: StackedSteps
    live: Tensor

    def minimise(self, loss: Tensor) -> Tensor:
        return self.steps.minimise(loss, live=self.live)
