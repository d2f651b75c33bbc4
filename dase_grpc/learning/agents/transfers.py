"""Brings sampled rows to the agent's device with one copy on the host and one to the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.streams import CudaLane, Lane, Mark, pinned
from dase_grpc.schema import Array, TransitionSchema


@dataclass
class _Slot:
    """One of two places that batches pass through on their way, in turn.

    Attributes:
        host, landing: the rows in pinned host memory, and on the device.
        sent, free: behind the copy between the two, and behind the one out of `landing`; None at first.
    """

    host: Tensor
    landing: Tensor
    sent: Mark | None = None
    free: Mark | None = None


@dataclass(frozen=True)
class Lanes:
    """Where a device's copies are queued: those from the host, and those in order with what it computes."""

    upload: Lane
    compute: Lane


class Staged:
    """A tensor that the host fills anew again and again; on a GPU with two more on either side of the bus.

    On a GPU the copy to the device overlaps with the updates that run there, however many are queued; the
    tensor itself changes in order with them. The host waits for nothing but its own copy of two fillings
    ago, which is what keeps it from running further ahead. One thread at a time.

    Args:
        lanes: the device's; None for those of a GPU, if it is one.

    Attributes:
        tensor: zeros at first; always the same, each filling overwrites it.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        lanes: Lanes | None = None,
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
    """A reused staging tensor for batches of packed rows (`Staged`). One thread at a time.

    The batch that `load` returns is the same views each time: the next `load` overwrites it.

    Args:
        lanes: as those of `Staged`.

    Attributes:
        batch: that batch.
    """

    def __init__(
        self, schema: TransitionSchema, batch_size: int, device: torch.device, *, lanes: Lanes | None = None
    ) -> None:
        self._rows = Staged((batch_size, schema.width), torch.float32, device, lanes=lanes)
        self.batch = Batch.from_rows(schema, self._rows.tensor)

    def load(self, rows: Array) -> Batch:
        """Copies (B, width) rows in."""

        def write(place: Array) -> None:
            place[:] = rows

        self._rows.fill(write)
        return self.batch
