"""Copies that are queued instead of waited for, and what has to come before what.

What is queued in one lane happens in order; between lanes, and between a lane and the host, only what a
mark says. Staging and snapshots are written against this, so that tests can let things happen as late and
in as odd an order as a device may.
"""

from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in a lane, behind all that had been queued in it by then."""

    def wait(self) -> None:
        """Blocks the calling thread until the lane has come there."""
        ...


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
