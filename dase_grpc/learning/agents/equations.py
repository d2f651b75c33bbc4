"""Equations that the updates of the actor-critics have in common, as pure functions.

Both losses of each algorithm are means over the batch weighted by w, as DASE has them (Saglam et al.
2022, arXiv 2207.13453); with w = 1 they are the algorithm's own. All is for one agent, or for the K of a
stack (stack.py): there each tensor of B rows has K in front, (K, B, ...), and what is a number is (K,).
"""

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.batch import Batch


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
