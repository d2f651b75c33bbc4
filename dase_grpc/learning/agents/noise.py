"""The Gaussian noise inside updates: a stream of its own per agent, saved and resumed with the agent."""

from typing import Any

import torch
from torch import Tensor

from dase_grpc.seeding import Purpose, integer


class NoiseStream:
    """Draws on the agent's device; torch's global random state is neither read nor changed."""

    def __init__(self, seed: int, agent_id: int, device: torch.device) -> None:
        self._key = (seed, Purpose.TARGET_NOISE, agent_id)
        self._generator = torch.Generator(device).manual_seed(integer(*self._key))

    def normal(self, like: Tensor, std: float) -> Tensor:
        """N(0, std) noise in the shape and dtype of `like`."""
        return self.fill(torch.empty_like(like, memory_format=torch.contiguous_format), std)

    def fill(self, place: Tensor, std: float) -> Tensor:
        """What `normal` gives, drawn into a contiguous tensor, which it returns."""
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


def perturbed(action: Tensor, noise: Tensor, *, limit: float) -> Tensor:
    """clip(a + clip(ε, ±limit), ±1) for (B, n) actions; no gradient where a bound cuts the sum."""
    return (action + noise.clamp(-limit, limit)).clamp(-1, 1)


def through_bounds(gradient: Tensor, action: Tensor, noise: Tensor, *, limit: float) -> Tensor:
    """The gradient of the actions, (B, n), for that of `perturbed`: 0 where a bound cuts the sum."""
    inside = (action + noise.clamp(-limit, limit)).abs_().le_(1)
    return inside.mul_(gradient)
