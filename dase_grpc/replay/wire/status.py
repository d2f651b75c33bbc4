"""The one table between this project's refusals and gRPC statuses, and the two places that apply it."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import grpc
from grpc import StatusCode
from grpc.aio import ServicerContext

from dase_grpc import errors
from dase_grpc.errors import DaseError, RefusalError, UnreachableError

STATUS: Final[Mapping[type[RefusalError], StatusCode]] = {
    errors.UnauthenticatedError: StatusCode.UNAUTHENTICATED,
    errors.NotPermittedError: StatusCode.PERMISSION_DENIED,
    errors.MalformedError: StatusCode.INVALID_ARGUMENT,
    errors.SchemaMismatchError: StatusCode.FAILED_PRECONDITION,
    errors.RunMismatchError: StatusCode.FAILED_PRECONDITION,
    errors.NotJoinedError: StatusCode.FAILED_PRECONDITION,
    errors.BufferGoneError: StatusCode.FAILED_PRECONDITION,
    errors.CapacityError: StatusCode.RESOURCE_EXHAUSTED,
    errors.SequenceGapError: StatusCode.OUT_OF_RANGE,
    errors.TooManyWritersError: StatusCode.RESOURCE_EXHAUSTED,
    errors.WriterForgottenError: StatusCode.FAILED_PRECONDITION,
    errors.AgentTakenError: StatusCode.ALREADY_EXISTS,
    errors.StaleLeaseError: StatusCode.ABORTED,
    errors.StalePolicyError: StatusCode.FAILED_PRECONDITION,
    errors.OverloadedError: StatusCode.RESOURCE_EXHAUSTED,
    errors.DrainingError: StatusCode.UNAVAILABLE,
    errors.UnreachableError: StatusCode.UNAVAILABLE,
}

REFUSAL_KEY: Final = "dase-refusal"
ADMITTED_KEY: Final = "dase-admitted"
"""In the initial metadata of a stream that is served; those of one that is refused do not have it."""
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


REPLAY: Final = "replay service"


@contextmanager
def service(address: str, what: str = REPLAY) -> Iterator[None]:
    """Turns a failed call on the service at `address` into the error of ours that it stands for.

    That is the very refusal that the service raised, an UnreachableError where the call did not reach it or
    was cut off, and a DaseError for any other status, i.e. a bug of the service. `what` names the service.
    """
    try:
        yield
    except grpc.RpcError as error:  # of an event loop's call or a blocking one
        raise refusal_of(error, address, what) from error


def refusal_of(error: Any, address: str, what: str = REPLAY) -> DaseError:
    """The error of ours that a failed call, a grpc.RpcError, stands for."""
    name = dict(error.trailing_metadata() or ()).get(REFUSAL_KEY)
    details = error.details() or "no details"
    if isinstance(name, str) and name in _BY_NAME:
        return _BY_NAME[name](details)
    code: grpc.StatusCode = error.code()
    if code in _UNREACHABLE:
        return UnreachableError(
            f"the {what} at {address} does not answer ({code.name}); see whether it still runs, and "
            f"whether this machine reaches it"
        )
    return DaseError(f"the {what} at {address} failed ({code.name}: {details}); see its log")
