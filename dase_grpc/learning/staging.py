"""Brings sampled rows to the agent's device with one copy on the host and one to the device."""

from contextlib import nullcontext

import torch

from dase_grpc.learning.batch import Batch
from dase_grpc.schema import Array, TransitionSchema


class Staging:
    """A reused staging tensor and, on a GPU, its twin there. One thread at a time.

    The batch that `load` returns is the same views each time: the next `load` overwrites it.

    Attributes:
        batch: that batch.
    """

    def __init__(self, schema: TransitionSchema, batch_size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        # Pinning needs a context on a GPU: on this one, else torch opens one on the first.
        with torch.cuda.device(device) if on_gpu else nullcontext():
            self._host = torch.empty((batch_size, schema.width), dtype=torch.float32, pin_memory=on_gpu)
        self._host_rows: Array = self._host.numpy()
        self._device_rows = torch.empty_like(self._host, device=device) if on_gpu else self._host
        self._copied: torch.cuda.Event | None = None
        if on_gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own annotation
        self.batch = Batch.from_rows(schema, self._device_rows)

    def load(self, rows: Array) -> Batch:
        """Copies (B, width) rows in; on a GPU the second copy overlaps with what runs there."""
        if self._copied is not None:
            self._copied.synchronize()
        self._host_rows[:] = rows
        if self._copied is not None:
            self._device_rows.copy_(self._host, non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self._device))
        return self.batch
