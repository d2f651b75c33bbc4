"""DPD by hand, a reference twin of dase_grpc.learning.agents.dpd on top of those of the algorithms."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from learning.ddpg_oracle import OracleDDPG, late_forward
from learning.oracle import Adam, Array, Oracle, backward, forward, name_actor, shares
from learning.td3_oracle import OracleTD3


class OracleDPD:
    """An agent's twin and its peer's; repeats the agent's updates by hand."""

    def __init__(self, own: Any, peer: Any, config: Any) -> None:
        self.own, self.peer, self.config = own, peer, config
        self.adam = Adam(own.actor, config.lr_factor * own.config.actor_lr)
        self.updates = 0
        self.chosen: list[int] = []

    def update(
        self, batch: Mapping[str, Array], weight: Array | None, noise: Sequence[Array]
    ) -> dict[str, float]:
        losses: dict[str, float] = self.own.update(batch, weight, *noise)
        self.updates += 1
        if self.updates % self.config.distil_every == 0:
            w = np.ones(len(batch["reward"])) if weight is None else weight
            losses["distillation_loss"] = self.distil(batch["observation"], w)
        return losses

    def advantage(self, observation: Array) -> Array:
        return value(self.peer, observation) - value(self.own, observation)

    def distil(self, observation: Array, weight: Array) -> float:
        advantage = self.advantage(observation)
        limit = self.config.max_confidence
        trust = np.clip(np.exp(self.config.alpha * advantage), 1 / limit, limit)
        if self.config.states == "disadvantageous":
            trust = np.where(advantage > 0, trust, 0)
        self.chosen = np.flatnonzero(trust).tolist()
        if not (weight * trust).any():
            return 0.0
        share = shares(weight * trust, len(weight))
        z, inputs = forward(self.own.actor, seen(self.own, observation))
        action, target = np.tanh(z), self.peer.act(observation)
        n = action.shape[1]
        loss = sum(
            share[i] * sum((action[i, j] - target[i, j]) ** 2 for j in range(n)) / n
            for i in range(len(share))
        )
        action_gradient = 2 * share[:, None] * (action - target) / n
        gradients, _ = backward(self.own.actor, inputs, action_gradient * (1 - action**2))
        self.adam.step(self.own.actor, gradients)
        return float(loss)

    def tensors(self) -> dict[str, Array]:
        """Everything that an update changes, under the names of the agent's `state_dict`."""
        result: dict[str, Array] = self.own.tensors()
        name_actor(result, "distillation_optimizer", self.adam.m, ".exp_avg")
        name_actor(result, "distillation_optimizer", self.adam.v, ".exp_avg_sq")
        return result


def seen(oracle: Oracle, observation: Array) -> Array:
    return observation if oracle.normaliser is None else oracle.normaliser.normalise(observation)


def value(oracle: Any, observation: Array) -> Array:
    """What the agent's actor's loss has for Q(s, π(s)), in the environment's rewards."""
    s, action = seen(oracle, observation), oracle.act(observation)
    if isinstance(oracle, OracleDDPG):
        q, _ = late_forward(oracle.critic, s, action)
        return q / oracle.config.reward_scale
    both = [forward(critic, np.concatenate([s, action], axis=1))[0][:, 0] for critic in oracle.critics]
    q = both[0] if isinstance(oracle, OracleTD3) else np.minimum(*both)
    return q / oracle.config.reward_scale
