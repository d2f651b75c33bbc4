"""TD3: twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dase_grpc.agent_config import AgentConfig
from dase_grpc.learning.actor_critic import ActorCritic, bellman, critic_loss, network_generator
from dase_grpc.learning.batch import Batch
from dase_grpc.learning.networks import Actor, TwinCritic
from dase_grpc.learning.noise import NoiseStream, perturbed
from dase_grpc.schema import TransitionSchema


@torch.no_grad()
def target_value(
    actor: Actor, critic: TwinCritic, batch: Batch, noise: Tensor, *, config: AgentConfig
) -> Tensor:
    """The target y = scale · r + γ · bootstrap · min(Q1', Q2')(s', clip(π'(s') + clip(ε, ±c), ±1)); (B,).

    actor and critic are the target networks; noise ε is (B, n) and not clipped yet.
    """
    action = perturbed(actor.actions(batch.next_observation), noise, limit=config.target_noise_clip)
    both = critic.both(torch.cat((batch.next_observation, action), dim=1))
    return bellman(batch, both.amin(dim=0), config=config)


def actor_loss(actor: Actor, critic: TwinCritic, observation: Tensor, share: Tensor) -> Tensor:
    """−Σ share · Q1(s, π(s)); a gradient reaches the actor only."""
    action = actor.actions(observation)
    return -(critic.first(torch.cat((observation, action), dim=1)) @ share)


class TD3(ActorCritic):
    """An `Agent` that learns by TD3."""

    def __init__(
        self,
        config: AgentConfig,
        schema: TransitionSchema,
        *,
        seed: int,
        agent_id: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        start = network_generator(seed, agent_id)
        m, n = schema.observation_size, schema.action_size
        self._actor = Actor((m, *config.hidden, n), start, device=device, dtype=dtype)
        self._critic = TwinCritic((m + n, *config.hidden, 1), start, device=device, dtype=dtype)
        self._target_actor = self._actor.frozen_copy()
        self._target_critic = self._critic.frozen_copy()
        self._stream = NoiseStream(seed, agent_id, device)
        super().__init__(
            config,
            actor=self._actor,
            critic=self._critic,
            targets={"actor": self._target_actor, "critic": self._target_critic},
            noise=self._stream,
        )

    def _q(self, observation: Tensor, action: Tensor) -> Tensor:
        return self._critic.first(torch.cat((observation, action), dim=1))

    def update(self, batch: Batch, weight: Tensor) -> Mapping[str, Tensor]:
        """One training iteration, as `ActorCritic.update` promises; the actor's is every `policy_delay`th."""
        return self.update_with(batch, weight, self._stream.normal(batch.action, self._config.target_noise))

    def update_with(self, batch: Batch, weight: Tensor, noise: Tensor) -> Mapping[str, Tensor]:
        """`update` with the target's smoothing noise (B, n) given, not clipped yet."""
        config = self._config
        share = weight / weight.sum()
        batch = self._seen(batch, weight)

        target = target_value(self._target_actor, self._target_critic, batch, noise, config=config)
        both = self._critic.both(batch.state_action)
        loss = self._critic_steps.minimise(critic_loss(both, target, share))
        losses = {"critic_loss": loss, "q_mean": both.detach()[0] @ share}

        self._updates += 1
        if self._updates % config.policy_delay == 0:
            loss = actor_loss(self._actor, self._critic, batch.observation, share)
            losses["actor_loss"] = self._actor_steps.minimise(loss)
            self._follow()
        return losses
