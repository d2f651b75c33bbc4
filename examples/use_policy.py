"""Loads the latest checkpoint of a run's agent 0 and lets its policy act in the environment.

python examples/use_policy.py RUN
"""

import sys
from pathlib import Path

import torch

from dase_grpc.learning.agents.registry import load_policy
from dase_grpc.learning.envs.answers import ActionMap, to_float32
from dase_grpc.learning.envs.make import make_env
from dase_grpc.runs.checkpoint import latest, load_checkpoint


def main(run: Path) -> None:
    """Plays one episode and prints its return."""
    path = latest(run / "agents" / "0" / "checkpoints")
    if path is None:
        sys.exit(f"{run} has no checkpoint of agent 0")
    checkpoint = load_checkpoint(path)
    config, schema = checkpoint.config, checkpoint.schema
    policy = load_policy(config.agent, schema, checkpoint.tensors, torch.device("cpu"))

    env = make_env(config.env.id, config.env.kwargs)
    to_env = ActionMap(env.action_space)  # the policy acts in [-1, 1], the environment in its own units
    received, _ = env.reset(seed=1)
    total, ended = 0.0, False
    while not ended:
        observation = to_float32(received, schema.observation_size)
        action = policy.act(observation[None])[0]
        received, reward, terminated, truncated, _ = env.step(to_env(action))
        total, ended = total + float(reward), terminated or truncated
    env.close()
    print(f"after {checkpoint.step:,} steps of training, agent 0 returns {total:.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
