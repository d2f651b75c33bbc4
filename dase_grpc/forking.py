"""What is not for a process that is forked from this one, as the workers of many environments are.

Such a process holds whatever this one held, for as long as it lives: a lock, a port. It may live longer.
"""

import os
from contextlib import suppress
from typing import Final, Protocol
from weakref import WeakSet


class Held(Protocol):
    """Something that `close` lets go of in this process, and not in the one that it was opened in."""

    def close(self) -> None:
        """Lets go of it."""
        ...


_held: Final[WeakSet[Held]] = WeakSet()


def closed_in_forks(held: Held) -> None:
    """From now on it is closed in whatever is forked from this process; it may be closed before."""
    _held.add(held)


def _close_in_fork() -> None:
    for held in list(_held):
        with suppress(OSError):
            held.close()


os.register_at_fork(after_in_child=_close_in_fork)
