"""TransitionSchema: one layout for storage, wire and tensors, every column a view."""

from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch
from contracts.sentences import refuses

from dase_grpc.errors import MalformedError, SchemaMismatchError
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.schema import HUGE, MAX_ROW_BYTES, Array, TransitionSchema

SCHEMA = TransitionSchema("Walker-v5", 3, 2, (-1.0, -0.5), (1.0, 0.5))
CHANGED = {
    "environment": "Walker-v4",
    "observation_size": 4,
    "action_size": 3,
    "action_low": (-1.0, -0.25),
    "action_high": (1.0, 0.5000001),
}


def changed(field: str) -> TransitionSchema:
    if field == "action_size":
        return replace(SCHEMA, action_size=3, action_low=(-1.0, -0.5, -1.0), action_high=(1.0, 0.5, 1.0))
    return replace(SCHEMA, **{field: CHANGED[field]})


@pytest.fixture
def rows() -> Array:
    """Four rows whose float columns are numbered from 0 on, of agents 0..3 with large policy versions."""
    rows = SCHEMA.empty(4)
    rows[:, : SCHEMA.float_width] = np.arange(4 * SCHEMA.float_width).reshape(4, -1)
    SCHEMA.agent_ids(rows)[:] = range(4)
    rows[:, -1].view(np.uint32)[:] = np.arange(4) + 2**32 - 4
    return rows


def test_a_row_is_observation_action_next_observation_reward_bootstrap_agent_and_version():
    names = ("observation", "action", "next_observation", "reward", "bootstrap", "agent_id", "policy_version")
    bounds = (0, 3, 5, 8, 9, 10, 11, 12)
    assert list(SCHEMA.columns.items()) == [*zip(names, map(slice, bounds, bounds[1:]), strict=True)]
    assert (SCHEMA.width, SCHEMA.float_width, SCHEMA.row_bytes) == (12, 10, 48)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (17, 6), (348, 17)])
def test_columns_and_structured_dtype_name_the_same_bytes(m, n):
    schema = TransitionSchema("X", m, n, (-1.0,) * n, (1.0,) * n)
    assert schema.dtype.itemsize == schema.row_bytes == 4 * (2 * m + n + 4)
    assert schema.dtype.names == tuple(schema.columns)
    for name, part in schema.columns.items():
        assert schema.dtype.fields[name][1] == 4 * part.start
        assert schema.dtype[name].itemsize == 4 * (part.stop - part.start)


def test_named_columns_are_views_of_the_rows(rows):
    named = SCHEMA.named(rows)
    assert named.shape == (4,)
    for name, part in SCHEMA.columns.items():
        assert np.shares_memory(named[name], rows)
        assert named[name].tobytes() == rows[:, part].tobytes()
    named["reward"][2] = 77.0
    assert rows[2, SCHEMA.columns["reward"].start] == 77.0


def test_named_integers_have_their_own_types(rows):
    named = SCHEMA.named(rows)
    assert named["agent_id"].tolist() == [0, 1, 2, 3]
    assert named["policy_version"].tolist() == [2**32 - 4, 2**32 - 3, 2**32 - 2, 2**32 - 1]


def test_agent_ids_are_a_view_through_which_rows_are_written(rows):
    ids = SCHEMA.agent_ids(rows)
    assert ids.dtype == np.int32
    assert np.shares_memory(ids, rows)
    ids[1] = -7
    assert SCHEMA.named(rows)["agent_id"].tolist() == [0, -7, 2, 3]


def test_a_batch_names_the_columns_of_a_tensor_without_a_copy(rows):
    tensor = torch.from_numpy(rows)
    batch = Batch.from_rows(SCHEMA, tensor)
    columns = {name: part.start for name, part in SCHEMA.columns.items()} | {"state_action": 0}
    assert {field.name for field in fields(Batch)} == set(columns)
    for name, start in columns.items():
        column = getattr(batch, name)
        assert column.data_ptr() == tensor.data_ptr() + 4 * start
        assert column.stride(0) == SCHEMA.width
    tensor[0, 0] = -5.0
    assert batch.observation[0, 0] == batch.state_action[0, 0] == -5.0


def test_a_batch_has_the_values_shapes_and_types_of_the_columns(rows):
    batch, named = Batch.from_rows(SCHEMA, torch.from_numpy(rows)), SCHEMA.named(rows)
    for name in ("observation", "action", "next_observation", "reward", "bootstrap", "agent_id"):
        assert np.array_equal(getattr(batch, name).numpy(), named[name])
    assert batch.state_action.shape == (4, 5)
    assert batch.agent_id.dtype == batch.policy_version.dtype == torch.int32
    assert batch.policy_version.numpy().view(np.uint32).tolist() == named["policy_version"].tolist()


@pytest.mark.parametrize("bits", [0, 1, 1023, 2**31 - 1, 0x7F80_0000, 0x7FC0_0001])
def test_integers_keep_their_bits_among_floats(bits):
    rows = SCHEMA.empty(1)
    named = SCHEMA.named(rows)
    named["agent_id"], named["policy_version"] = bits, bits
    copied = SCHEMA.from_bytes(rows.copy().tobytes())
    assert SCHEMA.agent_ids(copied).tolist() == [bits]
    assert SCHEMA.named(copied)["policy_version"].tolist() == [bits]
    batch = Batch.from_rows(SCHEMA, torch.from_numpy(rows).clone())
    assert (batch.agent_id.item(), batch.policy_version.item()) == (bits, bits)


def test_bytes_become_rows_without_a_copy(rows):
    data = rows.tobytes()
    read = SCHEMA.from_bytes(data)
    assert read.tobytes() == data
    assert np.shares_memory(read, np.frombuffer(data, np.uint8))
    assert not read.flags.writeable


def test_no_bytes_are_no_rows():
    empty = SCHEMA.from_bytes(b"")
    assert empty.shape == (0, SCHEMA.width)
    assert SCHEMA.named(empty).shape == (0,)
    assert SCHEMA.finite(empty).shape == (0,)


@pytest.mark.parametrize("size", [1, 47, 49, 95])
def test_a_part_of_a_row_is_malformed(size):
    with refuses(MalformedError, f"{size} bytes", "48-byte"):
        SCHEMA.from_bytes(bytes(size))


def test_finite_looks_at_every_float_and_at_no_integer(rows):
    assert SCHEMA.finite(rows).all()  # the policy versions' bits are NaNs
    for column in range(SCHEMA.float_width):
        spoiled = rows.copy()
        spoiled[column % 4, column] = (np.nan, np.inf, -np.inf)[column % 3]
        assert SCHEMA.finite(spoiled).tolist() == [index != column % 4 for index in range(4)]


def test_the_largest_floats_in_the_widest_row_are_finite_and_opposite_infinities_are_not():
    columns = MAX_ROW_BYTES // 4
    widest = TransitionSchema("wide", (columns - 6) // 2, 2, (-1.0, -1.0), (1.0, 1.0))
    assert widest.width == columns
    rows = np.full((3, columns), HUGE, np.float32)
    rows[1] = -HUGE
    rows[2, :2] = np.inf, -np.inf
    assert widest.finite(rows).tolist() == [True, True, False]
    assert widest.finite(np.full((1, columns), np.finfo(np.float32).smallest_subnormal)).all()


def test_the_fingerprint_is_the_same_on_every_machine_and_in_every_version_of_this_format():
    assert SCHEMA.fingerprint == "bd2fa49e6200fbb6129351235272b35cb064dde7568906524875be932df754b7"


def test_equal_schemas_have_equal_fingerprints():
    twin = TransitionSchema("Walker-v5", 3, 2, (-1, np.float32(-0.5)), (1, np.float64(0.5)))
    assert twin == SCHEMA
    assert twin.fingerprint == SCHEMA.fingerprint
    zero, minus_zero = replace(SCHEMA, action_low=(-1.0, 0.0)), replace(SCHEMA, action_low=(-1.0, -0.0))
    assert zero == minus_zero
    assert zero.fingerprint == minus_zero.fingerprint


def test_the_fingerprint_tells_bounds_apart_that_print_alike():
    next_after = replace(SCHEMA, action_high=(1.0, float(np.nextafter(0.5, 1.0))))
    assert next_after.fingerprint != SCHEMA.fingerprint


def test_a_schema_equals_itself_and_is_frozen():
    SCHEMA.require_equal(replace(SCHEMA))
    with pytest.raises(FrozenInstanceError):
        SCHEMA.action_size = 3


@pytest.mark.parametrize("field", CHANGED)
def test_a_difference_changes_the_fingerprint_and_is_refused_and_named(field):
    assert set(CHANGED) == {field.name for field in fields(TransitionSchema)}
    assert changed(field).fingerprint != SCHEMA.fingerprint
    with refuses(SchemaMismatchError, f"with {field}", f"brings {field}"):
        SCHEMA.require_equal(changed(field))


@pytest.mark.parametrize(
    ("fields_", "named"),
    [
        ({"observation_size": 0}, "0 and 2"),
        ({"action_size": 0, "action_low": (), "action_high": ()}, "3 and 0"),
        ({"action_low": (-1.0,)}, "1 lower and 2 upper"),
        ({"action_high": (1.0, 1.0, 1.0)}, "2 lower and 3 upper"),
        ({"action_low": (-1.0, -np.inf)}, "dimension 1 has the bounds [-inf, 0.5]"),
        ({"action_high": (np.nan, 0.5)}, "dimension 0 has the bounds [-1.0, nan]"),
        ({"action_high": (HUGE, 0.5)}, "dimension 0"),
        ({"action_low": (-1.0, -HUGE)}, "dimension 1"),
        ({"action_low": (-1.0, 0.5)}, "dimension 1 has the empty range [0.5, 0.5]"),
        ({"action_low": (2.0, -0.5)}, "dimension 0 has the empty range [2.0, 1.0]"),
    ],
)
def test_an_impossible_schema_is_refused_and_names_what_is_wrong(fields_, named):
    with refuses(MalformedError, named):
        replace(SCHEMA, **fields_)


def test_bounds_just_below_the_largest_float_are_accepted():
    largest = float(np.nextafter(np.float32(HUGE), np.float32(0)))
    assert replace(SCHEMA, action_high=(largest, 0.5)).action_high[0] == largest


def test_the_widest_row_is_accepted_and_one_column_more_is_refused():
    widest = (MAX_ROW_BYTES // 4 - 4 - 2) // 2
    assert replace(SCHEMA, observation_size=widest).row_bytes == MAX_ROW_BYTES
    with refuses(MalformedError, str(MAX_ROW_BYTES), f"{widest + 1} components"):
        replace(SCHEMA, observation_size=widest + 1)
