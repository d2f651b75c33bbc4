"""How long to wait before the next attempt: longer after each failure, and never in step with others."""

import random
from typing import Final

FIRST_S: Final = 0.1
CAP_S: Final = 2.0


class Backoff:
    """Pauses between attempts, drawn uniformly below a bound that doubles from `first_s` to `cap_s`."""

    def __init__(self, rng: random.Random, *, first_s: float = FIRST_S, cap_s: float = CAP_S) -> None:
        self._rng = rng
        self._first_s = first_s
        self._cap_s = cap_s
        self._bound_s = first_s

    def next_s(self) -> float:
        """The pause after one more failure."""
        bound_s = self._bound_s
        self._bound_s = min(2 * bound_s, self._cap_s)
        return self._rng.uniform(0.0, bound_s)

    def reset(self) -> None:
        """Begins anew, after a success."""
        self._bound_s = self._first_s
