"""Whether a node's event loop turns, asked from outside it."""

import asyncio
import threading
from collections.abc import Callable
from typing import Final

ANSWER_S: Final = 3.0
"""How long the event loop may take to answer a probe; a probe has to wait longer than that."""


def loop_turns(*, within_s: float = ANSWER_S) -> Callable[[], bool]:
    """Asks the running loop, when called on another thread, for a sign of life; waits that long for it."""
    loop = asyncio.get_running_loop()

    def ask() -> bool:
        answered = threading.Event()
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # the loop has been closed meanwhile
            return False
        return answered.wait(within_s)

    return ask
