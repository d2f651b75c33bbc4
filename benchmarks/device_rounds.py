"""Rounds of work that a device does: timed until the device has finished, which the host may be ahead of."""

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from measuring import Round


def require_device(script: str, device: torch.device, *, otherwise: str) -> None:
    """Ends the script in one sentence where torch finds no such device; `otherwise` is what to do then."""
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit(f"{script} was not run: torch finds no CUDA device on this machine; {otherwise}")


def rounds(
    work: Callable[[], object], device: torch.device, *, events: int = 1, burst: int = 1
) -> Callable[[float], Round]:
    """Does the work for so many seconds at least.

    Args:
        work: what is done.
        device: has finished when the time is taken, before and after.
        events: what doing it once counts as.
        burst: times that the work is done between two looks at the clock.
    """
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else int

    def play(seconds: float) -> Round:
        wait()
        started, times = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            for _ in range(burst):
                work()
            times += burst
        wait()
        return Round(times * events, time.perf_counter() - started, 0.0, 0.0)

    return play
