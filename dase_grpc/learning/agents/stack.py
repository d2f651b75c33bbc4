"""One update of K agents of one kind, by autograd over batched products; K = 1 is one agent.

Each stays an agent of its own, which acts, is saved and is shown as always: its tensors are rows of those
that the stack moves. The equations are `learn` of td3.py and its like.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.batched import StackedActor, StackedLate, StackedTwins
from dase_grpc.learning.agents.memory import StackedMemory
from dase_grpc.learning.agents.normaliser import Normaliser
from dase_grpc.learning.agents.optimiser import Flat, StackedSteps

C = TypeVar("C")


@dataclass(frozen=True)
class Networks(Generic[C]):
    """The networks of an update; those of an algorithm without a target actor have the actor."""

    actor: StackedActor
    critic: C
    target_actor: StackedActor
    target_critic: C


@dataclass(frozen=True)
class Moves:
    """What an update moves, for those agents whose turn it is.

    Attributes:
        critic, actor: one step down each of the (K,) losses; gives them without their graph.
        follow: moves the target networks.
        with_actor: whether it is any actor's turn.
    """

    critic: Callable[[Tensor], Tensor]
    actor: Callable[[Tensor], Tensor]
    follow: Callable[[], None]
    with_actor: bool


class Learn(Protocol):
    """One algorithm's update by autograd."""

    def __call__(
        self,
        networks: Networks[Any],
        moves: Moves,
        batch: Batch,
        share: Tensor,
        noise: Sequence[Tensor],
        *,
        config: AgentConfig,
    ) -> Mapping[str, Tensor]:
        """Moves the networks; returns the losses of `ActorCritic.update`, (K,) each.

        batch is as the networks see it, share (K, B) is w / Σ w, noise what the update draws, (K, B, n) each
        and not clipped yet.
        """
        ...


@dataclass(frozen=True)
class Kind:
    """What tells one algorithm's update by autograd from another's."""

    learn: Learn
    critic: type[StackedTwins] | type[StackedLate]


class _Network:
    """One network of all agents: the parameters in the form of batched products, and their gradients'."""

    def __init__(self, flat: Flat, memory: StackedMemory, form: Callable[[str, Tensor], Tensor]) -> None:
        name = flat.name
        self.held = {
            key.removeprefix(f"{name}."): tensor
            for key, tensor in memory.held.items()
            if key.startswith(f"{name}.")
        }
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
        kind: of algorithm.
        flats: the networks of one of them, by name; all have the same ones, in `memory`.
        config: how each of them learns.
        memory: what the agents were made with.
    """

    def __init__(
        self, kind: Kind, flats: Mapping[str, Flat], *, config: AgentConfig, memory: StackedMemory
    ) -> None:
        self._config = config
        self._learn = kind.learn
        forms = {"actor": StackedActor, "critic": kind.critic}
        networks = {
            name: _Network(flat, memory, forms[name.removeprefix("target_")].of)
            for name, flat in flats.items()
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
        acting = live if moves is None else live & moves
        turns = Moves(
            partial(self._critic_steps.minimise, live=live),
            partial(self._actor_steps.minimise, live=acting),
            partial(self._follow, acting),
            with_actor=moves is not None,
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
