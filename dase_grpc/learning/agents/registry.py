"""Agent, what the learner asks of a learning algorithm; those that there are, and the user's own."""

import inspect
from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig, is_own
from dase_grpc.errors import AlgorithmError
from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.ddpg import DDPG
from dase_grpc.learning.agents.memory import OWN, Memory
from dase_grpc.learning.agents.networks import restore
from dase_grpc.learning.agents.optimiser import Steps
from dase_grpc.learning.agents.policy import ActorPolicy, policy_tensors
from dase_grpc.learning.agents.sac import SAC
from dase_grpc.learning.agents.td3 import TD3
from dase_grpc.learning.envs.answers import kind
from dase_grpc.learning.envs.explorer import Policy
from dase_grpc.learning.envs.imports import named
from dase_grpc.learning.envs.noise import Gaussian, Noise
from dase_grpc.schema import TransitionSchema


class Agent(Policy, Protocol):
    """An actor-critic that learns from weighted batches; it never hears of other agents or of DPS.

    A class of such agents is called with (config, schema, *, seed, agent_id, device), an `ActorCritic` with
    `memory` and `autograd` too. It may have a class or static method `exploration(config, schema)`, which
    returns a new `Noise`. What each promises is tried by promises.py.
    """

    @property
    def updates(self) -> int:
        """Training iterations done so far; also the version of the current policy."""
        ...

    @property
    def policy(self) -> ActorPolicy:
        """The policy being trained: the network itself, whose actions have gradients."""
        ...

    def policy_actions(self, observation: Tensor) -> Tensor:
        """π(s) for (B, m) observations on the agent's device, (B, n) in [-1, 1], without gradient."""
        ...

    @property
    def uses_actions(self) -> bool:
        """Whether the next `update` would use what `policy_actions` gives for its whole batch."""
        ...

    def update(self, batch: Batch, weight: Tensor, *, actions: Tensor | None = None) -> Mapping[str, Tensor]:
        """One training iteration; returns losses as scalars that stay on the device. Never waits for it.

        weight is (B,), 1 for internal rows, and does not sum to 0 (the caller checks). actions may be what
        `policy_actions` gave last, if that was for this very batch: it saves a pass, and changes no result.
        An optimiser's step whose loss or gradient is not finite is left out.
        """
        ...

    def take_steps(self) -> Mapping[str, Steps]:
        """The optimisers' steps since the last call, by what they move; waits for the device."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Networks, targets and optimisers as flat, dotted names."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave; KeyError or ValueError where it does not fit."""
        ...


ALGORITHMS: Final[Mapping[str, type[ActorCritic]]] = {"td3": TD3, "ddpg": DDPG, "sac": SAC}


def load_algorithm(name: str) -> type[Any]:
    """The class of agents of a name, or of a path `package.module:Class`.

    Raises:
        AlgorithmError: there is none.
    """
    if not is_own(name):
        return ALGORITHMS[name]
    found = named(name, what="algorithm", wanted="a class", example="MyAgent", error=AlgorithmError)
    if not inspect.isclass(found):
        raise AlgorithmError(f"the algorithm {name!r} is {kind(found)}; name a class of agents")
    return found


def make_agent(
    config: AgentConfig,
    schema: TransitionSchema,
    *,
    seed: int,
    agent_id: int,
    device: torch.device,
    memory: Memory = OWN,
    autograd: bool | None = None,
    algorithm: type[Any] | None = None,
) -> Agent:
    """A new agent of the configured algorithm; `seed` is the run's, agents differ by `agent_id`.

    memory and autograd are for an `ActorCritic` only. A class of agents given as `algorithm` takes the place
    of the configured one.

    Raises:
        AlgorithmError: the algorithm is missing.
    """
    make = algorithm or load_algorithm(config.algorithm)
    more = {"memory": memory, "autograd": autograd} if issubclass(make, ActorCritic) else {}
    agent: Agent = make(config, schema, seed=seed, agent_id=agent_id, device=device, **more)
    return agent


def as_actor_critic(agent: Agent, *, use: str) -> ActorCritic:
    """The agent, if it is one; `use` says what only an `ActorCritic` can do.

    Raises:
        AlgorithmError: it is none.
    """
    if not isinstance(agent, ActorCritic):
        raise AlgorithmError(
            f"{use} needs values and passes of an ActorCritic, which {type(agent).__name__} is not; subclass "
            f"ActorCritic, TD3, DDPG or SAC, or do without"
        )
    return agent


def exploration(
    config: AgentConfig, schema: TransitionSchema, *, algorithm: type[Any] | None = None
) -> Noise:
    """A new noise for one environment that an agent explores; `algorithm` as for `make_agent`.

    Raises:
        AlgorithmError: the algorithm is missing, or what it gives is none.
    """
    make = getattr(algorithm or load_algorithm(config.algorithm), "exploration", None)
    if make is None:
        return Gaussian(config.exploration_noise)
    noise = make(config, schema)
    if not isinstance(noise, Noise):
        raise AlgorithmError(
            f"exploration of the algorithm {config.algorithm!r} returned {kind(noise)}; return a new Noise"
        )
    return noise


def load_policy(
    config: AgentConfig, schema: TransitionSchema, state: Mapping[str, Any], device: torch.device
) -> ActorPolicy:
    """The policy in an agent's saved state, for evaluation; its `policy_tensors` are enough.

    Raises:
        KeyError: a tensor of the policy is missing.
        ValueError: one too many, or one of another shape or dtype.
    """
    policy = ActorPolicy.empty(config, schema, device)
    restore(dict(policy.named_tensors()), policy_tensors(state))
    return policy
