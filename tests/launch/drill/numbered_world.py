"""Steps of a random agent in an environment that numbers them."""

from pathlib import Path

import numpy as np

from dase_grpc.learning.envs.explorer import Explorer
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.learning.envs.noise import Gaussian

NUMBERED = "dase_grpc.launch.drill.evidence:Numbered"


class Unasked:
    """Never acts: all steps are random ones."""

    def act(self, observation):
        raise AssertionError


def explore(ledger: Path, steps: int, *, agent_id: int, env_id: str = "worlds:PointGoal"):
    """The finite rows of some steps, the environment and its schema."""
    env = make_env(NUMBERED, {"env_id": env_id, "kwargs": {}, "ledger": str(ledger)})
    schema = schema_of(env, NUMBERED)
    explorer = Explorer(
        env,
        schema,
        agent_id=agent_id,
        rng=np.random.default_rng(agent_id),
        episode_seed=lambda episode: episode,
        start_steps=steps,
        noise=Gaussian(0.0),
    )
    found = [row for _ in range(steps) for row in explorer.step(Unasked(), 0).rows]
    return np.array(found), env, schema
