"""The one table between this project's refusals and gRPC statuses, and the two places that apply it."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import grpc
from grpc import StatusCode
from grpc.aio import AioRpcError, ServicerContext

from dase_grpc.errors import (
    AgentTakenError,
    BufferGoneError,
    CapacityError,
    DaseError,
    DrainingError,
    MalformedError,
    NotJoinedError,
    NotPermittedError,
    OverloadedError,
    RefusalError,
    RunMismatchError,
    SchemaMismatchError,
    SequenceGapError,
    StaleLeaseError,
    StalePolicyError,
    TooManyWritersError,
    UnauthenticatedError,
    UnreachableError,
    WriterForgottenError,
)

STATUS: Final[Mapping[type[RefusalError], StatusCode]] = {
    UnauthenticatedError: StatusCode.UNAUTHENTICATED,
    NotPermittedError: StatusCode.PERMISSION_DENIED,
    MalformedError: StatusCode.INVALID_ARGUMENT,
    SchemaMismatchError: StatusCode.FAILED_PRECONDITION,
    RunMismatchError: StatusCode.FAILED_PRECONDITION,
    NotJoinedError: StatusCode.FAILED_PRECONDITION,
    BufferGoneError: StatusCode.FAILED_PRECONDITION,
    CapacityError: StatusCode.RESOURCE_EXHAUSTED,
    SequenceGapError: StatusCode.OUT_OF_RANGE,
    TooManyWritersError: StatusCode.RESOURCE_EXHAUSTED,
    WriterForgottenError: StatusCode.FAILED_PRECONDITION,
    AgentTakenError: StatusCode.ALREADY_EXISTS,
    StaleLeaseError: StatusCode.ABORTED,
    StalePolicyError: StatusCode.FAILED_PRECONDITION,
    OverloadedError: StatusCode.RESOURCE_EXHAUSTED,
    DrainingError: StatusCode.UNAVAILABLE,
    UnreachableError: StatusCode.UNAVAILABLE,
}

REFUSAL_KEY: Final = "dase-refusal"
_BY_NAME: Final = {error.__name__: error for error in STATUS}
_UNREACHABLE: Final = (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.CANCELLED)

Context = ServicerContext[Any, Any]


@asynccontextmanager
async def refusals(context: Context) -> AsyncIterator[None]:
    """Answers a refusal raised inside with its status and its sentence; a bug passes through."""
    try:
        yield
    except RefusalError as error:
        trailer = ((REFUSAL_KEY, type(error).__name__),)
        await context.abort(STATUS[type(error)], str(error), trailer)


@contextmanager
def service(address: str) -> Iterator[None]:
    """Turns a failed call on the service at `address` into the refusal it stands for.

    Raises:
        RefusalError: the very subclass that the service raised; UnreachableError when the call did
            not reach it or was cut off.
        DaseError: any other status, i.e. a bug of the service; named with its code.
    """
    try:
        yield
    except AioRpcError as error:
        raise refusal_of(error, address) from error


def refusal_of(error: AioRpcError, address: str) -> DaseError:
    """The error of ours that a failed call stands for."""
    name = dict(error.trailing_metadata() or ()).get(REFUSAL_KEY)
    details = error.details() or "no details"
    if isinstance(name, str) and name in _BY_NAME:
        return _BY_NAME[name](details)
    code: grpc.StatusCode = error.code()
    if code in _UNREACHABLE:
        return UnreachableError(
            f"the replay service at {address} does not answer ({code.name}); see whether it still runs, and "
            f"whether this machine reaches it"
        )
    return DaseError(f"the replay service at {address} failed ({code.name}: {details}); see its log")
