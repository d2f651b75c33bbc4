"""The policy that an agent acts by and publishes, what it sees through, and the policies of its peers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, Self, cast

import numpy as np
import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.memory import OWN, Flat, Memory, overwrite
from dase_grpc.learning.agents.networks import Actor, Sizes, Start
from dase_grpc.schema import Array, TransitionSchema

ACTOR: Final = "actor"
NORMALISER: Final = "normaliser"

CLIP: Final = 5.0
MIN_DEVIATION: Final = 0.1


class Normaliser:
    """Mean and variance of each observation dimension, float64 on the agent's device; or those of a stack.

    Only DDPG's preset uses one. The paper's table asks DDPG for normalised observations and says no more, and
    the released code has none. The numbers are those of OpenAI Baselines' DDPG: z is clipped at ±5 and no
    standard deviation counts as less than 0.1. Why the statistics come from batches: docs/algorithms.md.

    Each update counts as much as any other, and within one the rows count by their weights, as they do
    in the losses; so a row of weight 0 leaves no trace, and only the ratios of the weights matter.
    Before the first update observations are merely clipped. Never synchronises with the host.

    It writes its tensors in place, float64: mean (m,), variance (m,), count (); of a stack with K in front.
    """

    def __init__(self, *, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        self._mean, self._variance, self._count = mean, variance, count

    @classmethod
    def new(cls, size: int, device: torch.device, *, memory: Memory = OWN) -> Self:
        """That of an agent that has not learned anything yet."""
        room = partial(memory.zeros, dtype=torch.float64, device=device)
        shapes = {"mean": (size,), "variance": (size,), "count": ()}
        held = {name: room(f"{NORMALISER}.{name}", shape) for name, shape in shapes.items()}
        held["variance"].fill_(1)
        return cls(**held)

    @torch.no_grad()
    def learn(self, observation: Tensor, weight: Tensor, *, live: Tensor | None = None) -> None:
        """Takes one batch in: observation (B, m), weight (B,), which does not sum to 0.

        Welford's update in parallel form (Chan, Golub & LeVeque 1983), on weighted moments. Of a stack, those
        agents learn for whom `live` is true, (K,) bool.
        """
        share = weight.double()
        share = share / share.sum(-1, keepdim=True)
        x = observation.double()
        mean = _mean(share, x)
        variance = _mean(share, (x - mean[..., None, :]).square())
        count = self._count + 1
        rate = (1 / count)[..., None]
        shift = mean - self._mean
        new_mean = self._mean + rate * shift
        new_variance = (self._variance + rate * shift.square()).lerp_(variance, rate)
        overwrite(self._count, count, live=live)
        overwrite(self._mean, new_mean, live=live)
        overwrite(self._variance, new_variance, live=live)

    def learned(self, batch: Batch, weight: Tensor, *, live: Tensor | None = None) -> Batch:
        """The batch as the networks see it, once this has learned from it."""
        self.learn(batch.observation, weight, live=live)
        return batch.seen_by(self.normalise)

    def normalise(self, observation: Tensor) -> Tensor:
        """clip((s − mean) / max(deviation, 0.1), ±5); (B, m) -> (B, m), a new tensor of the same dtype."""
        deviation = self._variance.sqrt().clamp_(min=MIN_DEVIATION)
        z: Tensor = (observation - self._mean[..., None, :]).div_(deviation[..., None, :]).clamp_(-CLIP, CLIP)
        return z.to(observation.dtype)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that is to be saved."""
        for name in ("mean", "variance", "count"):
            yield f"{NORMALISER}.{name}", getattr(self, f"_{name}")


def _mean(share: Tensor, x: Tensor) -> Tensor:
    """Σ share · x over the rows; (B,) and (B, m), or (K, B) and (K, B, m)."""
    return share @ x if share.ndim == 1 else (share[:, None] @ x)[:, 0]


class ActorPolicy:
    """π(s) for raw observations: normalise, then the actor, whose parameters `flat` holds.

    On a CPU `act` is plain NumPy over the actor's memory, which has to stay where it is: 2 µs a layer for a
    single observation, where torch takes 8.
    """

    def __init__(self, actor: Actor, flat: Flat, normaliser: Normaliser | None = None) -> None:
        self.actor = actor
        self.flat = flat
        self.normaliser = normaliser
        layers = zip(actor.weight, actor.bias, strict=True)
        self._on_cpu = flat.values.device.type == "cpu"
        self._layers = [(w.detach().numpy().T, b.detach().numpy()) for w, b in layers] if self._on_cpu else []

    @classmethod
    def empty(
        cls, config: AgentConfig, schema: TransitionSchema, device: torch.device, *, memory: Memory = OWN
    ) -> Self:
        """One like those of agents with this configuration, for a policy to be copied into."""
        actor = Actor(Sizes.of(config, schema), Start(torch.Generator(), device)).requires_grad_(False)
        flat, normaliser = Flat(actor, name=ACTOR, memory=memory), None
        if config.normalise_observations:
            normaliser = Normaliser.new(schema.observation_size, device, memory=memory)
        return cls(actor, flat, normaliser)

    def actions(self, observation: Tensor) -> Tensor:
        """Actions in [-1, 1]; (B, m) -> (B, n) on the actor's device."""
        seen = observation if self.normaliser is None else self.normaliser.normalise(observation)
        return self.actor.actions(seen)

    @torch.inference_mode()
    def act(self, observation: Array) -> Array:
        """Noise-free actions in [-1, 1]; (B, m) float32 -> (B, n) float32, a new array."""
        if not self._on_cpu:
            values = self.flat.values
            actions = self.actions(torch.tensor(observation, dtype=values.dtype, device=values.device))
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
            yield from self.normaliser.named_tensors()

    def whole_tensors(self) -> list[Tensor]:
        """The same in as few tensors as there are, the actor's parameters in one."""
        seen_through = () if self.normaliser is None else self.normaliser.named_tensors()
        return [self.flat.values, *(tensor for _, tensor in seen_through)]


def policy_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an agent's state that its policy needs, which is what is published."""
    return {name: value for name, value in state.items() if name.split(".")[0] in (ACTOR, NORMALISER)}


@dataclass(frozen=True)
class Published:
    """A policy as it was after `version` iterations; its tensors, on the CPU, are nobody's to change."""

    version: int
    tensors: Mapping[str, Tensor]


class PeerPolicies(Protocol):
    """One agent's view of the policies of a run; for the thread that trains the agent."""

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Shows this agent's policy to the others, as copies on the CPU; a later one takes its place.

        Waits for the tensors' device and for nobody else. The version last published changes nothing.

        Raises:
            ValueError: the version is lower than one published before.
        """
        ...

    def latest(self, agent_id: int) -> Published | None:
        """The newest policy of another agent that has come here, None before the first.

        Never waits. Until a newer one has come it is the same object. A peer that started again may come
        back with a lower version.

        Raises:
            DaseError: what the other agent published is not a policy; in one sentence.
        """
        ...
