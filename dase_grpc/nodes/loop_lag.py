"""How late an event loop is: what every stream of a node waits for before anything else."""

import asyncio
from collections.abc import Callable
from typing import Final

LOOK_EVERY_S: Final = 0.25


async def watch_loop_lag(observe: Callable[[float], None], *, every_s: float = LOOK_EVERY_S) -> None:
    """Observes how many seconds later than asked this loop wakes a task, again and again, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + every_s
        await asyncio.sleep(every_s)
        observe(max(0.0, loop.time() - due))
