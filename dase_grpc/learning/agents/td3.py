"""TD3: twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.equations import (
    TD_ERROR,
    bellman,
    critic_gradient,
    critic_loss,
    mean,
    perturbed,
    td_error,
)
from dase_grpc.learning.agents.networks import TwinCritic
from dase_grpc.learning.agents.passes import ActorPass, TwinPass
from dase_grpc.learning.agents.stack import Kind, Moves, Networks, StackedActor, StackedTwins

Actors = ActorPass | StackedActor
Twins = TwinPass | StackedTwins


@torch.no_grad()
def target_value(actor: Actors, critic: Twins, batch: Batch, noise: Tensor, *, config: AgentConfig) -> Tensor:
    """The target y = scale · r + γ · bootstrap · min(Q1', Q2')(s', clip(π'(s') + clip(ε, ±c), ±1)); (B,).

    actor and critic are the target networks; noise ε is (B, n) and not clipped yet.
    """
    action = perturbed(actor.actions(batch.next_observation), noise, limit=config.target_noise_clip)
    lowest = critic.lowest(torch.cat((batch.next_observation, action), dim=-1))
    return bellman(batch, lowest, config=config)


def actor_loss(actor: StackedActor, critic: StackedTwins, observation: Tensor, share: Tensor) -> Tensor:
    """−Σ share · Q1(s, π(s)); a gradient reaches the actor only."""
    action = actor.actions(observation)
    return -mean(critic.first(torch.cat((observation, action), dim=-1)), share)


def learn(
    networks: Networks[StackedTwins], moves: Moves, batch: Batch, share: Tensor, noise: Sequence[Tensor]
) -> Mapping[str, Tensor]:
    """One update by autograd; see stack.Learn."""
    target = target_value(
        networks.target_actor, networks.target_critic, batch, *noise, config=networks.config
    )
    both = networks.critic.both(batch.state_action)
    loss = moves.critic(critic_loss(both, target, share))
    losses = {"critic_loss": loss, "q_mean": mean(both.detach()[0], share), TD_ERROR: td_error(both, target)}
    if moves.with_actor:
        loss = actor_loss(networks.actor, networks.critic, batch.observation, share)
        losses["actor_loss"] = moves.actor(loss)
        moves.follow()
    return losses


class TD3(ActorCritic):
    """An `Agent` that learns by TD3."""

    kind = Kind(learn, TwinCritic, StackedTwins)
    _critic: TwinCritic
    _target_critic: TwinCritic

    def _write_out(self) -> None:
        self._exact_critic = TwinPass(self._critic, self._room)
        self._critic_pass = TwinPass(self._critic, self._room, products=self._products)
        self._target_critic_pass = TwinPass(self._target_critic, self._room, products=self._products)

    @property
    def _noise_scales(self) -> tuple[float, ...]:
        return (self.config.target_noise,)

    def _q(self, observation: Tensor, action: Tensor) -> Tensor:
        return self._exact_critic.first.value(torch.cat((observation, action), dim=-1))

    def _moves_actor(self, update: int) -> bool:
        return update % self.config.policy_delay == 0

    def _learn(
        self, batch: Batch, share: Tensor, policy: Callable[[], Tensor], *noise: Tensor
    ) -> Mapping[str, Tensor]:
        target = target_value(
            self._target_actor_pass, self._target_critic_pass, batch, *noise, config=self.config
        )
        critic = self._critic_pass
        both = critic.learn(batch.state_action, partial(critic_gradient, target=target, share=share))
        losses = {"critic_loss": critic_loss(both, target, share), "q_mean": both[0] @ share}
        losses |= self._errors(both, target)
        self._critic_steps.step(losses["critic_loss"])

        if self._moves_actor(self.updates):
            action = policy()
            value = critic.first.value(torch.cat((batch.observation, action), dim=-1))
            self._actor_pass.backward(critic.first.action_gradient(-share, action.shape[1]))
            losses["actor_loss"] = -(value @ share)
            self._actor_steps.step(losses["actor_loss"])
            self._follow()
        return losses
