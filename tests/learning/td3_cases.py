"""A tiny TD3 agent and batches for it, shared by the tests of TD3."""

from collections.abc import Mapping

import numpy as np
import torch

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.td3 import TD3
from dase_grpc.schema import TransitionSchema

CPU = torch.device("cpu")
M, N, B = 3, 2, 16
SCHEMA = TransitionSchema("Tiny-v0", M, N, (-1.0,) * N, (1.0,) * N)
TINY = AgentConfig(hidden=(6, 5), actor_lr=1e-2, critic_lr=2e-2, tau=0.1, batch_size=B)


def make(
    config: AgentConfig = TINY,
    *,
    seed: int = 1,
    agent_id: int = 0,
    dtype: torch.dtype = torch.float32,
    autograd: bool | None = None,
) -> TD3:
    return TD3(config, SCHEMA, seed=seed, agent_id=agent_id, device=CPU, dtype=dtype, autograd=autograd)


def columns(seed: int = 0, count: int = B) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "observation": rng.normal(size=(count, M)),
        "action": rng.uniform(-1, 1, size=(count, N)),
        "next_observation": rng.normal(size=(count, M)),
        "reward": rng.normal(size=count),
        "bootstrap": (np.arange(count) % 4 > 0).astype(float),  # every fourth row terminated
    }


def as_batch(data: Mapping[str, np.ndarray], dtype: torch.dtype = torch.float32) -> Batch:
    """A batch as it comes in training, views of packed rows; in float64 without the integer columns."""
    order = ("observation", "action", "next_observation", "reward", "bootstrap")
    parts = [np.reshape(data[name], (len(data["reward"]), -1)) for name in order]
    rows = torch.from_numpy(np.concatenate([*parts, np.zeros((len(parts[0]), 2))], axis=1)).to(dtype)
    if dtype == torch.float32:
        return Batch.from_rows(SCHEMA, rows)
    views = {name: rows[:, SCHEMA.columns[name]].squeeze(1) for name in order}
    ints = torch.zeros(len(rows), dtype=torch.int32)
    return Batch(**views, state_action=rows[:, : M + N], agent_id=ints, policy_version=ints)


def weights(seed: int = 0, count: int = B) -> np.ndarray:
    drawn = np.random.default_rng(seed).uniform(size=count)
    drawn[:3] = 0
    return drawn


def numpy_state(agent: TD3) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in agent.state_dict().items()}


def assert_same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
