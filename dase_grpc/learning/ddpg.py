"""DDPG: deep deterministic policy gradient (Lillicrap et al. 2015, arXiv 1509.02971).

One critic, which the action enters at its second layer; targets without noise; actor, critic and
targets move at every update. Weight decay is Adam's L2 term on all of the critic, biases too, and
networks start as torch's linear layers do, both as in DASE's released code; the paper's small final
layers are not in it. Normalised observations: normaliser.py.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dase_grpc.agent_config import AgentConfig
from dase_grpc.learning.actor_critic import ActorCritic, bellman, critic_loss, network_generator
from dase_grpc.learning.batch import Batch
from dase_grpc.learning.networks import Actor, LateActionCritic
from dase_grpc.schema import TransitionSchema


@torch.no_grad()
def target_value(actor: Actor, critic: LateActionCritic, batch: Batch, *, config: AgentConfig) -> Tensor:
    """The target y = scale · r + γ · bootstrap · Q'(s', π'(s')); (B,). Both are the target networks."""
    value = critic.value(batch.next_observation, actor.actions(batch.next_observation))
    return bellman(batch, value, config=config)


def actor_loss(actor: Actor, critic: LateActionCritic, observation: Tensor, share: Tensor) -> Tensor:
    """−Σ share · Q(s, π(s)); a gradient reaches the actor only."""
    return -(critic.fixed_value(observation, actor.actions(observation)) @ share)


class DDPG(ActorCritic):
    """An `Agent` that learns by DDPG."""

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
        self._critic = LateActionCritic((m, *config.hidden, 1), n, start, device=device, dtype=dtype)
        self._target_actor = self._actor.frozen_copy()
        self._target_critic = self._critic.frozen_copy()
        super().__init__(
            config,
            actor=self._actor,
            critic=self._critic,
            targets={"actor": self._target_actor, "critic": self._target_critic},
        )

    def _q(self, observation: Tensor, action: Tensor) -> Tensor:
        return self._critic.fixed_value(observation, action)

    def update(self, batch: Batch, weight: Tensor) -> Mapping[str, Tensor]:
        """One training iteration, as `ActorCritic.update` promises."""
        share = weight / weight.sum()
        batch = self._seen(batch, weight)

        target = target_value(self._target_actor, self._target_critic, batch, config=self._config)
        values = self._critic.value(batch.observation, batch.action)
        loss = self._critic_steps.minimise(critic_loss(values, target, share))
        losses = {"critic_loss": loss, "q_mean": values.detach() @ share}

        loss = actor_loss(self._actor, self._critic, batch.observation, share)
        losses["actor_loss"] = self._actor_steps.minimise(loss)
        self._follow()
        self._updates += 1
        return losses
