"""A learner of one's own, without asyncio and without torch: least-squares policy iteration on a pendulum.

    dase node --role replay --listen 127.0.0.1:50051 --capacity 100000 --min-size 2000
    python own_learner.py 127.0.0.1:50051

Q is a quadratic function of observation and action, so the best action is linear in the observation. Each
episode's transitions go to the shared replay, and each policy comes of batches that are drawn from it.
"""

import sys
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from dase_grpc.replay.client.session import Session
from dase_grpc.schema import TransitionSchema

STEPS, DISCOUNT = 12_000, 0.97
PAIRS = np.triu_indices(6)
Array = NDArray[Any]


def features(observation: Array, action: Array) -> Array:
    """All products of two of (1, observation, action), (N, 21)."""
    z: Array = np.hstack([np.ones((len(action), 1)), observation, action])
    return np.asarray(z[:, PAIRS[0]] * z[:, PAIRS[1]])


def greedy(gain: Array, observation: Array) -> Array:
    """The best action in [-1, 1]: linear in the observation."""
    return np.asarray(np.clip(gain[0] + observation @ gain[1:], -1, 1))


def improved(gain: Array, batch: Array) -> Array:
    """One step of LSTD-Q for the policy so far, and the policy that is greedy for it."""
    following = greedy(gain, batch["next_observation"])[:, None]
    now = features(batch["observation"], batch["action"])
    then = features(batch["next_observation"], following)
    matrix = now.T @ (now - DISCOUNT * batch["bootstrap"][:, None] * then)
    weights = np.linalg.solve(matrix + 1e-3 * np.eye(21), now.T @ batch["reward"])
    q = np.zeros((6, 6))
    q[PAIRS] = weights
    curvature = q[5, 5]
    return -q[:5, 5] / (2 * curvature) if curvature < 0 else gain


env: gymnasium.Env[Array, Array] = gymnasium.make("InvertedPendulum-v5")
rng, gain, space = np.random.default_rng(0), np.zeros(5), env.action_space
assert isinstance(space, gymnasium.spaces.Box)
low, high = space.low, space.high
schema = TransitionSchema("InvertedPendulum-v5", 4, 1, tuple(low.tolist()), tuple(high.tolist()))
with Session(sys.argv[1], schema=schema, batch_size=2_000, prefetch=1) as session:
    observation, updates, score = env.reset(seed=0)[0], 0, 0.0
    for step in range(1, STEPS + 1):
        action = np.clip([greedy(gain, observation) + 0.3 * rng.normal()], -1, 1)
        following, reward, terminated, truncated, _ = env.step(low + (action + 1) / 2 * (high - low))
        row, score = schema.empty(1), score + float(reward)
        schema.named(row)[0] = (observation, action, following, reward, not terminated, 0, updates)
        session.store(row[0])
        observation = following
        if terminated or truncated:
            print(f"step {step}: return {score:.0f}", flush=True)
            session.progress(episode_return=score, updates=updates)
            observation, score = env.reset()[0], 0.0
            if (batch := session.next()) is not None:
                gain, updates = improved(gain, schema.named(batch[0])), updates + 1
                session.publish(updates, {"gain": gain})
