"""The open streams of a service, and their end: each with the refusal that says why."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from dase_grpc.errors import DrainingError, RefusalError
from dase_grpc.replay.wire.status import Context

T = TypeVar("T")

CALLS_END_S: Final = 5.0
"""How long calls that were cut off may take to end once the server has; they do so at once."""


@dataclass(eq=False)
class _Stream:
    """An open stream; `end` is set to what it is to end with, whatever its body waits for."""

    end: asyncio.Future[RefusalError]
    require_valid: Callable[[], object] = lambda: None


class Draining:
    """Ends the streams of a service. Lives on one event loop.

    A stream that only waits does not find out by itself that it may not go on: see `require` and `look`.

    Attributes:
        open_streams: how many are open, by the names of the calls, which are those given.
    """

    def __init__(self, *rpcs: str) -> None:
        self.open_streams = dict.fromkeys(rpcs, 0)
        self._streams: dict[Context, _Stream] = {}
        self._begun = False

    def begin(self) -> None:
        """Ends every open stream, and every one to come, with DrainingError."""
        self._begun = True
        for stream in self._streams.values():
            _end(stream, _draining())

    def require(self, context: Context, valid: Callable[[], object]) -> None:
        """Has `look` call `valid`, which raises the refusal that an open stream is to end with."""
        self._streams[context].require_valid = valid

    def look(self) -> None:
        """Ends the open streams that may not go on."""
        for stream in list(self._streams.values()):
            try:
                stream.require_valid()
            except RefusalError as refusal:
                _end(stream, refusal)

    async def serve(
        self, context: Context, stream: Callable[[Context], Coroutine[Any, Any, T]], *, rpc: str
    ) -> T:
        """Runs a stream's body to its end, or until the service ends it; the body has ended then.

        Raises:
            DrainingError: the service drains.
            RefusalError: whatever the body raised, or `look` found.
        """
        self.open_streams[rpc] += 1
        try:
            return await self._serve(context, stream)
        finally:
            self.open_streams[rpc] -= 1

    async def _serve(self, context: Context, stream: Callable[[Context], Coroutine[Any, Any, T]]) -> T:
        # else it goes out with the first message, and a stream that ends in between gets no status
        await context.send_initial_metadata(())
        known = self._streams[context] = _Stream(asyncio.get_running_loop().create_future())
        if self._begun:
            _end(known, _draining())
        body = asyncio.ensure_future(stream(context))
        try:
            await asyncio.wait((body, known.end), return_when=asyncio.FIRST_COMPLETED)
            if not body.done():
                raise known.end.result()
            return body.result()
        finally:
            del self._streams[context]
            body.cancel()
            known.end.cancel()
            await asyncio.gather(body, return_exceptions=True)


class Drained:
    """A servicer whose streams a `Draining` ends."""

    _draining: Draining

    @property
    def open_streams(self) -> dict[str, int]:
        """How many streams are open, by call."""
        return dict(self._draining.open_streams)

    def drain(self) -> None:
        """Ends every open stream, and every one to come, with UNAVAILABLE."""
        self._draining.begin()

    def look(self) -> None:
        """Ends the open streams whose lease was given back or given to another, those that idle included."""
        self._draining.look()


def _end(stream: _Stream, refusal: RefusalError) -> None:
    if not stream.end.done():
        stream.end.set_result(refusal)


def _draining() -> DrainingError:
    return DrainingError("the replay service is shutting down")


async def calls_ended() -> None:
    """Waits until all other tasks have ended, those of calls that were still open after the server's grace.

    gRPC does not wait for them. A loop that ended earlier would cancel them once more, and gRPC would write
    a traceback for each, past the log.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=CALLS_END_S)
