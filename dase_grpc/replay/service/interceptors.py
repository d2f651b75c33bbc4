"""Interceptors before every servicer: they refuse what is unreadable and count every call."""

import asyncio
import inspect
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from dase_grpc.errors import MalformedError, OverloadedError
from dase_grpc.metrics.buffer import Calls
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


class Unreadable:
    """Stands for a request whose bytes are no message, or more than `limit`.

    gRPC would answer UNKNOWN with an error of the protobuf library, and write its traceback into the log.
    """

    def __init__(self, size: int, *, limit: int | None = None) -> None:
        self.size = size
        self.limit = limit


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
            known = self._wrapped[method] = (handler, self._wrap(method, handler))
        return known[1]

    @abstractmethod
    def _wrap(self, method: str, handler: Handler) -> Handler:
        """The handler that stands before that of a method."""


class Guard(Wrapping):
    """Wraps the methods of all servicers of one server. Lives on one event loop.

    A request that is no message, or too long to be kept, is refused with MalformedError: here where a method
    takes one request, and by `read` and `read_first`, which servicers use, where it takes a stream of them. A
    caller that the door, where there is one, does not let in is refused first. A call that comes while
    `max_calls` of its method are open is refused with OverloadedError, and one of a method that its servicer
    does not implement with UNIMPLEMENTED.
    """

    def __init__(self, *, max_calls: int = MAX_CALLS, door: Door | None = None) -> None:
        super().__init__()
        self._door = door
        self._max_calls = max_calls
        self._open: Counter[str] = Counter()

    @property
    def open_calls(self) -> int:
        """Calls of all methods that are open."""
        return self._open.total()

    def _wrap(self, method: str, handler: Handler) -> Handler:
        kind, behaviour = behaviour_of(handler)
        generates = inspect.isasyncgenfunction(behaviour)
        limit = MAX_QUESTION_BYTES if generates or kind == "unary_stream" else None
        if generates:
            wrapped = self._generating(method, behaviour)
        elif inspect.iscoroutinefunction(behaviour):
            wrapped = self._answering(method, behaviour)
        else:  # all of our servicers' are; this one the generated code has put where a servicer has none
            wrapped = self._answering(method, _unimplemented(method))
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        made: Handler = make(
            wrapped,
            request_deserializer=_reading(handler.request_deserializer, limit),
            response_serializer=_writing(handler.response_serializer),
        )
        return made

    def _answering(self, method: str, behaviour: Behaviour) -> Behaviour:
        async def answer(request: Any, context: Context) -> Any:
            async with refusals(context):
                with self._let_in(method, context), self._admitted(method):
                    return await behaviour(_require_readable(request), context)

        return answer

    def _generating(self, method: str, behaviour: Behaviour) -> Behaviour:
        async def answers(requests: Any, context: Context) -> AsyncIterator[Any]:
            async with refusals(context):
                with self._let_in(method, context), self._admitted(method):
                    async for answer in behaviour(_readable(requests), context):
                        yield answer

        return answers

    def _let_in(self, method: str, context: Context) -> AbstractContextManager[None]:
        return nullcontext() if self._door is None else self._door.call(method, context)

    @contextmanager
    def _admitted(self, method: str) -> Iterator[None]:
        if self._open[method] >= self._max_calls:
            raise OverloadedError(
                f"{self._max_calls} calls of {method.rpartition('/')[2]} are open, as many as the service "
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
    """A stream's next request, or `grpc.aio.EOF`.

    Raises:
        MalformedError: its bytes are no message.
    """
    return _require_readable(await context.read())


async def read_first(context: Context, *, within_s: float = HEADER_S) -> Any:
    """A stream's first request, or `grpc.aio.EOF`.

    Raises:
        MalformedError: its bytes are no message, or it does not come in time.
    """
    try:
        async with asyncio.timeout(within_s):
            return await read(context)
    except TimeoutError:
        raise MalformedError(
            f"the first message of this stream did not come within {within_s:g} s; send it when you open one"
        ) from None


def _require_readable(request: Any) -> Any:
    if isinstance(request, Unreadable) and request.limit is not None:
        raise MalformedError(
            f"a request of this method has at most {request.limit} bytes, not {request.size}"
        )
    if isinstance(request, Unreadable):
        raise MalformedError(
            f"the {request.size} bytes of this message are not what the method takes; make it from the "
            f"service's .proto files"
        )
    return request


async def _readable(requests: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield _require_readable(request)


def _reading(parse: Callable[[bytes], Any] | None, limit: int | None) -> Callable[[bytes], Any] | None:
    if parse is None:
        return None

    def parsed(data: bytes) -> Any:
        if limit is not None and len(data) > limit:
            return Unreadable(len(data), limit=limit)
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


def behaviour_of(handler: Handler) -> tuple[str, Behaviour]:
    """A method's kind, such as `stream_unary`, and the function that serves it."""
    takes = "stream" if handler.request_streaming else "unary"
    gives = "stream" if handler.response_streaming else "unary"
    kind = f"{takes}_{gives}"
    return kind, getattr(handler, kind)


class Accounting(Wrapping):
    """Notes in a `Calls` what every method of a server does. Stands before the others, to see how calls end.

    Costs an addition a message and some microseconds a call. Calls that are answered once are timed
    here, from their first byte to their answer; the servicers of streams time their own requests.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def _wrap(self, method: str, handler: Handler) -> Handler:
        rpc = method.rpartition("/")[2]
        kind, behaviour = behaviour_of(handler)
        wrap = self._generating if inspect.isasyncgenfunction(behaviour) else self._answering
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        made: Handler = make(
            wrap(rpc, kind, behaviour),
            request_deserializer=_measured_in(handler.request_deserializer, rpc, self._calls.received_bytes),
            response_serializer=_measured_out(handler.response_serializer, rpc, self._calls.sent_bytes),
        )
        return made

    def _answering(self, rpc: str, kind: str, behaviour: Behaviour) -> Behaviour:
        clock = self._calls.clock
        observe = self._calls.requests(rpc).observe if kind.endswith("_unary") else None

        async def answer(request: Any, context: Context) -> Any:
            began = clock()
            with self._noted(rpc, kind, context):
                answered = await behaviour(request, context)
            if observe is not None:
                observe(clock() - began)
            return answered

        return answer

    def _generating(self, rpc: str, kind: str, behaviour: Behaviour) -> Behaviour:
        async def answers(requests: Any, context: Context) -> AsyncIterator[Any]:
            with self._noted(rpc, kind, context):
                async for answer in behaviour(requests, context):
                    yield answer

        return answers

    @contextmanager
    def _noted(self, rpc: str, kind: str, context: Context) -> Iterator[None]:
        code = "UNKNOWN"  # what gRPC answers after an error that is none of ours
        try:
            yield
            code = _name(context.code())
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


def _measured_in(
    parse: Callable[[bytes], Any] | None, rpc: str, bytes_by_rpc: Counter[str]
) -> Callable[[bytes], Any]:
    def parsed(data: bytes) -> Any:
        bytes_by_rpc[rpc] += len(data)
        return data if parse is None else parse(data)

    return parsed


def _measured_out(
    serialise: Callable[[Any], bytes] | None, rpc: str, bytes_by_rpc: Counter[str]
) -> Callable[[Any], bytes]:
    def serialised(message: Any) -> bytes:
        data: bytes = message if serialise is None else serialise(message)
        bytes_by_rpc[rpc] += len(data)
        return data

    return serialised
