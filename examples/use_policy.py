"""Loads a run and lets the policy of its agent 0 act in the environment.

python examples/use_policy.py RUN
"""

import sys

import dase_grpc as dase
from dase_grpc.learning.envs.make import make_env


def main(path: str) -> None:
    """Plays one episode and prints its return."""
    run = dase.load(path)
    policy = run.policy(0)  # or "best", or "ensemble"
    env = make_env(run.config.env.id, run.config.env.kwargs)
    observation, _ = env.reset(seed=1)
    total, ended = 0.0, False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
        total, ended = total + float(reward), terminated or truncated
    env.close()
    print(f"after {policy.step:,} steps of training, agent 0 returns {total:.1f}")


if __name__ == "__main__":
    main(sys.argv[1])
