"""Agent: what the learner asks of a learning algorithm."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.optimiser import Steps
from dase_grpc.learning.agents.policy import ActorPolicy
from dase_grpc.learning.envs.explorer import Policy


class Agent(Policy, Protocol):
    """An actor-critic that learns from weighted batches; it never hears of other agents or of DPS."""

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
        """One training iteration.

        weight is (B,), 1 for internal rows, and does not sum to 0 (the caller checks). actions may be what
        `policy_actions` gave last, if that was for this very batch: it saves a pass, and changes no result.
        An optimiser's step whose loss or gradient is not finite is left out.
        Returns losses as scalars that stay on the device; never synchronises with the host.
        """
        ...

    def take_steps(self) -> Mapping[str, Steps]:
        """The optimisers' steps since the last call, by what they move; waits for the device."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Networks, targets and optimisers as flat, dotted names."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave.

        Raises:
            KeyError: a name is missing.
        """
        ...
