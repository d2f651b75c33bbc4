"""A small schema, and rows that can be told apart by a serial number."""

from collections.abc import Sequence

import numpy as np

from dase_grpc.schema import Array, TransitionSchema

SCHEMA = TransitionSchema("worlds:PointGoal", 2, 1, (-1.0,), (1.0,))
WIDER = TransitionSchema("worlds:PointGoal", 3, 1, (-1.0,), (1.0,))


def rows_of(serials: Sequence[int], agents: Sequence[int] | int, schema: TransitionSchema = SCHEMA) -> Array:
    """One row for each serial number, which every float column but the last holds."""
    rows = schema.empty(len(serials))
    rows[:, : schema.float_width] = np.asarray(serials, np.float32)[:, np.newaxis]
    rows[:, schema.columns["bootstrap"]] = 1.0
    schema.agent_ids(rows)[:] = agents
    rows[:, schema.columns["policy_version"].start].view(np.uint32)[:] = serials
    return rows


def serials_of(rows: Array) -> list[int]:
    """The serial numbers of rows, each checked to be whole."""
    versions = rows[:, SCHEMA.columns["policy_version"].start].view(np.uint32)
    assert (rows[:, : SCHEMA.float_width - 1] == versions[:, np.newaxis]).all()
    return [int(version) for version in versions]
