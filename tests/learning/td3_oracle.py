"""TD3 by hand, a reference twin of dase_grpc.learning.agents.td3."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from learning.oracle import (
    Adam,
    Array,
    Layers,
    Oracle,
    actor_layers,
    backward,
    critic_layers,
    forward,
    move,
    name_actor,
    name_critics,
    shares,
)


class OracleTD3(Oracle):
    """Starts from an agent's state and repeats its updates by hand."""

    def __init__(self, state: Mapping[str, Any], config: Any) -> None:
        super().__init__(config)
        self.updates = 0
        self.actor = actor_layers(state, "actor")
        self.target_actor = actor_layers(state, "target_actor")
        self.critics = [critic_layers(state, "critic", i) for i in range(2)]
        self.target_critics = [critic_layers(state, "target_critic", i) for i in range(2)]
        self.actor_adam = Adam(self.actor, config.actor_lr)
        self.critic_adams = [
            Adam(critic, config.critic_lr, config.critic_weight_decay) for critic in self.critics
        ]

    def target(self, batch: Mapping[str, Array], noise: Array) -> Array:
        c = self.config
        clipped = np.clip(noise, -c.target_noise_clip, c.target_noise_clip)
        action = np.tanh(forward(self.target_actor, batch["next_observation"])[0]) + clipped
        x = np.concatenate([batch["next_observation"], np.clip(action, -1, 1)], axis=1)
        q1, q2 = (forward(critic, x)[0][:, 0] for critic in self.target_critics)
        return batch["reward"] + c.gamma * batch["bootstrap"] * np.minimum(q1, q2)

    def update(self, batch: Mapping[str, Array], weight: Array | None, noise: Array) -> dict[str, float]:
        share = shares(weight, len(batch["reward"]))
        batch = self.seen(batch, share)
        y = self.target(batch, noise)
        x = np.concatenate([batch["observation"], batch["action"]], axis=1)
        losses = {"critic_loss": 0.0}
        for index, (critic, adam) in enumerate(zip(self.critics, self.critic_adams, strict=True)):
            q, inputs = forward(critic, x)
            error = q[:, 0] - y
            losses["critic_loss"] += (share * error**2).sum()
            if index == 0:
                losses["q_mean"] = (share * q[:, 0]).sum()
            gradients, _ = backward(critic, inputs, (2 * share * error)[:, None])
            adam.step(critic, gradients)
        self.updates += 1
        if self.updates % self.config.policy_delay == 0:
            losses["actor_loss"], gradients = self.actor_gradients(batch["observation"], share)
            self.actor_adam.step(self.actor, gradients)
            self._move_targets()
        return losses

    def actor_gradients(self, observation: Array, share: Array) -> tuple[float, Layers]:
        z, actor_inputs = forward(self.actor, observation)
        action = np.tanh(z)
        q, inputs = forward(self.critics[0], np.concatenate([observation, action], axis=1))
        _, input_gradient = backward(self.critics[0], inputs, -share[:, None])
        action_gradient = input_gradient[:, observation.shape[1] :]
        gradients, _ = backward(self.actor, actor_inputs, action_gradient * (1 - action**2))
        return -(share * q[:, 0]).sum(), gradients

    def _move_targets(self) -> None:
        pairs = [(self.target_actor, self.actor), *zip(self.target_critics, self.critics, strict=True)]
        for targets, layers in pairs:
            move(targets, layers, self.config.tau)

    def tensors(self) -> dict[str, Array]:
        """Everything under the names and in the layout of the agent's `state_dict`."""
        result: dict[str, Array] = {}
        self.name_normaliser(result)
        for name, actor in (("actor", self.actor), ("target_actor", self.target_actor)):
            name_actor(result, name, actor)
        for name, critics in (("critic", self.critics), ("target_critic", self.target_critics)):
            name_critics(result, name, critics)
        for key, moment in (("exp_avg", "m"), ("exp_avg_sq", "v")):
            name_actor(result, "actor_optimizer", getattr(self.actor_adam, moment), f".{key}")
            moments = [getattr(adam, moment) for adam in self.critic_adams]
            name_critics(result, "critic_optimizer", moments, f".{key}")
        return result
