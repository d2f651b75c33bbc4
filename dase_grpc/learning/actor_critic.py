"""What the deterministic actor-critics share: acting, optimisers, target networks, saving; two equations.

Both losses of each algorithm are means over the batch weighted by w, as DASE has them (Saglam et al.
2022, arXiv 2207.13453); with w = 1 they are the algorithm's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from dase_grpc.agent_config import AgentConfig
from dase_grpc.learning.batch import Batch
from dase_grpc.learning.guard import GuardedSteps, Steps
from dase_grpc.learning.networks import Actor, restore
from dase_grpc.learning.noise import NoiseStream
from dase_grpc.learning.normaliser import Normaliser
from dase_grpc.learning.policy import ActorPolicy
from dase_grpc.schema import Array
from dase_grpc.seeding import Purpose, integer

UPDATES: Final = "updates"
NOISE_STATE: Final = "target_noise.generator"


def bellman(batch: Batch, next_value: Tensor, *, config: AgentConfig) -> Tensor:
    """The target y = scale · r + γ · bootstrap · V(s'); next_value and result are (B,)."""
    return config.reward_scale * batch.reward + config.gamma * batch.bootstrap * next_value


def critic_loss(values: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """Σ share · (Q − y)², summed over the critics.

    values is (B,), or (2, B) for twins; target (B,); share (B,) is w / Σ w.
    """
    return ((values - target).square() @ share).sum()


class ActorCritic(ABC):
    """An `Agent` but for its networks and its update, which a subclass brings.

    Owned by one thread. Networks come from the run's seed and the agent's id, the same bits on
    every device; torch's global random state is neither read nor changed. Every tensor of the
    state is updated in place for as long as the agent lives.

    Args:
        targets: the networks that follow "actor", "critic" or both, by the name of whom they follow.
        noise: where the update draws from, if it does.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        actor: Actor,
        critic: nn.Module,
        targets: Mapping[str, nn.Module],
        noise: NoiseStream | None = None,
    ) -> None:
        self._config = config
        self._noise = noise
        first = actor.weight[0]
        self._normaliser = Normaliser(first.shape[1], first.device) if config.normalise_observations else None
        self._policy = ActorPolicy(actor, self._normaliser)
        online: dict[str, nn.Module] = {"actor": actor, "critic": critic}
        self._online: list[Tensor] = [p for name in targets for p in online[name].parameters()]
        self._targets: list[Tensor] = [p for network in targets.values() for p in network.parameters()]
        self._actor_optimizer = adam(actor.parameters(), lr=config.actor_lr)
        self._critic_optimizer = adam(
            critic.parameters(), lr=config.critic_lr, weight_decay=config.critic_weight_decay
        )
        self._actor_steps = GuardedSteps(self._actor_optimizer)
        self._critic_steps = GuardedSteps(self._critic_optimizer)
        self._updates = 0
        self._tensors = dict(self._policy.named_tensors())
        for name, network in (("critic", critic), *((f"target_{name}", n) for name, n in targets.items())):
            self._tensors |= network.named_parameters(prefix=name)
        self._tensors |= optimizer_tensors("actor_optimizer", actor, self._actor_optimizer)
        self._tensors |= optimizer_tensors("critic_optimizer", critic, self._critic_optimizer)

    @property
    def updates(self) -> int:
        """Training iterations done so far; also the version of the current policy."""
        return self._updates

    def act(self, observation: Array) -> Array:
        """Noise-free actions in [-1, 1]; (B, m) float32 -> (B, n) float32, a new array."""
        return self._policy.act(observation)

    @torch.no_grad()
    def policy_actions(self, observation: Tensor) -> Tensor:
        """π(s) for (B, m) observations on the agent's device, (B, n) in [-1, 1], without gradient."""
        return self._policy.actions(observation)

    @property
    def policy(self) -> ActorPolicy:
        """The policy being trained: the network itself, whose actions have gradients."""
        return self._policy

    @property
    def judgement(self) -> dict[str, Tensor]:
        """What another needs to act like this agent and to value states like it, the tensors themselves.

        actor.*, critic.* and normaliser.* under their names in `state_dict`.
        """
        parts = ("actor", "critic", "normaliser")
        return {name: tensor for name, tensor in self._tensors.items() if name.split(".")[0] in parts}

    @torch.no_grad()
    def value(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q(s, a) as the actor's loss has it, but in the environment's rewards; without gradient.

        observation is (B, m), raw; action (B, n); the result (B,).
        """
        seen = observation if self._normaliser is None else self._normaliser.normalise(observation)
        return self._q(seen, action) / self._config.reward_scale

    @abstractmethod
    def _q(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q(s, a) as the actor's loss has it, the critic's parameters held constant; (B,)."""

    @abstractmethod
    def update(self, batch: Batch, weight: Tensor) -> Mapping[str, Tensor]:
        """One training iteration; weight is (B,) and does not sum to 0.

        Returns critic_loss, q_mean (the weighted mean of the first critic) and, when the actor was
        updated, actor_loss: scalars that stay on the device. Never synchronises with the host.
        """

    def take_steps(self) -> dict[str, Steps]:
        """The optimisers' steps since the last call, by network; waits for the device."""
        return {"critic": self._critic_steps.take(), "actor": self._actor_steps.take()}

    def state_dict(self) -> dict[str, Tensor]:
        """Everything training goes on from, as copies under flat, dotted names.

        actor.*, critic.*, target_*.*, actor_optimizer.*, critic_optimizer.*, the number of updates and,
        where the algorithm has them, normaliser.* and the state of the noise generator.
        """
        state = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        state[UPDATES] = torch.tensor(self._updates)
        if self._noise is not None:
            state[NOISE_STATE] = self._noise.state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave; further updates are bit for bit those of the saved agent.

        Between kinds of device (CPU, CUDA) only the noise cannot go on, for their generators have
        nothing in common: it starts a new stream that the seed and the number of updates decide.

        Raises:
            KeyError: a name is missing.
            ValueError: a name too many, or a value of another shape or dtype; nothing is changed.
        """
        updates = torch.zeros((), dtype=torch.int64)
        if self._noise is None:
            restore({**self._tensors, UPDATES: updates}, state)
        else:
            noise = self._noise.room_for(state.get(NOISE_STATE))
            restore({**self._tensors, UPDATES: updates, NOISE_STATE: noise}, state)
            self._noise.resume(noise, updates=int(updates))
        self._updates = int(updates)

    def _seen(self, batch: Batch, weight: Tensor) -> Batch:
        """The batch as the networks see it; the normaliser, if there is one, learns from it first.

        Normalised observations are new tensors: the rows stay raw.
        """
        if self._normaliser is None:
            return batch
        self._normaliser.learn(batch.observation, weight)
        observation = self._normaliser.normalise(batch.observation)
        return replace(
            batch,
            observation=observation,
            state_action=torch.cat((observation, batch.action), dim=1),
            next_observation=self._normaliser.normalise(batch.next_observation),
        )

    @torch.no_grad()
    def _follow(self) -> None:
        """Target networks: θ' ← τ θ + (1 − τ) θ'."""
        torch._foreach_lerp_(self._targets, self._online, self._config.tau)


def network_generator(seed: int, agent_id: int) -> torch.Generator:
    """What an agent's initial networks are drawn from."""
    return torch.Generator().manual_seed(integer(seed, Purpose.NETWORKS, agent_id))


def adam(parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float = 0.0) -> torch.optim.Adam:
    """Adam whose state exists before the first step, so that every state has the same names.

    Weight decay is the L2 term's gradient, added before the moments, on weights and biases.
    """
    optimizer = torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay, fused=True)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def optimizer_tensors(
    name: str, network: nn.Module, optimizer: torch.optim.Adam
) -> Iterator[tuple[str, Tensor]]:
    """Adam's state as `name`.<parameter>.<moment or step>, the tensors themselves."""
    for parameter_name, parameter in network.named_parameters(prefix=name):
        for key, value in optimizer.state[parameter].items():
            yield f"{parameter_name}.{key}", value
