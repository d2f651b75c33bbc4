"""SAC with a deterministic actor: soft actor-critic (Haarnoja et al. 2018, arXiv 1801.01290) at α = 0.

As in DASE's released code: no entropy term, no target actor, and Gaussian noise inside the actor's
sample, both in the target and in the actor's loss, where the smaller of the two critics counts. The
noise is added after the tanh, so the gradient of a sample is that of π(s). In two points this is not
that code: each row draws its own noise (there one vector serves the whole batch), and the sum is
clipped to the actions' bounds, since no action in our buffer lies beyond them (there some do).
"""

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
    through_bounds,
)
from dase_grpc.learning.agents.networks import TwinCritic, xavier_bounds
from dase_grpc.learning.agents.passes import ActorPass, Buffers, TwinPass
from dase_grpc.learning.agents.stack import Kind, Moves, Networks, StackedActor, StackedTwins, of_one

Actors = ActorPass | StackedActor
Twins = TwinPass | StackedTwins


def sample(actor: Actors, observation: Tensor, noise: Tensor, *, config: AgentConfig) -> Tensor:
    """The action clip(π(s) + clip(ε, ±c), ±1); noise ε is (B, n) and not clipped yet."""
    return perturbed(actor.actions(observation), noise, limit=config.policy_noise_clip)


@torch.no_grad()
def target_value(actor: Actors, critic: Twins, batch: Batch, noise: Tensor, *, config: AgentConfig) -> Tensor:
    """The target y = scale · r + γ · bootstrap · min(Q1', Q2')(s', a') with a' sampled; (B,).

    critic is the target network, actor the agent's own.
    """
    action = sample(actor, batch.next_observation, noise, config=config)
    lowest = critic.lowest(torch.cat((batch.next_observation, action), dim=-1))
    return bellman(batch, lowest, config=config)


def actor_loss(
    actor: StackedActor,
    critic: StackedTwins,
    observation: Tensor,
    noise: Tensor,
    share: Tensor,
    *,
    config: AgentConfig,
) -> Tensor:
    """−Σ share · min(Q1, Q2)(s, a) with a sampled; a gradient reaches the actor only."""
    action = sample(actor, observation, noise, config=config)
    return -mean(critic.lowest(torch.cat((observation, action), dim=-1)), share)


def learn(
    networks: Networks[StackedTwins], moves: Moves, batch: Batch, share: Tensor, noise: Sequence[Tensor]
) -> Mapping[str, Tensor]:
    """One update by autograd; see stack.Learn."""
    config, (next_noise, noise_here) = networks.config, noise
    target = target_value(networks.target_actor, networks.target_critic, batch, next_noise, config=config)
    both = networks.critic.both(batch.state_action)
    loss = moves.critic(critic_loss(both, target, share))
    losses = {"critic_loss": loss, "q_mean": mean(both.detach()[0], share), TD_ERROR: td_error(both, target)}
    loss = actor_loss(networks.actor, networks.critic, batch.observation, noise_here, share, config=config)
    losses["actor_loss"] = moves.actor(loss)
    moves.follow()
    return losses


class SAC(ActorCritic):
    """An `Agent` that learns by SAC with a deterministic actor."""

    kind = Kind(learn, TwinCritic, StackedTwins, xavier_bounds, target_actor=False)
    _critic: TwinCritic
    _target_critic: TwinCritic

    def _write_out(self) -> None:
        room = self._room, Buffers.of(self._critic)
        self._exact_critic = of_one(StackedTwins, self._critic)
        self._critic_pass = TwinPass(self._critic, *room, products=self._products)
        self._target_critic_pass = TwinPass(self._target_critic, *room, products=self._products)

    @property
    def _noise_scales(self) -> tuple[float, ...]:
        return (self.config.policy_noise,) * 2  # of the target, and of the actor's loss

    def _q(self, observation: Tensor, action: Tensor) -> Tensor:
        return self._exact_critic.lowest(torch.cat((observation, action), dim=-1)[None])[0]

    def _learn(
        self, batch: Batch, share: Tensor, policy: Callable[[], Tensor], *noise: Tensor
    ) -> Mapping[str, Tensor]:
        config, (next_noise, noise_here) = self.config, noise
        target = target_value(
            self._target_actor_pass, self._target_critic_pass, batch, next_noise, config=config
        )
        critic = self._critic_pass
        both = critic.learn(batch.state_action, partial(critic_gradient, target=target, share=share))
        losses = {"critic_loss": critic_loss(both, target, share), "q_mean": both[0] @ share}
        losses |= self._errors(both, target)
        self._critic_steps.step(losses["critic_loss"])

        action = policy()
        drawn = perturbed(action, noise_here, limit=config.policy_noise_clip)
        both = critic.both(torch.cat((batch.observation, drawn), dim=-1))
        gradient = critic.lowest_action_gradient(both, -share, action.shape[1])
        self._actor_pass.backward(
            through_bounds(gradient, action, noise_here, limit=config.policy_noise_clip)
        )
        losses["actor_loss"] = -(both.amin(dim=0) @ share)
        self._actor_steps.step(losses["actor_loss"])
        self._follow()
        return losses
