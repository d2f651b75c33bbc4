"""Sampled rows on their way to the agent's device: copies that are queued instead of waited for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from dase_grpc.learning.agents.batch import Batch
from dase_grpc.schema import Array, TransitionSchema


class Mark(Protocol):
    """A point in a lane, behind all that had been queued in it by then."""

    def wait(self) -> None:
        """Blocks the calling thread until the lane has come there."""
        ...


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


class Lane(Protocol):
    """Work in order. One thread's."""

    def copy(self, place: Tensor, source: Tensor) -> None:
        """Queues a copy; host memory in it is pinned, and stays as it is until a mark after it is passed."""
        ...

    def mark(self) -> Mark:
        """A mark behind all that is queued."""
        ...

    def follow(self, mark: Mark) -> None:
        """Whatever is queued here from now on waits for a mark of another lane; nobody else does."""
        ...


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


class AtOnce:
    """The lane of a CPU, which has nothing to queue; also the mark of it, which is always passed."""

    def copy(self, place: Tensor, source: Tensor) -> None:
        """See Lane."""
        place.copy_(source)

    def mark(self) -> "AtOnce":
        """See Lane."""
        return self

    def follow(self, mark: Mark) -> None:
        """See Lane."""
        mark.wait()

    def wait(self) -> None:
        """See Mark."""


class CudaMark:
    """A mark in a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own annotation
        self.event.record(stream)

    def wait(self) -> None:
        """See Mark."""
        self.event.synchronize()


class CudaLane:
    """A CUDA stream: one of its own, or the one that the calling thread computes in.

    Without work of other streams on the same tensors but as marks say.
    """

    def __init__(self, device: torch.device, *, own: bool) -> None:
        self._device = device
        made = torch.cuda.Stream(device) if own else None  # type: ignore[no-untyped-call]  # as above
        self._own: torch.cuda.Stream | None = made

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._own is None else self._own

    def copy(self, place: Tensor, source: Tensor) -> None:
        """See Lane."""
        with torch.cuda.stream(self._stream):
            place.copy_(source, non_blocking=True)

    def mark(self) -> CudaMark:
        """See Lane."""
        return CudaMark(self._stream)

    def follow(self, mark: Mark) -> None:
        """See Lane."""
        if isinstance(mark, CudaMark):
            self._stream.wait_event(mark.event)
        else:
            mark.wait()


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor in memory that this GPU can copy to and from by itself; for a CPU as it is."""
    if device.type != "cuda":
        return tensor
    with torch.cuda.device(device):  # pinning needs a context on a GPU: on this one, else on the first
        return tensor.pin_memory()
