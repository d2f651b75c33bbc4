"""An interceptor that counts a server's calls, their statuses and bytes, and times the short ones."""

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from dase_grpc.metrics.calls import Calls
from dase_grpc.replay.service.interceptors import Behaviour, Handler, Wrapping, behaviour_of
from dase_grpc.replay.wire.status import Context

_TYPES: Final = {
    "unary_unary": "unary",
    "stream_unary": "client_stream",
    "unary_stream": "server_stream",
    "stream_stream": "bidi_stream",
}
_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


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
