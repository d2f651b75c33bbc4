"""A sampled batch as named tensors, and which of its rows are worth computing."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Final, Self

import torch
from torch import Tensor

from dase_grpc.schema import TransitionSchema

NEGLIGIBLE: Final = 2.0**-40
"""A row counts if its weight is more than this share of the batch's largest, an internal row's 1.

Float32 keeps a sum to 2⁻²⁴ of its terms at best, so rows of such weights change the sums of a loss and of
its gradients by less than rounding does, unless what they add up to without their weights is 65 000 times
what the others do. Where no other row reaches a parameter at all, Adam, which divides by the gradient's own
size + 1e-8, would move it by 1e-4 of the learning rate for a gradient of 1. Weights of 0 never count.
"""


@dataclass(frozen=True)
class Batch:
    """Columns of B packed transitions; all are views, nothing is copied. A stack's batches have K in front.

    observation (B, m), action (B, n), state_action (B, m + n), next_observation (B, m),
    reward (B,) and bootstrap (B,) are float32; agent_id (B,) and policy_version (B,) int32.
    """

    observation: Tensor
    action: Tensor
    state_action: Tensor
    next_observation: Tensor
    reward: Tensor
    bootstrap: Tensor
    agent_id: Tensor
    policy_version: Tensor

    @classmethod
    def from_rows(cls, schema: TransitionSchema, rows: Tensor) -> Self:
        """Names the columns of (B, width) float32 rows, or (K, B, width)."""
        part = schema.columns
        return cls(
            observation=rows[..., part["observation"]],
            action=rows[..., part["action"]],
            state_action=rows[..., part["observation"].start : part["action"].stop],
            next_observation=rows[..., part["next_observation"]],
            reward=rows[..., part["reward"].start],
            bootstrap=rows[..., part["bootstrap"].start],
            agent_id=rows[..., part["agent_id"].start].view(torch.int32),
            policy_version=rows[..., part["policy_version"].start].view(torch.int32),
        )

    def seen_by(self, normalise: Callable[[Tensor], Tensor]) -> Self:
        """The batch with normalised observations, which are new tensors: the rows stay raw."""
        observation = normalise(self.observation)
        return replace(
            self,
            observation=observation,
            state_action=torch.cat((observation, self.action), dim=-1),
            next_observation=normalise(self.next_observation),
        )

    def as_stack(self) -> Self:
        """The batch of a stack of one; views, nothing is copied."""
        return type(self)(**{field.name: getattr(self, field.name)[None] for field in fields(self)})

    def at(self, rows: Tensor) -> Self:
        """The batch of some rows alone, copied; rows is (k,) int64."""
        gathered = {name: getattr(self, name).index_select(0, rows) for name in _COPIED}
        seen = self.observation.shape[1]
        return type(self)(
            observation=gathered["state_action"][:, :seen],
            action=gathered["state_action"][:, seen:],
            **gathered,
        )


# observation and action are parts of state_action
_COPIED: Final = tuple(field.name for field in fields(Batch) if field.name not in ("observation", "action"))


def that_count(weight: Tensor) -> Tensor | None:
    """The (k,) int64 indices of the rows that count, in order; None if all do, or all weights are 0.

    weight is (B,), on the CPU: on another device this would wait for it, and k would be a shape that
    depends on data.
    """
    values = weight.numpy()
    (rows,) = (values > NEGLIGIBLE * values.max()).nonzero()
    return torch.from_numpy(rows) if 0 < len(rows) < len(values) else None
