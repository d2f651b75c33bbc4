"""Equations that the updates of the actor-critics have in common, and the noise that goes into them.

Both losses of each algorithm are means over the batch weighted by w, as DASE has them (Saglam et al.
2022, arXiv 2207.13453); with w = 1 they are the algorithm's own. All is for one agent, or for the K of a
stack (stack.py): there each tensor of B rows has K in front, (K, B, ...), and what is a number is (K,).
"""

from typing import Any, Final

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.seeding import Purpose, integer

TD_ERROR: Final = "td_error"
"""Beside the losses of an update: what `td_error` gives."""


def bellman(batch: Batch, next_value: Tensor, *, config: AgentConfig) -> Tensor:
    """The target y = scale · r + γ · bootstrap · V(s'); next_value and result are (B,)."""
    reward = batch.reward if config.reward_scale == 1 else config.reward_scale * batch.reward
    return reward + config.gamma * batch.bootstrap * next_value


def mean(values: Tensor, share: Tensor) -> Tensor:
    """Σ share · value over the rows; share (B,) is w / Σ w, values (..., B), the result (...)."""
    return values @ share if share.ndim == 1 else torch.linalg.vecdot(values, share)


def critic_loss(values: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """Σ share · (Q − y)², summed over the critics; values is (B,), or (2, B) for twins, target (B,)."""
    error = values - target
    loss = mean(error * error, share)
    return loss.sum(0) if values.ndim > share.ndim else loss


def critic_gradient(values: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """The gradient of `critic_loss` in the values, 2 share · (Q − y); in their shape."""
    half = (values - target).mul_(share)
    return half.add_(half)


def td_error(values: Tensor, target: Tensor) -> Tensor:
    """|Q − y| of each row, of twins the mean of both, (B,); see `critic_loss`."""
    error = (values.detach() - target).abs_()
    return error.mean(0) if values.ndim > target.ndim else error


def perturbed(action: Tensor, noise: Tensor, *, limit: float) -> Tensor:
    """clip(a + clip(ε, ±limit), ±1) for (B, n) actions; no gradient where a bound cuts the sum."""
    return (action + noise.clamp(-limit, limit)).clamp(-1, 1)


def through_bounds(gradient: Tensor, action: Tensor, noise: Tensor, *, limit: float) -> Tensor:
    """The gradient of the actions, (B, n), for that of `perturbed`: 0 where a bound cuts the sum."""
    inside = (action + noise.clamp(-limit, limit)).abs_().le_(1)
    return inside.mul_(gradient)


class NoiseStream:
    """An agent's own Gaussian noise inside updates, drawn on its device, saved and resumed with it."""

    def __init__(self, seed: int, agent_id: int, device: torch.device) -> None:
        self._key = (seed, Purpose.TARGET_NOISE, agent_id)
        self._generator = torch.Generator(device).manual_seed(integer(*self._key))

    def fill(self, place: Tensor, std: float) -> Tensor:
        """Draws N(0, std) noise into a contiguous tensor, which it returns."""
        return place.normal_(0, std, generator=self._generator)

    def state(self) -> Tensor:
        """The generator's state, a uint8 tensor on the CPU; its size depends on the kind of device."""
        return self._generator.get_state()

    def room_for(self, saved: Any) -> Tensor:
        """An uninitialised tensor that a saved state, of whatever kind of device, can be copied into."""
        own = self.state()
        if isinstance(saved, Tensor) and saved.dtype == own.dtype:
            return torch.empty_like(saved, device="cpu")
        return own

    def resume(self, state: Tensor, *, updates: int) -> None:
        """Goes on from `state`; from another kind of device's, on a new stream that `updates` decides."""
        if state.shape == self.state().shape:
            self._generator.set_state(state)
        else:
            self._generator.manual_seed(integer(*self._key, updates))
