"""The table of algorithms, and policies from saved states."""

import numpy as np
import pytest
import torch
from learning.td3_cases import (
    CPU,
    SCHEMA,
    TINY,
    make,
)

from dase_grpc.config import algorithms
from dase_grpc.learning.agents.memory import Flat
from dase_grpc.learning.agents.networks import Actor, Sizes, Start
from dase_grpc.learning.agents.policy import ActorPolicy
from dase_grpc.learning.agents.registry import ALGORITHMS, load_policy


def test_every_algorithm_of_the_configuration_is_in_the_table():
    assert set(ALGORITHMS) == set(algorithms.ALGORITHMS)


def test_load_policy_refuses_another_size():
    state = make().state_dict()
    with pytest.raises(ValueError, match=r"actor.weight.0, not float32\[4, 3\]"):
        load_policy(TINY.model_copy(update={"hidden": (4, 5)}), SCHEMA, state, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 10])
def test_act_returns_new_float32_actions_within_bounds(count, dtype):
    actor = Actor(Sizes(3, 2, (8,)), Start(torch.Generator(), CPU, dtype))
    policy = ActorPolicy(actor, Flat(actor))
    observation = np.full((count, 3), 1e6, np.float32)
    observation.setflags(write=False)
    first, second = policy.act(observation), policy.act(observation)
    assert first.shape == (count, 2)
    assert first.dtype == np.float32
    assert np.abs(first).max() <= 1
    first[:] = 7
    assert not np.array_equal(first, second)
    assert np.array_equal(policy.act(observation), second)
