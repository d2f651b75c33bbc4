"""The packed transition: one fixed-width row of 4-byte columns, the same bytes everywhere.

Storage, wire and tensors share the layout
`observation | action | next_observation | reward | bootstrap | agent_id | policy_version`,
so `observation | action` is one contiguous slice and every column is a view.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from dase_grpc.errors import MalformedError, SchemaMismatchError

Array = npt.NDArray[np.float32]

FORMAT_VERSION: Final = 1
MAX_ROW_BYTES: Final = 512 * 1024
LEAST_ROW_BYTES: Final = 28
"""Of one observation and one action of one component each."""

HUGE: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class TransitionSchema:
    """What one transition of an environment looks like, and which environment it is.

    Attributes:
        environment: the environment's id or `package.module:Factory`.
        observation_size: m, the number of observation components.
        action_size: n, the number of action components.
        action_low, action_high: (n,) bounds in the environment's units; rows hold actions in [-1, 1].

    Raises:
        MalformedError: a size below 1, bounds that are not n, finite and increasing, or too wide a row.
    """

    environment: str
    observation_size: int
    action_size: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.observation_size < 1 or self.action_size < 1:
            raise MalformedError(
                f"a transition needs at least 1 observation and 1 action component, "
                f"not {self.observation_size} and {self.action_size}"
            )
        if not len(self.action_low) == len(self.action_high) == self.action_size:
            raise MalformedError(
                f"{self.action_size} action components need as many bounds, "
                f"not {len(self.action_low)} lower and {len(self.action_high)} upper ones"
            )
        for index, (low, high) in enumerate(zip(self.action_low, self.action_high, strict=True)):
            _check_bounds(index, low, high)
        if self.row_bytes > MAX_ROW_BYTES:
            raise MalformedError(
                f"one transition would take {self.row_bytes} bytes, over the limit of {MAX_ROW_BYTES}; "
                f"shrink the observation ({self.observation_size} components)"
            )

    @property
    def width(self) -> int:
        """Columns in a row."""
        return 2 * self.observation_size + self.action_size + 4

    @property
    def row_bytes(self) -> int:
        """Bytes in a row."""
        return 4 * self.width

    @property
    def float_width(self) -> int:
        """The leading columns that hold float32 values; the two after them are integers."""
        return self.width - 2

    @cached_property
    def columns(self) -> dict[str, slice]:
        """Where each named column lies in a row, in storage order."""
        m, n = self.observation_size, self.action_size
        sizes = {"observation": m, "action": n, "next_observation": m, "reward": 1, "bootstrap": 1}
        sizes |= {"agent_id": 1, "policy_version": 1}
        ends = zip(sizes.items(), accumulate(sizes.values()), strict=True)
        return {name: slice(end - size, end) for (name, size), end in ends}

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """A structured dtype over the same bytes: `rows.view(schema.dtype)[:, 0]["reward"]`."""
        m, n = self.observation_size, self.action_size
        return np.dtype(
            [
                ("observation", np.float32, (m,)),
                ("action", np.float32, (n,)),
                ("next_observation", np.float32, (m,)),
                ("reward", np.float32),
                ("bootstrap", np.float32),
                ("agent_id", np.int32),
                ("policy_version", np.uint32),
            ]
        )

    @cached_property
    def fingerprint(self) -> str:
        """A 64-digit hash of everything two sides must agree on before a row crosses the wire."""
        text = json.dumps(
            {
                "format": FORMAT_VERSION,
                "environment": self.environment,
                "columns": [(name, part.stop - part.start) for name, part in self.columns.items()],
                "dtypes": ["<f4"] * 5 + ["<i4", "<u4"],
                "action_low": [_exact(x) for x in self.action_low],
                "action_high": [_exact(x) for x in self.action_high],
            },
            sort_keys=True,
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def named(self, rows: Array) -> npt.NDArray[np.void]:
        """Views C-contiguous (N, width) float32 rows as (N,) structured records, without a copy."""
        return rows.view(self.dtype)[:, 0]

    def agent_ids(self, rows: Array) -> npt.NDArray[np.int32]:
        """The (N,) agent-id column of (N, width) rows, a view."""
        return rows[:, self.columns["agent_id"].start].view(np.int32)

    def policy_versions(self, rows: Array) -> npt.NDArray[np.uint32]:
        """The (N,) policy-version column of (N, width) rows, a view."""
        return rows[:, self.columns["policy_version"].start].view(np.uint32)

    def empty(self, count: int) -> Array:
        """Uninitialised rows, (count, width) float32."""
        return np.empty((count, self.width), np.float32)

    def from_bytes(self, data: bytes | memoryview) -> Array:
        """Views bytes as (N, width) rows, read-only where they are; a part of a row is a MalformedError."""
        if len(data) % self.row_bytes:
            raise MalformedError(
                f"{len(data)} bytes are not a whole number of {self.row_bytes}-byte transitions"
            )
        return np.frombuffer(data, np.float32).reshape(-1, self.width)

    def finite(self, rows: Array) -> npt.NDArray[np.bool_]:
        """Which of the (N, width) rows hold only finite values, (N,) bool."""
        # A matrix product takes a third of the time of isfinite for each value: what is not finite makes the
        # sum so, and a sum of MAX_ROW_BYTES of the largest floats, each times 2 ** -20, does not overflow.
        with np.errstate(all="ignore"):
            sums = rows[:, : self.float_width] @ self._small
        return cast("npt.NDArray[np.bool_]", np.isfinite(sums))

    @cached_property
    def _small(self) -> Array:
        return np.full(self.float_width, 2.0**-20, np.float32)

    def require_equal(self, other: "TransitionSchema") -> None:
        """Where `other`, what a client states, differs, the first difference is a SchemaMismatchError."""
        for field in self.__dataclass_fields__:
            name, ours, theirs = field, getattr(self, field), getattr(other, field)
            if ours == theirs:
                continue
            if isinstance(ours, tuple):  # as long as theirs, for action_size was compared before
                index = next(index for index, bound in enumerate(ours) if bound != theirs[index])
                name, ours, theirs = f"{field}[{index}]", ours[index], theirs[index]
            remedy = "make the environment the same way"
            if field == "environment":
                remedy = f"start it with --env {ours}"
            raise SchemaMismatchError(
                f"the buffer holds transitions with {name} = {_short(ours)}, "
                f"this node brings {name} = {_short(theirs)}; {remedy}, or start another replay"
            )


def _check_bounds(index: int, low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high)) or max(abs(low), abs(high)) >= HUGE:
        raise MalformedError(
            f"action dimension {index} has the bounds [{low}, {high}]; actions need finite bounds, "
            f"so give the environment's action Box real limits"
        )
    if low >= high:
        raise MalformedError(f"action dimension {index} has the empty range [{low}, {high}]")


def _exact(bound: float) -> str:
    """All digits of a bound; equal bounds give equal texts, so minus zero is written as zero."""
    return (float(bound) + 0.0).hex()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
