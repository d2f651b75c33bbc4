"""SAC with a deterministic actor by hand, a reference twin of dase_grpc.learning.agents.sac."""

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


class OracleSAC(Oracle):
    """Starts from an agent's state and repeats its updates by hand."""

    def __init__(self, state: Mapping[str, Any], config: Any) -> None:
        super().__init__(config)
        self.actor = actor_layers(state, "actor")
        self.critics = [critic_layers(state, "critic", i) for i in range(2)]
        self.target_critics = [critic_layers(state, "target_critic", i) for i in range(2)]
        self.actor_adam = Adam(self.actor, config.actor_lr)
        self.critic_adams = [Adam(c, config.critic_lr, config.critic_weight_decay) for c in self.critics]

    def sample(self, mean: Array, noise: Array) -> tuple[Array, Array]:
        """The action, and where it depends on the mean."""
        limit = self.config.policy_noise_clip
        action = mean + np.clip(noise, -limit, limit)
        return np.clip(action, -1, 1), np.abs(action) <= 1

    def target(self, batch: Mapping[str, Array], noise: Array) -> Array:
        s = batch["next_observation"]
        action, _ = self.sample(np.tanh(forward(self.actor, s)[0]), noise)
        x = np.concatenate([s, action], axis=1)
        q1, q2 = (forward(critic, x)[0][:, 0] for critic in self.target_critics)
        return batch["reward"] + self.config.gamma * batch["bootstrap"] * np.minimum(q1, q2)

    def update(
        self, batch: Mapping[str, Array], weight: Array | None, next_noise: Array, noise: Array
    ) -> dict[str, float]:
        share = shares(weight, len(batch["reward"]))
        batch = self.seen(batch, share)
        y = self.target(batch, next_noise)
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
        losses["actor_loss"], gradients = self.actor_gradients(batch["observation"], share, noise)
        self.actor_adam.step(self.actor, gradients)
        for target, critic in zip(self.target_critics, self.critics, strict=True):
            move(target, critic, self.config.tau)
        return losses

    def actor_gradients(self, observation: Array, share: Array, noise: Array) -> tuple[float, Layers]:
        z, actor_inputs = forward(self.actor, observation)
        action, free = self.sample(np.tanh(z), noise)
        x = np.concatenate([observation, action], axis=1)
        values, action_gradients = [], []
        for critic in self.critics:
            q, inputs = forward(critic, x)
            _, input_gradient = backward(critic, inputs, -share[:, None])
            values.append(q[:, 0])
            action_gradients.append(input_gradient[:, observation.shape[1] :])
        lower = values[0] <= values[1]
        action_gradient = np.where(lower[:, None], *action_gradients) * free
        gradients, _ = backward(self.actor, actor_inputs, action_gradient * (1 - np.tanh(z) ** 2))
        return -(share * np.minimum(*values)).sum(), gradients

    def tensors(self) -> dict[str, Array]:
        """Everything under the names and in the layout of the agent's `state_dict`."""
        result: dict[str, Array] = {}
        self.name_normaliser(result)
        name_actor(result, "actor", self.actor)
        for name, critics in (("critic", self.critics), ("target_critic", self.target_critics)):
            name_critics(result, name, critics)
        for key, moment in (("exp_avg", "m"), ("exp_avg_sq", "v")):
            name_actor(result, "actor_optimizer", getattr(self.actor_adam, moment), f".{key}")
            moments = [getattr(adam, moment) for adam in self.critic_adams]
            name_critics(result, "critic_optimizer", moments, f".{key}")
        return result
