"""Brings sampled rows to the agent's device with one copy on the host and one to the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dase_grpc.learning.batch import Batch
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


class Staging:
    """A reused staging tensor and, on a GPU, two more on either side of the bus. One thread at a time.

    On a GPU the copy to the device overlaps with the updates that run there, however many are queued; the
    batch itself changes in order with them. The host waits for nothing but its own copy of two loads ago,
    which is what keeps it from running further ahead.

    The batch that `load` returns is the same views each time: the next `load` overwrites it.

    Args:
        lanes: the device's; None for those of a GPU, if it is one.

    Attributes:
        batch: that batch.
    """

    def __init__(
        self, schema: TransitionSchema, batch_size: int, device: torch.device, *, lanes: Lanes | None = None
    ) -> None:
        if lanes is None and device.type == "cuda":
            lanes = Lanes(CudaLane(device, own=True), CudaLane(device, own=False))
        self._lanes = lanes
        shape = (batch_size, schema.width)
        self._rows = torch.empty(shape, dtype=torch.float32, device=device)
        self._slots: list[_Slot] = []
        if lanes is not None:
            host = (pinned(torch.empty(shape, dtype=torch.float32), device) for _ in range(2))
            self._slots = [_Slot(rows, torch.empty_like(self._rows)) for rows in host]
        self._host_rows: Array | None = self._rows.numpy() if lanes is None else None
        self.batch = Batch.from_rows(schema, self._rows)

    def load(self, rows: Array) -> Batch:
        """Copies (B, width) rows in."""
        if self._lanes is None:
            assert self._host_rows is not None
            self._host_rows[:] = rows
            return self.batch
        upload, compute, slot = self._lanes.upload, self._lanes.compute, self._slots[0]
        self._slots.reverse()
        if slot.sent is not None:
            slot.sent.wait()
        upload.follow(slot.free or compute.mark())  # at first, behind whatever had its memory before
        slot.host.numpy()[:] = rows
        upload.copy(slot.landing, slot.host)
        slot.sent = upload.mark()
        compute.follow(slot.sent)
        compute.copy(self._rows, slot.landing)
        slot.free = compute.mark()
        return self.batch
