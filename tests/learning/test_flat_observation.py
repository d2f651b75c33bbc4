"""Structured observations as flat arrays."""

import gymnasium
import numpy as np
import pytest
import worlds
from gymnasium import spaces

from dase_grpc.learning.envs.flat import FlatObservation, unflattenable

SPACES = {
    "a Dict of everything": spaces.Dict(
        {
            "scalar": spaces.Box(0, 100, (), np.float32),
            "picture": spaces.Box(0, 255, (2, 2, 3), np.uint8),
            "wide": spaces.Box(-1e3, 1e3, (3,), np.float64),
            "one": spaces.Discrete(3, start=-1),
            "several": spaces.MultiDiscrete([[2, 3], [4, 5]]),
            "bits": spaces.MultiBinary((2, 2)),
            "text": spaces.Text(4),
            "either": spaces.OneOf((spaces.Discrete(2), spaces.Box(0, 1, (2,)))),
            "inner": spaces.Dict({"pair": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (1,))))}),
        }
    ),
    "a Tuple": spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(3))),
    "a picture": spaces.Box(0, 255, (4, 3), np.uint8),
    "a number": spaces.Box(-1, 1, (), np.float64),
}


class Observing(worlds.Clock):
    """Has a given observation space."""

    def __init__(self, space: gymnasium.Space[object]) -> None:
        super().__init__()
        self.observation_space = space


@pytest.mark.parametrize("name", SPACES)
def test_flat_observations_are_those_of_gymnasium_to_the_bit(name: str) -> None:
    space = SPACES[name]
    env = FlatObservation(Observing(space))
    space.seed(1)
    assert unflattenable(space) is None
    assert env.observation_space.shape == (spaces.flatdim(space),)
    for _ in range(20):
        sample = space.sample()
        ours, theirs = env.observation(sample), np.asarray(spaces.flatten(space, sample))
        assert ours.shape == theirs.shape
        assert ours.astype(np.float32).tobytes() == theirs.astype(np.float32).tobytes()
