"""DDPG: deep deterministic policy gradient (Lillicrap et al. 2015, arXiv 1509.02971).

One critic, which the action enters at its second layer; targets without noise; actor, critic and
targets move at every update. Weight decay is Adam's L2 term on all of the critic, biases too, and
networks start as torch's linear layers do, both as in DASE's released code; the paper's small final
layers are not in it. Normalised observations: `Normaliser` of policy.py.
"""

from collections.abc import Callable, Mapping, Sequence

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
    td_error,
)
from dase_grpc.learning.agents.networks import LateActionCritic
from dase_grpc.learning.agents.passes import ActorPass, LatePass
from dase_grpc.learning.agents.stack import Kind, Moves, Networks, StackedActor, StackedLate


@torch.no_grad()
def target_value(
    actor: ActorPass | StackedActor, critic: LatePass | StackedLate, batch: Batch, *, config: AgentConfig
) -> Tensor:
    """The target y = scale · r + γ · bootstrap · Q'(s', π'(s')); (B,). Both are the target networks."""
    value = critic.value(batch.next_observation, actor.actions(batch.next_observation))
    return bellman(batch, value, config=config)


def actor_loss(actor: StackedActor, critic: StackedLate, observation: Tensor, share: Tensor) -> Tensor:
    """−Σ share · Q(s, π(s)); a gradient reaches the actor only."""
    return -mean(critic.fixed_value(observation, actor.actions(observation)), share)


def learn(
    networks: Networks[StackedLate], moves: Moves, batch: Batch, share: Tensor, noise: Sequence[Tensor]
) -> Mapping[str, Tensor]:
    """One update by autograd, which draws nothing; see stack.Learn."""
    target = target_value(networks.target_actor, networks.target_critic, batch, config=networks.config)
    values = networks.critic.value(batch.observation, batch.action)
    loss = moves.critic(critic_loss(values, target, share))
    losses = {"critic_loss": loss, "q_mean": mean(values.detach(), share), TD_ERROR: td_error(values, target)}
    loss = actor_loss(networks.actor, networks.critic, batch.observation, share)
    losses["actor_loss"] = moves.actor(loss)
    moves.follow()
    return losses


class DDPG(ActorCritic):
    """An `Agent` that learns by DDPG."""

    kind = Kind(learn, LateActionCritic, StackedLate)
    _critic: LateActionCritic
    _target_critic: LateActionCritic

    def _write_out(self) -> None:
        self._exact_critic = LatePass(self._critic, self._room)
        self._critic_pass = LatePass(self._critic, self._room, products=self._products)
        self._target_critic_pass = LatePass(self._target_critic, self._room, products=self._products)

    def _q(self, observation: Tensor, action: Tensor) -> Tensor:
        return self._exact_critic.value(observation, action)

    def _learn(
        self, batch: Batch, share: Tensor, policy: Callable[[], Tensor], *noise: Tensor
    ) -> Mapping[str, Tensor]:
        target = target_value(self._target_actor_pass, self._target_critic_pass, batch, config=self.config)
        critic = self._critic_pass
        values = critic.value(batch.observation, batch.action)
        critic.backward(critic_gradient(values, target, share))
        losses = {"critic_loss": critic_loss(values, target, share), "q_mean": values @ share}
        losses |= self._errors(values, target)
        self._critic_steps.step(losses["critic_loss"])

        value = critic.value(batch.observation, policy())
        self._actor_pass.backward(critic.action_gradient(-share))
        losses["actor_loss"] = -(value @ share)
        self._actor_steps.step(losses["actor_loss"])
        self._follow()
        return losses
