"""Layers, Adam, target networks and a normaliser by hand: NumPy float64, with no autograd to trust.

What the reference twins of the algorithms are made of; they share nothing with dase_grpc.learning but
the names of the tensors.
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
    """Kingma & Ba 2015, algorithm 1, with torch's defaults; decay is the factor of an L2 term."""

    def __init__(self, layers: Layers, lr: float, decay: float = 0.0) -> None:
        self.lr, self.decay, self.t = lr, decay, 0
        self.m = [[np.zeros_like(p) for p in layer] for layer in layers]
        self.v = [[np.zeros_like(p) for p in layer] for layer in layers]

    def step(self, layers: Layers, gradients: Layers) -> None:
        self.t += 1
        for layer, grads, ms, vs in zip(layers, gradients, self.m, self.v, strict=True):
            for p, loss_gradient, m, v in zip(layer, grads, ms, vs, strict=True):
                g = loss_gradient + self.decay * p
                m[...] = 0.9 * m + 0.1 * g
                v[...] = 0.999 * v + 0.001 * g * g
                m_hat, v_hat = m / (1 - 0.9**self.t), v / (1 - 0.999**self.t)
                p[...] = p - self.lr * m_hat / (np.sqrt(v_hat) + 1e-8)


def move(targets: Layers, layers: Layers, tau: float) -> None:
    """Moves target layers a step towards the layers they follow."""
    for target, layer in zip(targets, layers, strict=True):
        for t, p in zip(target, layer, strict=True):
            t[...] = t + tau * (p - t)


def shares(weight: Array | None, count: int) -> Array:
    """w / Σ w; without weights the plain mean."""
    return np.full(count, 1 / count) if weight is None else weight / weight.sum()


class OracleNormaliser:
    """Keeps the moments of every batch and works everything out of them anew."""

    def __init__(self) -> None:
        self.means: list[Array] = []
        self.variances: list[Array] = []

    def learn(self, observation: Array, share: Array) -> None:
        mean = (share[:, None] * observation).sum(axis=0)
        self.means.append(mean)
        self.variances.append((share[:, None] * (observation - mean) ** 2).sum(axis=0))

    @property
    def mean(self) -> Array:
        return np.mean(self.means, axis=0)

    @property
    def variance(self) -> Array:
        return np.mean(self.variances, axis=0) + np.var(self.means, axis=0)

    def normalise(self, observation: Array) -> Array:
        return np.clip((observation - self.mean) / np.maximum(np.sqrt(self.variance), 0.1), -5, 5)


class Oracle:
    """What the twins share: the batch as the networks see it, and the policy."""

    actor: Layers

    def __init__(self, config: Any) -> None:
        self.config = config
        self.normaliser = OracleNormaliser() if config.normalise_observations else None

    def seen(self, batch: Mapping[str, Array], share: Array) -> dict[str, Array]:
        result = {**batch, "reward": batch["reward"] * self.config.reward_scale}
        if self.normaliser is not None:
            self.normaliser.learn(batch["observation"], share)
            for name in ("observation", "next_observation"):
                result[name] = self.normaliser.normalise(batch[name])
        return result

    def act(self, observation: Array) -> Array:
        seen = observation if self.normaliser is None else self.normaliser.normalise(observation)
        return np.tanh(forward(self.actor, seen)[0])

    def name_normaliser(self, result: dict[str, Array]) -> None:
        if self.normaliser is not None:
            result["normaliser.mean"] = self.normaliser.mean
            result["normaliser.variance"] = self.normaliser.variance
            result["normaliser.count"] = np.array(float(len(self.normaliser.means)))


def actor_layers(state: Mapping[str, Any], name: str) -> Layers:
    count = sum(key.startswith(f"{name}.weight.") for key in state)
    return [
        (np.array(state[f"{name}.weight.{k}"], float).T.copy(), np.array(state[f"{name}.bias.{k}"], float))
        for k in range(count)
    ]


def critic_layers(state: Mapping[str, Any], name: str, index: int) -> Layers:
    count = sum(key.startswith(f"{name}.weight.") for key in state)
    return [
        (
            np.array(state[f"{name}.weight.{k}"], float)[index].copy(),
            np.array(state[f"{name}.bias.{k}"], float)[index, 0].copy(),
        )
        for k in range(count)
    ]


def name_actor(result: dict[str, Array], name: str, layers: Any, suffix: str = "") -> None:
    for k, (weight, bias) in enumerate(layers):
        result[f"{name}.weight.{k}{suffix}"] = weight.T
        result[f"{name}.bias.{k}{suffix}"] = bias


def name_critics(result: dict[str, Array], name: str, critics: Any, suffix: str = "") -> None:
    for k, (first, second) in enumerate(zip(*critics, strict=True)):
        result[f"{name}.weight.{k}{suffix}"] = np.stack([first[0], second[0]])
        result[f"{name}.bias.{k}{suffix}"] = np.stack([first[1], second[1]])[:, None]
