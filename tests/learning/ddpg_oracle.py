"""DDPG by hand, a reference twin of dase_grpc.learning.agents.ddpg.

The critic's second layer is one matrix here, of the first layer's outputs and the action together.
"""

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
    forward,
    move,
    name_actor,
    shares,
)


def late_forward(layers: Layers, s: Array, action: Array) -> tuple[Array, tuple[Array, list[Array]]]:
    """Q(s, a) and what the backward pass needs."""
    weight, bias = layers[0]
    hidden = np.maximum(s @ weight + bias, 0)
    q, inputs = forward(layers[1:], np.concatenate([hidden, action], axis=1))
    return q[:, 0], (s, inputs)


def late_backward(
    layers: Layers, memory: tuple[Array, list[Array]], value_gradient: Array
) -> tuple[Layers, Array]:
    """Gradients of the layers and of the action."""
    s, inputs = memory
    gradients, into_second = backward(layers[1:], inputs, value_gradient[:, None])
    units = layers[0][0].shape[1]
    g = into_second[:, :units] * (inputs[0][:, :units] > 0)
    return [(s.T @ g, g.sum(axis=0)), *gradients], into_second[:, units:]


class OracleDDPG(Oracle):
    """Starts from an agent's state and repeats its updates by hand."""

    def __init__(self, state: Mapping[str, Any], config: Any) -> None:
        super().__init__(config)
        self.actor, self.target_actor = (actor_layers(state, name) for name in ("actor", "target_actor"))
        self.critic, self.target_critic = (_critic(state, name) for name in ("critic", "target_critic"))
        self.actor_adam = Adam(self.actor, config.actor_lr)
        self.critic_adam = Adam(self.critic, config.critic_lr, config.critic_weight_decay)

    def target(self, batch: Mapping[str, Array]) -> Array:
        s = batch["next_observation"]
        q, _ = late_forward(self.target_critic, s, np.tanh(forward(self.target_actor, s)[0]))
        return batch["reward"] + self.config.gamma * batch["bootstrap"] * q

    def update(self, batch: Mapping[str, Array], weight: Array | None) -> dict[str, float]:
        share = shares(weight, len(batch["reward"]))
        batch = self.seen(batch, share)
        q, memory = late_forward(self.critic, batch["observation"], batch["action"])
        error = q - self.target(batch)
        losses = {"critic_loss": (share * error**2).sum(), "q_mean": (share * q).sum()}
        gradients, _ = late_backward(self.critic, memory, 2 * share * error)
        self.critic_adam.step(self.critic, gradients)
        losses["actor_loss"], gradients = self.actor_gradients(batch["observation"], share)
        self.actor_adam.step(self.actor, gradients)
        move(self.target_actor, self.actor, self.config.tau)
        move(self.target_critic, self.critic, self.config.tau)
        return losses

    def actor_gradients(self, observation: Array, share: Array) -> tuple[float, Layers]:
        z, actor_inputs = forward(self.actor, observation)
        action = np.tanh(z)
        q, memory = late_forward(self.critic, observation, action)
        _, action_gradient = late_backward(self.critic, memory, -share)
        gradients, _ = backward(self.actor, actor_inputs, action_gradient * (1 - action**2))
        return -(share * q).sum(), gradients

    def tensors(self) -> dict[str, Array]:
        """Everything under the names and in the layout of the agent's `state_dict`."""
        result: dict[str, Array] = {}
        self.name_normaliser(result)
        for name, actor in (("actor", self.actor), ("target_actor", self.target_actor)):
            name_actor(result, name, actor)
        for name, critic in (("critic", self.critic), ("target_critic", self.target_critic)):
            _name_critic(result, name, critic)
        for key, moment in (("exp_avg", "m"), ("exp_avg_sq", "v")):
            name_actor(result, "actor_optimizer", getattr(self.actor_adam, moment), f".{key}")
            _name_critic(result, "critic_optimizer", getattr(self.critic_adam, moment), f".{key}")
        return result


def _critic(state: Mapping[str, Any], name: str) -> Layers:
    count = sum(key.startswith(f"{name}.weight.") for key in state)
    weights = [np.array(state[f"{name}.weight.{k}"], float) for k in range(count)]
    weights[1] = np.concatenate([weights[1], np.array(state[f"{name}.action_weight"], float)])
    return [(weight, np.array(state[f"{name}.bias.{k}"], float)) for k, weight in enumerate(weights)]


def _name_critic(result: dict[str, Array], name: str, layers: Any, suffix: str = "") -> None:
    units = layers[0][0].shape[1]
    for k, (weight, bias) in enumerate(layers):
        result[f"{name}.weight.{k}{suffix}"] = weight[:units] if k == 1 else weight
        result[f"{name}.bias.{k}{suffix}"] = bias
    result[f"{name}.action_weight{suffix}"] = layers[1][0][units:]
