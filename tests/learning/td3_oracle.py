"""TD3 by hand: forward, backward, Adam and target networks in NumPy float64, with no autograd to trust.

A reference twin of dase_grpc.learning.td3; it shares nothing with it but the names of the tensors.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Layers = list[tuple[Array, Array]]  # (in, out) weights and (out,) biases


def forward(layers: Layers, x: Array) -> tuple[Array, list[Array]]:
    """The last layer's linear output and the input of each layer."""
    inputs = []
    for index, (weight, bias) in enumerate(layers):
        inputs.append(x)
        x = x @ weight + bias
        if index < len(layers) - 1:
            x = np.maximum(x, 0)
    return x, inputs


def backward(layers: Layers, inputs: list[Array], output_gradient: Array) -> tuple[Layers, Array]:
    """Gradients of the layers and of the input, from the gradient of the last linear output."""
    gradients: Layers = []
    g = output_gradient
    for index in reversed(range(len(layers))):
        gradients.insert(0, (inputs[index].T @ g, g.sum(axis=0)))
        g = g @ layers[index][0].T
        if index > 0:
            g = g * (inputs[index] > 0)
    return gradients, g


class Adam:
    """Kingma & Ba 2015, algorithm 1, with torch's defaults."""

    def __init__(self, layers: Layers, lr: float) -> None:
        self.lr, self.t = lr, 0
        self.m = [[np.zeros_like(p) for p in layer] for layer in layers]
        self.v = [[np.zeros_like(p) for p in layer] for layer in layers]

    def step(self, layers: Layers, gradients: Layers) -> None:
        self.t += 1
        for layer, grads, ms, vs in zip(layers, gradients, self.m, self.v, strict=True):
            for p, g, m, v in zip(layer, grads, ms, vs, strict=True):
                m[...] = 0.9 * m + 0.1 * g
                v[...] = 0.999 * v + 0.001 * g * g
                m_hat, v_hat = m / (1 - 0.9**self.t), v / (1 - 0.999**self.t)
                p[...] = p - self.lr * m_hat / (np.sqrt(v_hat) + 1e-8)


class OracleTD3:
    """Starts from an agent's state and repeats its updates by hand."""

    def __init__(self, state: Mapping[str, Any], config: Any) -> None:
        self.config, self.updates = config, 0
        self.actor = _actor(state, "actor")
        self.target_actor = _actor(state, "target_actor")
        self.critics = [_critic(state, "critic", i) for i in range(2)]
        self.target_critics = [_critic(state, "target_critic", i) for i in range(2)]
        self.actor_adam = Adam(self.actor, config.actor_lr)
        self.critic_adams = [Adam(critic, config.critic_lr) for critic in self.critics]

    def target(self, batch: Mapping[str, Array], noise: Array) -> Array:
        c = self.config
        clipped = np.clip(noise, -c.target_noise_clip, c.target_noise_clip)
        action = np.tanh(forward(self.target_actor, batch["next_observation"])[0]) + clipped
        x = np.concatenate([batch["next_observation"], np.clip(action, -1, 1)], axis=1)
        q1, q2 = (forward(critic, x)[0][:, 0] for critic in self.target_critics)
        return batch["reward"] + c.gamma * batch["bootstrap"] * np.minimum(q1, q2)

    def update(self, batch: Mapping[str, Array], weight: Array, noise: Array) -> dict[str, float]:
        y, total = self.target(batch, noise), weight.sum()
        x = np.concatenate([batch["observation"], batch["action"]], axis=1)
        losses = {"critic_loss": 0.0}
        for index, (critic, adam) in enumerate(zip(self.critics, self.critic_adams, strict=True)):
            q, inputs = forward(critic, x)
            error = q[:, 0] - y
            losses["critic_loss"] += (weight * error**2).sum() / total
            if index == 0:
                losses["q_mean"] = (weight * q[:, 0]).sum() / total
            gradients, _ = backward(critic, inputs, (2 * weight * error / total)[:, None])
            adam.step(critic, gradients)
        self.updates += 1
        if self.updates % self.config.policy_delay == 0:
            losses["actor_loss"], gradients = self.actor_gradients(batch["observation"], weight)
            self.actor_adam.step(self.actor, gradients)
            self._move_targets()
        return losses

    def actor_gradients(self, observation: Array, weight: Array) -> tuple[float, Layers]:
        z, actor_inputs = forward(self.actor, observation)
        action = np.tanh(z)
        q, inputs = forward(self.critics[0], np.concatenate([observation, action], axis=1))
        share = weight / weight.sum()
        _, input_gradient = backward(self.critics[0], inputs, -share[:, None])
        action_gradient = input_gradient[:, observation.shape[1] :]
        gradients, _ = backward(self.actor, actor_inputs, action_gradient * (1 - action**2))
        return -(share * q[:, 0]).sum(), gradients

    def _move_targets(self) -> None:
        pairs = [(self.target_actor, self.actor), *zip(self.target_critics, self.critics, strict=True)]
        for targets, layers in pairs:
            for target, layer in zip(targets, layers, strict=True):
                for t, p in zip(target, layer, strict=True):
                    t[...] = t + self.config.tau * (p - t)

    def tensors(self) -> dict[str, Array]:
        """Everything under the names and in the layout of the agent's `state_dict`."""
        result: dict[str, Array] = {}
        for name, actor in (("actor", self.actor), ("target_actor", self.target_actor)):
            _name_actor(result, name, actor)
        for name, critics in (("critic", self.critics), ("target_critic", self.target_critics)):
            _name_critics(result, name, critics)
        for key, moment in (("exp_avg", "m"), ("exp_avg_sq", "v")):
            _name_actor(result, "actor_optimizer", getattr(self.actor_adam, moment), f".{key}")
            moments = [getattr(adam, moment) for adam in self.critic_adams]
            _name_critics(result, "critic_optimizer", moments, f".{key}")
        return result


def _actor(state: Mapping[str, Any], name: str) -> Layers:
    count = sum(key.startswith(f"{name}.weight.") for key in state)
    return [
        (np.array(state[f"{name}.weight.{k}"], float).T.copy(), np.array(state[f"{name}.bias.{k}"], float))
        for k in range(count)
    ]


def _critic(state: Mapping[str, Any], name: str, index: int) -> Layers:
    count = sum(key.startswith(f"{name}.weight.") for key in state)
    return [
        (
            np.array(state[f"{name}.weight.{k}"], float)[index].copy(),
            np.array(state[f"{name}.bias.{k}"], float)[index, 0].copy(),
        )
        for k in range(count)
    ]


def _name_actor(result: dict[str, Array], name: str, layers: Any, suffix: str = "") -> None:
    for k, (weight, bias) in enumerate(layers):
        result[f"{name}.weight.{k}{suffix}"] = weight.T
        result[f"{name}.bias.{k}{suffix}"] = bias


def _name_critics(result: dict[str, Array], name: str, critics: Any, suffix: str = "") -> None:
    for k, (first, second) in enumerate(zip(*critics, strict=True)):
        result[f"{name}.weight.{k}{suffix}"] = np.stack([first[0], second[0]])
        result[f"{name}.bias.{k}{suffix}"] = np.stack([first[1], second[1]])[:, None]
