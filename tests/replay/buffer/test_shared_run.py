"""SharedRun: the first learner decides the schema, everyone else must bring the same."""

from dataclasses import replace

import pytest
from contracts.sentences import assert_one_sentence, refuses
from store_cases import SCHEMA, WIDER

from dase_grpc.errors import (
    AgentTakenError,
    CapacityError,
    MalformedError,
    NotJoinedError,
    RunMismatchError,
    SchemaMismatchError,
    StaleLeaseError,
)
from dase_grpc.replay.buffer.leases import Lease
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.schema import TransitionSchema


def make_run(*, capacity: int | str = 10, min_size: int = 2) -> SharedRun:
    return SharedRun("run-a", capacity=capacity, min_size=min_size, seed=0, ttl_s=10.0)


def join(
    run: SharedRun, *, wanted: int | None = None, run_id: str = "", schema: TransitionSchema = SCHEMA
) -> Lease:
    return run.join("node", wanted=wanted, run_id=run_id, schema=schema, now=0.0)


@pytest.fixture
def run() -> SharedRun:
    """A run that the first learner has joined."""
    run = make_run()
    join(run)
    return run


def test_before_the_first_join_there_is_no_buffer():
    run = make_run()
    assert not run.opened
    with refuses(NotJoinedError, "'run-a'", "no learner has joined"):
        _ = run.store


def test_the_first_join_opens_the_buffer_with_its_schema():
    run = make_run()
    assert join(run).agent_id == 0
    assert run.opened
    assert run.store.schema == SCHEMA
    assert run.store.ring.capacity == 10


def test_a_capacity_in_bytes_becomes_transitions_of_the_first_learners_width():
    run = make_run(capacity="1kb")
    join(run, schema=WIDER)
    assert run.store.ring.capacity == 1000 // WIDER.row_bytes


def test_later_joins_share_the_buffer(run):
    buffer = run.store
    assert join(run).agent_id == 1
    assert run.store is buffer


@pytest.mark.parametrize(
    "other",
    [
        replace(SCHEMA, environment="worlds:Other"),
        replace(SCHEMA, observation_size=5),
        replace(SCHEMA, action_size=2, action_low=(-1.0, -1.0), action_high=(1.0, 1.0)),
        replace(SCHEMA, action_low=(-2.0,)),
        replace(SCHEMA, action_high=(0.5,)),
    ],
    ids=["environment", "observation_size", "action_size", "action_low", "action_high"],
)
def test_another_schema_is_refused_and_names_the_field_and_both_values(run, other, request):
    field = request.node.callspec.id
    with pytest.raises(SchemaMismatchError) as refusal:
        join(run, schema=other)
    for value in (getattr(SCHEMA, field), getattr(other, field)):
        named = f"{field}[0] = {value[0]}" if isinstance(value, tuple) else f"{field} = {value!r}"
        assert_one_sentence(refusal.value, named)
    assert [lease.agent_id for lease in run.leases.all()] == [0]


def test_of_many_bounds_the_first_that_differs_is_named():
    many = TransitionSchema("worlds:PointGoal", 2, 100, (-1.0,) * 100, (1.0,) * 100)
    run = make_run()
    join(run, schema=many)
    with pytest.raises(SchemaMismatchError) as refusal:
        join(run, schema=replace(many, action_low=(*many.action_low[:70], *(-2.0,) * 30)))
    assert_one_sentence(refusal.value, "action_low[70] = -1.0", "action_low[70] = -2.0")


def test_a_very_long_environment_name_is_cut_in_the_message(run):
    with pytest.raises(SchemaMismatchError) as refusal:
        join(run, schema=replace(SCHEMA, environment="x" * 10_000))
    assert len(str(refusal.value)) < 300


def test_another_run_is_refused_and_names_both():
    with refuses(RunMismatchError, "'run-a'", "'run-b'"):
        join(make_run(), run_id="run-b")


def test_a_node_that_names_no_run_or_the_right_one_joins():
    run = make_run()
    assert join(run, run_id="run-a").agent_id == 0
    assert join(run, run_id="").agent_id == 1


def test_a_node_that_is_refused_does_not_decide_the_schema():
    run = make_run()
    with pytest.raises(MalformedError):
        join(run, wanted=1024, schema=WIDER)
    assert not run.opened
    join(run, schema=SCHEMA)
    assert run.store.schema == SCHEMA


def test_a_buffer_that_cannot_be_made_leases_nothing():
    run = make_run(capacity=10**15)
    with pytest.raises(CapacityError):
        join(run)
    assert run.leases.all() == []
    assert not run.opened


def test_a_min_size_beyond_the_capacity_is_refused_with_both():
    run = make_run(capacity="1kb", min_size=28)
    with refuses(CapacityError, "replay.min_size = 28", "27 transitions", "replay.capacity = 1kb"):
        join(run)


def test_a_taken_id_is_refused():
    run = make_run()
    join(run, wanted=1)
    with pytest.raises(AgentTakenError):
        join(run, wanted=1)


def stream(run: SharedRun, **changed: object) -> object:
    right = {"run_id": "run-a", "agent_id": 0, "epoch": 1, "fingerprint": SCHEMA.fingerprint}
    return run.require_stream(**{**right, **changed})


def test_a_stream_that_states_everything_right_gets_the_buffer(run):
    assert stream(run) is run.store


@pytest.mark.parametrize(
    ("changed", "error", "named"),
    [
        ({"run_id": "run-b"}, RunMismatchError, "run-b"),
        ({"run_id": ""}, RunMismatchError, "''"),
        ({"fingerprint": WIDER.fingerprint}, SchemaMismatchError, WIDER.fingerprint[:8]),
        ({"fingerprint": ""}, SchemaMismatchError, "none"),
        ({"epoch": 2}, StaleLeaseError, "epoch 2"),
        ({"agent_id": 1}, StaleLeaseError, "agent 1"),
    ],
)
def test_a_stream_that_states_anything_else_is_refused(run, changed, error, named):
    with refuses(error, named):
        stream(run, **changed)


def test_a_stream_before_the_first_join_is_refused():
    with pytest.raises(NotJoinedError):
        stream(make_run())
