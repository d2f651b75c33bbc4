"""Tiny agents of every algorithm and their reference twins, shared by the tests that hold for all."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from learning.ddpg_oracle import OracleDDPG
from learning.sac_oracle import OracleSAC
from learning.td3_cases import CPU, SCHEMA, B, N, as_batch, columns, weights
from learning.td3_oracle import OracleTD3

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.ddpg import DDPG
from dase_grpc.learning.agents.sac import SAC
from dase_grpc.learning.agents.stack import StackedActor, of_one
from dase_grpc.learning.agents.td3 import TD3

AGENTS: dict[str, type[ActorCritic]] = {"td3": TD3, "ddpg": DDPG, "sac": SAC}
ORACLES: dict[str, type[Any]] = {"td3": OracleTD3, "ddpg": OracleDDPG, "sac": OracleSAC}
DRAWS = {"td3": 1, "ddpg": 0, "sac": 2}


def tiny(algorithm: str, **settings: Any) -> AgentConfig:
    given = {"hidden": (6, 5), "actor_lr": 1e-2, "critic_lr": 2e-2, "tau": 0.1, "batch_size": B}
    return AgentConfig(algorithm=algorithm, **{**given, **settings})


CONFIGS = {
    "td3": tiny("td3", policy_delay=1),
    "td3 normalised": tiny("td3", policy_delay=1, normalise_observations=True),
    "ddpg": tiny("ddpg", critic_weight_decay=0.1, normalise_observations=True),
    "ddpg raw": tiny("ddpg"),
    "sac": tiny("sac", reward_scale=5.0),
    "sac normalised": tiny("sac", reward_scale=5.0, normalise_observations=True),
}


def make(
    config: AgentConfig,
    *,
    seed: int = 1,
    agent_id: int = 0,
    dtype: torch.dtype = torch.float32,
    autograd: bool | None = None,
) -> Any:
    kind = AGENTS[config.algorithm]
    return kind(config, SCHEMA, seed=seed, agent_id=agent_id, device=CPU, dtype=dtype, autograd=autograd)


def as_stack(agent: Any) -> tuple[Any, Any]:
    """Its actor and its critic as a stack of one has them."""
    return of_one(StackedActor, agent._actor), of_one(agent.kind.critic, agent._critic)


def noises(config: AgentConfig, seed: int = 0, count: int = B) -> list[np.ndarray]:
    """What an update of this algorithm draws, wide enough to meet its clips."""
    rng = np.random.default_rng(seed)
    return [rng.normal(scale=0.6, size=(count, N)) for _ in range(DRAWS[config.algorithm])]


def update_drawn(
    agent: Any,
    step: int = 0,
    weight: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    chosen: Any = slice(None),
    **given: Any,
) -> Mapping[str, torch.Tensor]:
    """An update on the batch and the noise of that number, or on some rows of them."""
    weight = torch.from_numpy(weights(step)) if weight is None else weight
    noise = [torch.from_numpy(values[chosen]).to(dtype) for values in noises(agent.config, step)]
    data = {name: values[chosen] for name, values in columns(step).items()}
    return agent.update_with(as_batch(data, dtype), weight.to(dtype), *noise, **given)


def assert_near(first: Mapping[str, Any], second: Mapping[str, Any], *, rel: float, abs_: float) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            first[name], second[name], rtol=rel, atol=abs_, msg=lambda m, n=name: f"{n}: {m}"
        )


def gradients(*agents: Any) -> Iterator[tuple[torch.Tensor, ...]]:
    """Those of each parameter of all, the critic's last layer at the end."""
    for network in ("_actor", "_critic"):
        of_each = (getattr(agent, network).parameters() for agent in agents)
        yield from (tuple(each.grad for each in same) for same in zip(*of_each, strict=True))


def update_by(
    agent: Any, data: Mapping[str, np.ndarray], weight: np.ndarray, noise: Sequence[np.ndarray]
) -> Mapping[str, torch.Tensor]:
    """One update in float64 with the noise given."""
    tensors = [torch.from_numpy(values) for values in noise]
    update = agent.update_with if tensors else agent.update
    return update(as_batch(data, torch.float64), torch.from_numpy(weight), *tensors)
