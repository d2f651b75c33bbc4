"""Messages of InferenceService: observations and actions as packed rows, and the description of a policy."""

import math
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from dase_grpc.errors import DaseError, EnvironmentSpecError, MalformedError
from dase_grpc.inference.v1.inference_pb2 import ActRequest, ActResponse, DescribePolicyResponse
from dase_grpc.progress import several
from dase_grpc.replay.wire.addresses import MAX_MESSAGE_BYTES
from dase_grpc.schema import Array

ROWS_BYTES: Final = MAX_MESSAGE_BYTES - 1024
"""Bytes of rows in a message, at most."""

OBSERVATION: Final = np.dtype("<f4")

Actions = npt.NDArray[Any]


@dataclass(frozen=True)
class PolicyDescription:
    """Which policy it is, what it observes and how it acts; see the .proto file for each."""

    environment: str
    observation_shape: tuple[int, ...]
    action_shape: tuple[int, ...]
    action_dtype: np.dtype[Any]
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    max_rows: int
    agent: str
    algorithm: str
    step: int
    score: float | None = None
    commit: str = ""

    @property
    def observation_size(self) -> int:
        """Components of an observation."""
        return math.prod(self.observation_shape)

    def to_proto(self) -> DescribePolicyResponse:
        """The message that states it."""
        return DescribePolicyResponse(**{**vars(self), "action_dtype": self.action_dtype.name})

    @classmethod
    def from_proto(cls, message: DescribePolicyResponse) -> Self:
        """What a message states."""
        several = ("observation_shape", "action_shape", "action_low", "action_high")
        stated: dict[str, Any] = {name: tuple(getattr(message, name)) for name in several}
        for name in ("environment", "max_rows", "agent", "algorithm", "step", "commit"):
            stated[name] = getattr(message, name)
        score = message.score if message.HasField("score") else None
        return cls(**stated, action_dtype=np.dtype(message.action_dtype), score=score)


def rows_in_a_message(observation_size: int, action: Actions) -> int:
    """How many observations fit into a message, and their actions, of which `action` is one, into another."""
    return ROWS_BYTES // max(observation_size * OBSERVATION.itemsize, action.nbytes)


def read_observations(request: ActRequest, policy: PolicyDescription) -> Array:
    """The observations of a request, (B, m) float32.

    Raises:
        MalformedError: they are too many or too few, not this policy's, or not finite.
    """
    rows, size = request.rows, policy.observation_size
    if not 1 <= rows <= policy.max_rows:
        raise MalformedError(f"a request holds 1 to {policy.max_rows} observations (rows), not {rows}")
    found, expected = len(request.observations), rows * size * OBSERVATION.itemsize
    if found != expected:
        hint = "; as float64 they would be twice as long" if found == 2 * expected else ""
        raise MalformedError(
            f"{several(rows, 'observation')} of {size} float32 components are {expected} bytes, not "
            f"{found}{hint}"
        )
    observations: Array = np.frombuffer(request.observations, OBSERVATION).reshape(rows, size)
    if (problem := not_finite(observations)) is not None:
        raise MalformedError(problem)
    return observations


def not_finite(observations: Array) -> str | None:
    """The first component of (B, m) observations that is not finite, in words; None where all are."""
    finite = np.isfinite(observations)
    if finite.all():
        return None
    row, component = np.unravel_index(int(finite.argmin()), finite.shape)
    found = observations[row, component]
    return f"component {component} of observation {row} is {found}; every component has to be finite"


def to_rows(observation: Any, policy: PolicyDescription) -> tuple[Array, bool]:
    """Observations as (B, *shape) float32, and whether one was given instead of several.

    Raises:
        EnvironmentSpecError: they are not the policy's, or they are none or too many.
    """
    return rows_of(observation, policy.observation_shape, policy.environment, most=policy.max_rows)


def rows_of(
    observation: Any, shape: tuple[int, ...], environment: str, *, most: int | None = None
) -> tuple[Array, bool]:
    """As `to_rows`, of a shape; too large a number becomes ±inf."""
    try:
        given = np.asarray(observation)
        if given.dtype.kind not in "fiubO":
            raise TypeError
        with np.errstate(over="ignore"):
            rows = given.astype(OBSERVATION)
    except (TypeError, ValueError, OverflowError):
        raise EnvironmentSpecError(
            f"what was given is no array of numbers; of {environment} each observation has the shape {shape}"
        ) from None
    if rows.shape == shape:
        return rows[np.newaxis], True
    if rows.shape[1:] != shape or not 1 <= len(rows) <= (most or len(rows)):
        limit = "" if most is None else f", and up to {most} go at once"
        raise EnvironmentSpecError(
            f"observations of shape {rows.shape} were given; of {environment} each has the shape "
            f"{shape}{limit}"
        )
    return rows, False


def write_observations(rows: Array) -> ActRequest:
    """The request for the actions of observations, a row of the first axis each."""
    return ActRequest(observations=rows.tobytes(), rows=len(rows))


def write_actions(actions: Actions) -> ActResponse:
    """The response that holds them."""
    return ActResponse(actions=actions.astype(actions.dtype.newbyteorder("<"), copy=False).tobytes())


def read_actions(response: ActResponse, rows: int, policy: PolicyDescription) -> Actions:
    """The actions of a response, (rows, *action_shape), nobody else's.

    Raises:
        DaseError: they are not those of as many rows of this policy.
    """
    shape, dtype = (rows, *policy.action_shape), policy.action_dtype.newbyteorder("<")
    if len(response.actions) != math.prod(shape) * dtype.itemsize:
        raise DaseError(
            f"{len(response.actions)} bytes of actions came for {several(rows, 'observation')}; another "
            f"policy may be served there by now, so make a new client"
        )
    return np.frombuffer(response.actions, dtype).reshape(shape).astype(policy.action_dtype)
