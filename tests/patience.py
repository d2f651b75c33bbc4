"""How long tests wait for what has to come."""

import time
from collections.abc import Callable

PATIENCE_S = 240.0
"""Only what is dead, or waits for itself, takes as long, however busy the machine is.

pytest's own limit, in pyproject.toml, is longer, so that a wait in vain says what it was for.
"""


def wait_until(holds: Callable[[], bool], said: Callable[[], str] = str) -> None:
    """Looks again and again until something holds; where it does not come, the error is what was `said`."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)
