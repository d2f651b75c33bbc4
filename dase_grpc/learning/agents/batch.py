"""A sampled batch: named tensors, the way its rows come to the agent's device, and which of them count."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dase_grpc.learning.agents.device import CudaLane, Lane, Mark, pinned
from dase_grpc.schema import Array, TransitionSchema

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
        """The batch of a stack of one; views."""
        return type(self)(**{field.name: getattr(self, field.name)[None] for field in fields(self)})

    def of(self, place: int) -> Self:
        """The batch of the agent at this place of a stack; views."""
        return type(self)(**{field.name: getattr(self, field.name)[place] for field in fields(self)})

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


def made_up_rows(schema: TransitionSchema, count: int, rng: np.random.Generator) -> Array:
    """Random transitions of agent 0 to try code out with, (count, width); each bootstraps."""
    rows = schema.empty(count)
    rows[:] = 0
    columns = schema.named(rows)
    for column in ("observation", "next_observation", "reward"):
        columns[column] = rng.standard_normal(columns[column].shape)
    columns["action"] = rng.uniform(-1, 1, columns["action"].shape)
    columns["bootstrap"] = 1
    return rows


def counted(errors: Tensor, weight: Tensor) -> Tensor:
    """TD errors, (..., B), with 0 for rows whose weight does not count."""
    return errors * (weight > NEGLIGIBLE * weight.amax(-1, keepdim=True))


def that_count(weight: Tensor) -> Tensor | None:
    """The (k,) int64 indices of the rows that count, in order; None if all do, or all weights are 0.

    weight is (B,), on the CPU: k is a shape that depends on data.
    """
    values = weight.numpy()
    (rows,) = (values > NEGLIGIBLE * values.max()).nonzero()
    return torch.from_numpy(rows) if 0 < len(rows) < len(values) else None


@dataclass(frozen=True)
class Lanes:
    """Where a device's copies are queued: those from the host, and those in order with what it computes."""

    upload: Lane
    compute: Lane


@dataclass
class _Slot:
    """One of two places that rows pass through on their way, in turn: pinned, and on the device."""

    host: Tensor
    landing: Tensor
    sent: Mark | None = None  # behind the copy between the two
    free: Mark | None = None  # behind the one out of `landing`


class Staged:
    """A tensor that the host fills anew again and again; on a GPU with two more on either side of the bus.

    On a GPU the copy to the device overlaps with the updates that run there, however many are queued; the
    tensor itself changes in order with them. The host waits for nothing but its own copy of two fillings
    ago, which is what keeps it from running further ahead. One thread at a time.

    Attributes:
        tensor: zeros at first; always the same, each filling overwrites it.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, lanes: Lanes | None = None
    ) -> None:
        if lanes is None and device.type == "cuda":
            lanes = Lanes(CudaLane(device, own=True), CudaLane(device, own=False))
        self._lanes = lanes
        self.tensor = torch.zeros(tuple(shape), dtype=dtype, device=device)
        self._slots: list[_Slot] = []
        if lanes is not None:
            host = (pinned(torch.zeros(tuple(shape), dtype=dtype), device) for _ in range(2))
            self._slots = [_Slot(each, torch.empty_like(self.tensor)) for each in host]
        self._here: npt.NDArray[Any] | None = self.tensor.numpy() if lanes is None else None

    def fill(self, write: Callable[[npt.NDArray[Any]], None]) -> None:
        """Has the host write the whole tensor, into an array of its shape; what is not written may be old."""
        if self._lanes is None:
            assert self._here is not None
            write(self._here)
            return
        upload, compute, slot = self._lanes.upload, self._lanes.compute, self._slots[0]
        self._slots.reverse()
        if slot.sent is not None:
            slot.sent.wait()
        upload.follow(slot.free or compute.mark())  # at first, behind whatever had its memory before
        write(slot.host.numpy())
        upload.copy(slot.landing, slot.host)
        slot.sent = upload.mark()
        compute.follow(slot.sent)
        compute.copy(self.tensor, slot.landing)
        slot.free = compute.mark()


class Staging:
    """A `Staged` tensor for packed rows; each `load` overwrites and returns `batch`, the same views."""

    def __init__(
        self, schema: TransitionSchema, batch_size: int, device: torch.device, *, lanes: Lanes | None = None
    ) -> None:
        self._rows = Staged((batch_size, schema.width), torch.float32, device, lanes=lanes)
        self.batch = Batch.from_rows(schema, self._rows.tensor)

    def load(self, rows: Array) -> Batch:
        """Copies (B, width) rows in."""
        self._rows.fill(lambda place: np.copyto(place, rows))
        return self.batch
