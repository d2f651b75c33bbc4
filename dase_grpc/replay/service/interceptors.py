"""Interceptors before every servicer: they count every call, and refuse what may not be made or read."""

import asyncio
import inspect
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from dase_grpc.errors import MalformedError, OverloadedError
from dase_grpc.metrics.calls import Calls
from dase_grpc.replay.security.door import Door
from dase_grpc.replay.wire.status import Context, refusals

MAX_CALLS: Final = 2_048
"""Calls of one method that may be open at the same time, of all clients together."""

HEADER_S: Final = 10.0
"""How long a stream may stay open without its first message."""

MAX_QUESTION_BYTES: Final = 16 * 2**10
"""Of a request that a method may keep for as long as its stream is open: where one request is answered with a
stream, and in reflection. Idle streams would else hold 4 MiB each."""

Behaviour = Callable[[Any, Context], Any]
Handler = Any  # grpc.RpcMethodHandler, which cannot be subscripted at run time

_TYPES: Final = {
    "unary_unary": "unary",
    "stream_unary": "client_stream",
    "unary_stream": "server_stream",
    "stream_stream": "bidi_stream",
}
_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(frozen=True)
class Unreadable:
    """Stands for a request whose bytes are no message, or more than `limit`.

    gRPC would answer UNKNOWN with an error of the protobuf library, and write its traceback into the log.
    """

    size: int
    limit: int | None = None


class Wrapping(grpc.aio.ServerInterceptor):
    """Wraps each method of a server's servicers once, at its first call."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The wrapped handler of a method; nothing for a method that does not exist."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return handler
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            takes = "stream" if handler.request_streaming else "unary"
            gives = "stream" if handler.response_streaming else "unary"
            kind = f"{takes}_{gives}"
            behaviour, parse, serialise = self._wrap(method, kind, handler)
            make = getattr(grpc, f"{kind}_rpc_method_handler")
            wrapped = make(behaviour, request_deserializer=parse, response_serializer=serialise)
            known = self._wrapped[method] = (handler, wrapped)
        return known[1]

    @abstractmethod
    def _wrap(self, method: str, kind: str, handler: Handler) -> tuple[Behaviour, Any, Any]:
        """What serves a method, reads its requests and writes its responses instead of its handler's own.

        kind: such as `stream_unary`; the handler's attribute of this name serves it.
        """


def _surrounded(
    behaviour: Behaviour,
    around: Callable[[Context], AbstractAsyncContextManager[None]],
    *,
    take: Callable[[Any], Any] = lambda request: request,
) -> Behaviour:
    """A behaviour with a block around each of its calls, whose request or requests `take` looks at first."""

    async def answer(request: Any, context: Context) -> Any:
        async with around(context):
            return await behaviour(take(request), context)

    async def answers(requests: Any, context: Context) -> AsyncIterator[Any]:
        async with around(context):
            async for response in behaviour(take(requests), context):
                yield response

    return answers if inspect.isasyncgenfunction(behaviour) else answer


class Guard(Wrapping):
    """Refuses calls of all servicers of one server. Lives on one event loop.

    Whatever of our errors they raise is answered with its status. A request that is no message, or too long
    to be kept, is refused with MalformedError: here where a method takes one request, and by `read` and
    `read_first`, which servicers use, where it takes a stream of them. A caller that the door, where there is
    one, does not let in is refused first. A call that comes while MAX_CALLS of its method are open is refused
    with OverloadedError, and one of a method that its servicer does not implement with UNIMPLEMENTED.
    """

    def __init__(self, door: Door | None = None) -> None:
        super().__init__()
        self._door = door
        self._open: Counter[str] = Counter()

    def _wrap(self, method: str, kind: str, handler: Handler) -> tuple[Behaviour, Any, Any]:
        behaviour = getattr(handler, kind)
        generates = inspect.isasyncgenfunction(behaviour)
        if not generates and not inspect.iscoroutinefunction(behaviour):
            # all of our servicers' are; this one the generated code has put where a servicer has none
            behaviour = _unimplemented(method)
        return (
            _surrounded(
                behaviour, partial(self._around, method), take=_readable if generates else _require_readable
            ),
            _reading(
                handler.request_deserializer,
                MAX_QUESTION_BYTES if generates or kind == "unary_stream" else None,
            ),
            _writing(handler.response_serializer),
        )

    @asynccontextmanager
    async def _around(self, method: str, context: Context) -> AsyncIterator[None]:
        async with refusals(context):
            with (
                nullcontext() if self._door is None else self._door.call(method, context),
                self._admitted(method),
            ):
                yield

    @contextmanager
    def _admitted(self, method: str) -> Iterator[None]:
        if self._open[method] >= MAX_CALLS:
            raise OverloadedError(
                f"{MAX_CALLS} calls of {method.rpartition('/')[2]} are open, as many as the service "
                f"takes; try again later"
            )
        self._open[method] += 1
        try:
            yield
        finally:
            self._open[method] -= 1


def _unimplemented(method: str) -> Behaviour:
    """Answers as gRPC answers for a method that does not exist; the generated code would raise as well."""

    async def refuse(request: Any, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"this service does not implement {method}")

    return refuse


async def read(context: Context) -> Any:
    """A stream's next request, or `grpc.aio.EOF`."""
    return _require_readable(await context.read())


async def read_first(context: Context) -> Any:
    """A stream's first request, or `grpc.aio.EOF`."""
    try:
        async with asyncio.timeout(HEADER_S):
            return await read(context)
    except TimeoutError:
        raise MalformedError(
            f"the first message of this stream did not come within {HEADER_S:g} s; send it when you open one"
        ) from None


def _require_readable(request: Any) -> Any:
    if not isinstance(request, Unreadable):
        return request
    raise MalformedError(
        f"the {request.size} bytes of this message are not what the method takes; make it from the "
        f"service's .proto files"
        if request.limit is None
        else f"a request of this method has at most {request.limit} bytes, not {request.size}"
    )


async def _readable(requests: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield _require_readable(request)


def _reading(parse: Callable[[bytes], Any] | None, limit: int | None) -> Callable[[bytes], Any] | None:
    if parse is None:
        return None

    def parsed(data: bytes) -> Any:
        if limit is not None and len(data) > limit:
            return Unreadable(len(data), limit)
        try:
            return parse(data)
        except DecodeError:
            return Unreadable(len(data))

    return parsed


def _writing(serialise: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """Lets through what a servicer has made bytes of by itself."""

    def written(message: Any) -> bytes:
        if isinstance(message, bytes) or serialise is None:
            return message  # type: ignore[no-any-return]
        return serialise(message)

    return written


class Accounting(Wrapping):
    """Notes in a `Calls` what every method of a server does. Stands before the others, to see how calls end.

    Costs an addition a message and some microseconds a call. Calls that are answered once are timed
    here, from their first byte to their answer; the servicers of streams time their own requests.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def _wrap(self, method: str, kind: str, handler: Handler) -> tuple[Behaviour, Any, Any]:
        rpc, parse, serialise = (
            method.rpartition("/")[2],
            handler.request_deserializer,
            handler.response_serializer,
        )
        received, sent = self._calls.received_bytes, self._calls.sent_bytes
        if kind.endswith("_unary"):
            self._calls.requests(rpc)  # is shown from now on

        def parsed(data: bytes) -> Any:
            received[rpc] += len(data)
            return data if parse is None else parse(data)

        def serialised(message: Any) -> bytes:
            data: bytes = message if serialise is None else serialise(message)
            sent[rpc] += len(data)
            return data

        return _surrounded(getattr(handler, kind), partial(self._noted, rpc, kind)), parsed, serialised

    @asynccontextmanager
    async def _noted(self, rpc: str, kind: str, context: Context) -> AsyncIterator[None]:
        code, began = "UNKNOWN", self._calls.clock()  # what gRPC answers after an error that is none of ours
        try:
            yield
            code = _name(context.code())
            if kind.endswith("_unary"):
                self._calls.requests(rpc).observe(self._calls.clock() - began)
        except grpc.aio.AbortError:
            code = _name(context.code())
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED.name
            raise
        finally:
            self._calls.handled[rpc, _TYPES[kind], code] += 1


def _name(code: Any) -> str:
    """The name of a status, which grpc.aio gives as a number where its types promise a StatusCode."""
    return code.name if isinstance(code, grpc.StatusCode) else _NAMES.get(code or 0, "UNKNOWN")
