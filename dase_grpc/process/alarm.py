"""The alarm of a node whose compute thread hangs in the environment: it says so, says farewell, ends."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dase_grpc.errors import EnvironmentHangsError
from dase_grpc.process.ending import end_now
from dase_grpc.process.watchdog import Watch, say_where, watchdog

FAREWELL_GRACE_S: Final = 10.0
"""How long the event loop has, from the alarm on, to give the lease back; then the process ends without."""

log = logging.getLogger("dase")


class HangAlarm:
    """Tells an event loop that a thread hangs in the environment; `raised` then holds the error."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._over = threading.Event()
        self.raised: asyncio.Future[None] = loop.create_future()

    @contextmanager
    def watching(self, watch: Watch, *, timeout_s: float) -> Iterator[None]:
        """Looks at the watch within the block.

        If it does not end within `FAREWELL_GRACE_S` after the alarm, the process does.
        """
        with watchdog([watch], timeout_s=timeout_s, on_hang=self._on_hang):
            try:
                yield
            finally:
                self._over.set()

    async def unless_hanging(self, *others: "asyncio.Future[None]") -> None:
        """Returns when one of the others is done.

        Raises:
            EnvironmentHangsError: the alarm came first.
        """
        await asyncio.wait({self.raised, *others}, return_when=asyncio.FIRST_COMPLETED)
        if not any(other.done() for other in others):
            self.raised.result()

    def _on_hang(self, watch: Watch, error: EnvironmentHangsError) -> None:
        say_where(watch)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._raise, error)
        if not self._over.wait(FAREWELL_GRACE_S):
            log.error("error: %s", error)
            end_now(error.exit_code)

    def _raise(self, error: EnvironmentHangsError) -> None:
        if not self.raised.done():
            self.raised.set_exception(error)
            self.raised.exception()  # whether or not somebody waits
