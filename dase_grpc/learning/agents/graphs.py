"""CUDA graphs: tensor work recorded once and replayed, instead of its kernels launched one by one.

An update of these small networks is some hundred kernels of a few microseconds each, and launching one
takes Python as long; a graph launches all of them at once. Not run on a GPU yet: docs/performance.md.
"""

import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import torch

REHEARSALS: Final = 3
"""Calls before a recording: torch makes workspaces and handles in the first ones, which a graph cannot."""

R = TypeVar("R")
Work = Callable[[], R]

_log = logging.getLogger("dase")


class RecordingFailed(Exception):
    """Work that cannot be recorded, and why; it has not been done."""


class Recorder:
    """Records tensor work as CUDA graphs that share one private pool of memory, and a stream to record on.

    What they share is why no two of them may run at once. One thread's, which calls what it recorded.
    `works` says whether recording is worth trying; false once it has failed.
    """

    def __init__(self, device: torch.device) -> None:
        # Factorising by MAGMA waits for the device; cuSOLVER and cuBLAS, which torch otherwise picks, do not.
        torch.backends.cuda.preferred_linalg_library("cusolver")
        self.works = True
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own annotation
        self._pool = torch.cuda.graph_pool_handle()

    def rehearse(self, work: Work[R]) -> R:
        """Does the work once, on the stream of the recording: autograd and cuBLAS then have all they need."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            results = work()
        here.wait_stream(self._stream)
        return results

    def record(self, work: Work[R]) -> tuple[Callable[[], None], R]:
        """Records the work without doing it: what does it, and the results that each doing overwrites.

        Waits for the device.

        Raises:
            RecordingFailed: it cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads of this process ask of the GPU meanwhile is none of this.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            # torch leaves the current stream changed where a recording fails; this puts it back
            with torch.cuda.stream(self._stream), capture:
                results = work()
        except RuntimeError as error:
            self.works = False
            cause = error.__context__ or error  # what broke the recording, and not that it is broken
            reason = str(cause).strip().partition("\n")[0]
            raise RecordingFailed(f"it cannot be recorded ({reason})") from error
        return graph.replay, results


class Captured(Generic[R]):
    """Work on tensors that stay where they are: done a few times, then recorded, then replayed.

    The work may read and write tensors that outlive it, and nothing else: no number is read on the host,
    nothing is drawn from a generator, and Python runs in it for the last time when it is recorded. Every
    call does the work exactly once. From the recording on, results are the same tensors each time, valid
    until the next call of any work that shares the recorder.

    The work gives tensors, in a mapping, a tuple or a dataclass. Without a recorder it is done as it is.
    """

    def __init__(self, work: Work[R], recorder: Recorder | None, *, name: str) -> None:
        self._work = work
        self._recorder = recorder
        self._name = name
        self._rehearsed = 0
        self._recorded: tuple[Callable[[], None], R] | None = None

    def __call__(self) -> R:
        """Does the work once; never waits for the device but to record."""
        if self._recorded is None:
            recorder = self._recorder
            if recorder is None or not recorder.works:
                return self._work()
            if self._rehearsed < REHEARSALS:
                self._rehearsed += 1
                return recorder.rehearse(self._work)
            try:
                self._recorded = recorder.record(self._work)
            except RecordingFailed as error:
                _log.warning("%s runs without a CUDA graph, which is slower: %s", self._name, error)
                return self._work()
        replay, results = self._recorded
        replay()
        return results


def recorder_for(device: torch.device) -> Recorder | None:
    """What records work on this device; None for a CPU, where launching is no cost."""
    return Recorder(device) if device.type == "cuda" else None
