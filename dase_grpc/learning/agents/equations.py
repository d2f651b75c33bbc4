"""The equations that the updates of the actor-critics share, as pure functions, and what an update needs.

Both losses of each algorithm are means over the batch weighted by w, as DASE has them (Saglam et al.
2022, arXiv 2207.13453); with w = 1 they are the algorithm's own. All is for one agent, or for the K of a
stack (stack.py): there each tensor of B rows has K in front, (K, B, ...), and what is a number is (K,).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.networks import Policy

C_co = TypeVar("C_co", covariant=True)
C_contra = TypeVar("C_contra", contravariant=True)


class Minimiser(Protocol):
    """Takes the steps of a network, or of those of a stack."""

    def minimise(self, loss: Tensor) -> Tensor:
        """One step down this loss by autograd; returns the loss without its graph."""
        ...


@dataclass(frozen=True)
class Moves:
    """What an update by autograd moves: the critic, the actor if it is its turn, and what follows them."""

    critic: Minimiser
    actor: Minimiser
    follow: Callable[[], None]
    with_actor: bool = True


@dataclass(frozen=True)
class Networks(Generic[C_co]):
    """The networks of an update by autograd; those of an algorithm without a target actor have the actor."""

    actor: Policy
    critic: C_co
    target_actor: Policy
    target_critic: C_co


class Learn(Protocol[C_contra]):
    """One algorithm's update by autograd."""

    def __call__(
        self,
        networks: Networks[C_contra],
        moves: Moves,
        batch: Batch,
        share: Tensor,
        noise: Sequence[Tensor],
        *,
        config: AgentConfig,
    ) -> Mapping[str, Tensor]:
        """Moves the networks; returns the losses of `ActorCritic.update`.

        batch is as the networks see it, share (B,) is w / Σ w, noise what the update draws, (B, n) each and
        not clipped yet.
        """
        ...


def bellman(batch: Batch, next_value: Tensor, *, config: AgentConfig) -> Tensor:
    """The target y = scale · r + γ · bootstrap · V(s'); next_value and result are (B,)."""
    return config.reward_scale * batch.reward + config.gamma * batch.bootstrap * next_value


def mean(values: Tensor, share: Tensor) -> Tensor:
    """Σ share · value over the rows; share (B,) is w / Σ w, values (..., B), the result (...)."""
    return values @ share if share.ndim == 1 else torch.linalg.vecdot(values, share)


def critic_loss(values: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """Σ share · (Q − y)², summed over the critics; values is (B,), or (2, B) for twins, target (B,)."""
    loss = mean((values - target).square(), share)
    return loss.sum(0) if values.ndim > share.ndim else loss


def critic_gradient(values: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """The gradient of `critic_loss` in the values, 2 share · (Q − y); in their shape."""
    return (values - target).mul_(share).mul_(2)
