"""A client's end of a stream: each way in which it can fail is one of our errors."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from grpc.aio import AioRpcError

from dase_grpc.errors import DaseError, UnreachableError
from dase_grpc.replay.wire.status import ADMITTED_KEY, refusal_of

_BROKEN_WRITE: Final = "Internal error from Core"
_STATUS_POLL_S: Final = 0.01
_STATUS_POLLS: Final = 20


class _ClientCall:
    """What a client's ends of all streams have in common.

    The methods raise what the service refused the stream with, UnreachableError when the connection
    broke, `cancel` was called or the service ended the stream early, and DaseError for a bug of the
    service. None has a time limit of its own: keepalive ends a connection that is dead.
    """

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self._status: AioRpcError | None = None
        call.add_done_callback(self._keep_status)

    async def write(self, message: Any) -> None:
        """Sends a message; waits while the service is behind."""
        try:
            await self._call.write(message)
        except (AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            raise await self._reason(error) from None

    async def end_writing(self) -> None:
        """Says that no message follows."""
        try:
            await self._call.done_writing()
        except (grpc.aio.InternalError, asyncio.CancelledError) as error:
            raise await self._reason(error) from None

    def cancel(self) -> None:
        """Ends the stream; has no effect once it has ended."""
        self._call.cancel()

    async def _reason(self, error: BaseException) -> DaseError:
        """Why the stream ended; raises `error` again if it is the cancellation of the current task.

        grpc.aio gives a stream that ends under a write a status of its own, before or after the
        service's arrives; so the service's is kept if it comes first, and else gets a moment.
        """
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise error
            return UnreachableError(f"the stream to the replay service at {self._address} was cancelled")
        if (status := await self._status_soon()) is not None:
            return self._meaning(status)
        return UnreachableError(f"the stream to the replay service at {self._address} broke under a write")

    async def _status_soon(self) -> AioRpcError | None:
        """The service's status, if that comes in a moment."""
        for _ in range(_STATUS_POLLS):
            self._keep_status()
            if self._status is not None:
                return self._status
            await asyncio.sleep(_STATUS_POLL_S)
        return None

    def _meaning(self, status: AioRpcError) -> DaseError:
        if status.code() is grpc.StatusCode.OK:
            return UnreachableError(f"the replay service at {self._address} ended the stream too early")
        return refusal_of(status, self._address)

    def _keep_status(self, _: Any = None) -> None:
        if self._status is None and self._call.done():
            code, details = _at_once(self._call.code()), _at_once(self._call.details())
            if details != _BROKEN_WRITE:
                trailer = _at_once(self._call.trailing_metadata())
                self._status = AioRpcError(code, grpc.aio.Metadata(), trailer, details)


class ClientStream(_ClientCall):
    """One call that answers with a stream; where it also takes one, a task may write while another reads."""

    def __init__(self, call: Any, address: str) -> None:
        super().__init__(call, address)
        # read() of a call that a failed write has ended would not give what is still to be read,
        # and the service's status comes only after all of that
        self._answers: AsyncIterator[Any] = aiter(call)

    async def connected(self) -> None:
        """Returns once the service has admitted the stream; raises what it was refused with.

        An older service takes each call at first; what it does not refuse in a moment `read` raises.
        """
        try:
            metadata = await self._call.initial_metadata()
            admitted = ADMITTED_KEY in dict(metadata or ())
            status = None if admitted else await self._status_soon()
        except (AioRpcError, asyncio.CancelledError) as error:
            raise await self._reason(error) from None
        if status is not None:
            raise self._meaning(status)

    async def read(self) -> Any:
        """The next message; waits for it."""
        try:
            return await anext(self._answers)
        except (AioRpcError, StopAsyncIteration, asyncio.CancelledError) as error:
            raise await self._reason(error) from None

    async def read_end(self) -> None:
        """Waits until the service ends the stream well; whatever it still sends is dropped."""
        try:
            async for _ in self._answers:
                pass
        except (AioRpcError, asyncio.CancelledError) as error:
            raise await self._reason(error) from None
        if self._status is not None and self._status.code() is not grpc.StatusCode.OK:
            raise self._meaning(self._status)


class ClientUpload(_ClientCall):
    """One call that takes a stream and answers once."""

    async def answer(self) -> Any:
        """The answer, after `end_writing`; waits for it."""
        try:
            return await self._call
        except (AioRpcError, asyncio.CancelledError) as error:
            raise await self._reason(error) from None


@asynccontextmanager
async def opened_in_time(stream: _ClientCall, address: str, timeout_s: float) -> AsyncIterator[None]:
    """Limits how long a stream's start may take. UnreachableError if longer than that."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        stream.cancel()
        raise UnreachableError(
            f"the replay service at {address} did not answer within {timeout_s:g} s"
        ) from None


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that does not wait; those of a call that is done do not."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise TypeError(f"{coroutine!r} waits")


class OneStream:
    """What stands on one stream, which is opened later."""

    _stream: ClientStream | None = None

    @property
    def _opened(self) -> ClientStream:
        """The stream; a bug where it has not been opened."""
        if self._stream is None:
            raise TypeError("the stream has not been opened")
        return self._stream

    def cancel(self) -> None:
        """Ends the stream; has no effect once it has ended."""
        if self._stream is not None:
            self._stream.cancel()
