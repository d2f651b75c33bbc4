"""Which streams of a service are open, and how it ends them all when it shuts down: with the same refusal."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from dase_grpc.errors import DrainingError
from dase_grpc.wire.status import Context

T = TypeVar("T")

CALLS_END_S: Final = 5.0
"""How long calls that were cut off may take to end once the server has; they do so at once."""


class Draining:
    """Ends the streams of a service. Lives on one event loop.

    Attributes:
        open_streams: how many are open, by the names of the calls, which are those given.
    """

    def __init__(self, *rpcs: str) -> None:
        self.open_streams = dict.fromkeys(rpcs, 0)
        self._begun = asyncio.Event()

    def begin(self) -> None:
        """Ends every open stream, and every one to come."""
        self._begun.set()

    async def serve(
        self, context: Context, stream: Callable[[Context], Coroutine[Any, Any, T]], *, rpc: str
    ) -> T:
        """Runs a stream's body to its end, or until the service drains; the body has ended then.

        Raises:
            DrainingError: the service drains.
            RefusalError: whatever the body raised.
        """
        self.open_streams[rpc] += 1
        try:
            return await self._serve(context, stream)
        finally:
            self.open_streams[rpc] -= 1

    async def _serve(self, context: Context, stream: Callable[[Context], Coroutine[Any, Any, T]]) -> T:
        # else it goes out with the first message, and a stream that ends in between gets no status
        await context.send_initial_metadata(())
        body = asyncio.ensure_future(stream(context))
        drained = asyncio.ensure_future(self._begun.wait())
        try:
            await asyncio.wait((body, drained), return_when=asyncio.FIRST_COMPLETED)
            if not body.done():
                raise DrainingError("the replay service is shutting down")
            return body.result()
        finally:
            body.cancel()
            drained.cancel()
            await asyncio.gather(body, drained, return_exceptions=True)


async def calls_ended() -> None:
    """Waits until all other tasks have ended, those of calls that were still open after the server's grace.

    gRPC does not wait for them. A loop that ended earlier would cancel them once more, and gRPC would write
    a traceback for each, past the log.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=CALLS_END_S)
