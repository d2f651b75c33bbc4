"""One update of K agents of one kind, by autograd over batched products; K = 1 is one agent.

Each stays an agent of its own, which acts, is saved and is shown as always: its tensors are rows of those
that the stack moves. The equations are `learn` of td3.py and its like. What goes into a network is
(K, B, ...), and with K = 1 it is the reference of passes.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.memory import Flat, StackedMemory
from dase_grpc.learning.agents.networks import Bounds, LateActionCritic, TwinCritic, linear_bounds
from dase_grpc.learning.agents.optimiser import StackedSteps
from dase_grpc.learning.agents.policy import NORMALISER, Normaliser

Layer = tuple[Tensor, Tensor]
"""A batch of weights (…, in, out) and of biases (…, 1, out)."""

C = TypeVar("C")


class _Stacked:
    """A network of K agents, of tensors that already hold the parameters of all."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        count = sum(name.startswith("weight.") for name in parameters)
        self._layers = [
            (parameters[f"weight.{index}"], parameters[f"bias.{index}"]) for index in range(count)
        ]
        self._fixed = [(weight.detach(), bias.detach()) for weight, bias in self._layers]


class StackedActor(_Stacked):
    """π(s); `of` puts the parameters into the form that batched products want."""

    @staticmethod
    def of(name: str, parameter: Tensor) -> Tensor:
        """Views: `weight.k` (K, out, in) as (K, in, out), `bias.k` (K, out) as (K, 1, out)."""
        return parameter.mT if name.startswith("weight") else parameter[:, None]

    def actions(self, observation: Tensor) -> Tensor:
        """Actions in [-1, 1]; (K, B, m) -> (K, B, n)."""
        *inner, (weight, bias) = self._layers
        return torch.tanh(torch.baddbmm(bias, _hidden(inner, observation), weight))


class StackedTwins(_Stacked):
    """Q1 and Q2, 2K networks at once."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._first = [(weight[::2], bias[::2]) for weight, bias in self._fixed]

    @staticmethod
    def of(name: str, parameter: Tensor) -> Tensor:
        """Views: `weight.k` (K, 2, in, out) as (2K, in, out), `bias.k` (K, 2, 1, out) as (2K, 1, out)."""
        return parameter.view(-1, *parameter.shape[2:])

    def both(self, state_action: Tensor) -> Tensor:
        """Both values; (K, B, m + n) -> (2, K, B)."""
        return _both(self._layers, state_action)

    def lowest(self, state_action: Tensor) -> Tensor:
        """min(Q1, Q2) with the parameters held constant, so a gradient reaches the input only; -> (K, B)."""
        return _both(self._fixed, state_action).amin(dim=0)

    def first(self, state_action: Tensor) -> Tensor:
        """Q1 with the parameters held constant, so a gradient reaches the input only; -> (K, B)."""
        *inner, last = self._first
        return _value(_hidden(inner, state_action), last)


class StackedLate(_Stacked):
    """The critics whose action enters at the second layer."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._entry = parameters["action_weight"]

    @staticmethod
    def of(name: str, parameter: Tensor) -> Tensor:
        """Views: weights as they are, `bias.k` (K, out) as (K, 1, out)."""
        return parameter[:, None] if name.startswith("bias") else parameter

    def value(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q(s, a); (K, B, m) and (K, B, n) -> (K, B)."""
        return _late(self._layers, self._entry, observation, action)

    def fixed_value(self, observation: Tensor, action: Tensor) -> Tensor:
        """`value` with the parameters held constant, so a gradient reaches the inputs only."""
        return _late(self._fixed, self._entry.detach(), observation, action)


N = TypeVar("N", StackedActor, StackedTwins, StackedLate)


def of_one(kind: type[N], network: nn.Module) -> N:
    """One agent's network as a stack of one has it; a gradient reaches its own parameters."""
    return kind({name: kind.of(name, value[None]) for name, value in network.named_parameters()})


def _hidden(layers: Sequence[Layer], hidden: Tensor) -> Tensor:
    for weight, bias in layers:
        hidden = torch.relu_(torch.baddbmm(bias, hidden, weight))
    return hidden


def _value(hidden: Tensor, last: Layer) -> Tensor:
    """The one output of each, as a sum: a batched product of width 1 costs 5 % of a whole update more."""
    weight, bias = last
    value: Tensor = torch.linalg.vecdot(hidden, weight.mT) + bias.squeeze(-1)
    return value


def _both(layers: Sequence[Layer], state_action: Tensor) -> Tensor:
    *inner, last = layers
    agents, rows, size = state_action.shape
    twice = state_action[:, None].expand(agents, 2, rows, size).reshape(2 * agents, rows, size)
    return _value(_hidden(inner, twice), last).view(agents, 2, rows).transpose(0, 1)


def _late(layers: Sequence[Layer], entry: Tensor, observation: Tensor, action: Tensor) -> Tensor:
    (weight, bias), *others = layers
    linear = torch.baddbmm(bias, observation, weight)
    for index, (weight, bias) in enumerate(others):
        given = torch.baddbmm(bias, action, entry) if index == 0 else bias
        linear = torch.baddbmm(given, torch.relu_(linear), weight)
    return linear.squeeze(-1)


@dataclass(frozen=True)
class Networks(Generic[C]):
    """The networks of an update, and how they learn; without a target actor, the actor is in its place."""

    config: AgentConfig
    actor: StackedActor
    critic: C
    target_actor: StackedActor
    target_critic: C


@dataclass(frozen=True)
class Moves:
    """What an update moves, for those agents whose turn it is.

    critic and actor take one step down each of the (K,) losses, and give them without their graph; follow
    moves the target networks. with_actor: whether it is any actor's turn.
    """

    critic: Callable[[Tensor], Tensor]
    actor: Callable[[Tensor], Tensor]
    follow: Callable[[], None]
    with_actor: bool


Learn = Callable[[Networks[Any], Moves, Batch, Tensor, Sequence[Tensor]], Mapping[str, Tensor]]
"""One algorithm's update by autograd: networks, moves, batch, share, noise.

Moves the networks; returns the losses of `ActorCritic.update`, (K,) each. The batch is as the networks see
it, share (K, B) is w / Σ w, noise what the update draws, (K, B, n) each and not clipped yet.
"""


@dataclass(frozen=True)
class Kind:
    """What tells one algorithm from another: its update by autograd, its critics, how its networks start.

    The critics are `network` of one agent, and `critic` of a stack.
    """

    learn: Learn
    network: type[TwinCritic] | type[LateActionCritic]
    critic: type[StackedTwins] | type[StackedLate]
    bounds: Bounds = linear_bounds
    target_actor: bool = True


class _Network:
    """One network of all agents: the parameters in the form of batched products, and their gradients'."""

    def __init__(self, flat: Flat, memory: StackedMemory, form: Callable[[str, Tensor], Tensor]) -> None:
        self.held = memory.under(flat.name)
        self.leaves = {
            part: form(part, tensor).detach().requires_grad_(flat.name in ("actor", "critic"))
            for part, tensor in flat.named(self.held["values"])
        }
        self._places = [form(part, tensor) for part, tensor in flat.named(self.held["gradient"])]

    def steps(self, **rates: float) -> StackedSteps:
        return StackedSteps(self.held, list(self.leaves.values()), self._places, **rates)


class Stack:
    """What K agents learn at once; only it may update them. Owned by one thread.

    All is tensor work on the agents' device that never waits for it and may be recorded (graphs.py).
    `flats` are the networks of one of them, by name; all have the same ones, in `memory`.
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
        self._networks = Networks(
            config,
            actor,
            kind.critic(networks["critic"].leaves),
            StackedActor(networks["target_actor"].leaves) if kind.target_actor else actor,
            kind.critic(networks["target_critic"].leaves),
        )
        decay = config.critic_weight_decay
        self._actor_steps = networks["actor"].steps(lr=config.actor_lr)
        self._critic_steps = networks["critic"].steps(lr=config.critic_lr, weight_decay=decay)
        self._followed = [
            (network.held["values"], networks[name.removeprefix("target_")].held["values"])
            for name, network in networks.items()
            if name.startswith("target_")
        ]
        normaliser = memory.under(NORMALISER)
        self._normaliser = Normaliser(**normaliser) if normaliser else None

    @torch.no_grad()
    def policy_actions(self, observation: Tensor) -> Tensor:
        """Each agent's π(s) for observations of its own; (K, B, m) -> (K, B, n), without gradient."""
        seen = observation if self._normaliser is None else self._normaliser.normalise(observation)
        return self._actor.actions(seen)

    def learn(
        self, batch: Batch, weight: Tensor, noise: Sequence[Tensor], *, live: Tensor, moves: Tensor | None
    ) -> Mapping[str, Tensor]:
        """The tensor work of one update of each agent for which `live` is true.

        batch is (K, B, ...), weight (K, B), noise what the update of one agent draws, (K, B, n) each; of an
        agent that is not live they may be anything, of one that is, weights do not sum to 0. live and moves
        are (K,) bool; moves tells which move their actor too, None that none does.

        Returns the losses of `ActorCritic.update`, (K,) each, those of live agents alone meaning anything.
        """
        acting = live if moves is None else live & moves
        turns = Moves(
            partial(self._critic_steps.minimise, live=live),
            partial(self._actor_steps.minimise, live=acting),
            partial(self._follow, acting),
            with_actor=moves is not None,
        )
        if self._normaliser is not None:
            batch = self._normaliser.learned(batch, weight, live=live)
        share = weight / weight.sum(-1, keepdim=True)
        return self._learn(self._networks, turns, batch, share, noise)

    @torch.no_grad()
    def _follow(self, live: Tensor) -> None:
        for target, online in self._followed:
            target.lerp_(online, self._config.tau * live[:, None].to(target.dtype))
