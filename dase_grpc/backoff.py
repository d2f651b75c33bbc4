"""Backoff: the pauses before the next attempts, longer after each failure."""

import random
from typing import Final

FIRST_S: Final = 0.1
CAP_S: Final = 2.0


def pause_s(failures: int, *, first_s: float, cap_s: float) -> float:
    """The pause after so many failures before the last one, all in a row: doubled by each, up to a cap."""
    doubled_s: float = first_s * 2 ** min(failures, 64)
    return min(doubled_s, cap_s)


class Backoff:
    """Pauses between attempts that are never in step with others': drawn uniformly below `pause_s`."""

    def __init__(self, rng: random.Random, *, first_s: float = FIRST_S, cap_s: float = CAP_S) -> None:
        self._rng = rng
        self._first_s = first_s
        self._cap_s = cap_s
        self._failures = 0

    def next_s(self) -> float:
        """The pause after one more failure."""
        bound_s = pause_s(self._failures, first_s=self._first_s, cap_s=self._cap_s)
        self._failures += 1
        return self._rng.uniform(0.0, bound_s)

    def reset(self) -> None:
        """Begins anew, after a success."""
        self._failures = 0
