"""Session: a learner's plain calls, behind which rows, batches, policies and its lease live on a thread."""

import asyncio
import subprocess
import sys
import threading

import numpy as np
import pytest
from children import importing
from contracts.sentences import assert_one_sentence, refuses
from nodes.learning_cases import QUICK
from nodes.running import replay_node, store_at
from patience import PATIENCE_S
from replay.wire.services import SCHEMA, WIDE, promptly, rows_of, serials_of, serving

from dase_grpc.errors import (
    AddressError,
    ConfigError,
    DaseError,
    MalformedError,
    SchemaMismatchError,
    UnreachableError,
    UsageError,
)
from dase_grpc.replay.buffer.sharding import Shard
from dase_grpc.replay.client.policies import PolicyPublisher
from dase_grpc.replay.client.session import Session
from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.service.sample import MAX_CREDITS


def session_at(*services, **changes):
    """A session at a service, or at several shards."""
    addresses = ",".join(str(each.address) for each in services)
    return Session(
        addresses, **{"schema": SCHEMA, "batch_size": 4, "prefetch": 2, "timing": QUICK, **changes}
    )


async def user(program, *arguments):
    """What a user's program gives, which runs on a thread as it would in a process of its own."""
    return await promptly(asyncio.to_thread(program, *arguments))


async def error_of(kind, program):
    """What a user's program ends by."""

    def caught():
        with pytest.raises(kind) as error:
            program()
        return error.value

    return await user(caught)


def store_all(session, rows):
    for row in rows:
        session.store(row)


async def test_rows_are_stored_once_and_acknowledged_when_the_block_is_left(service):
    def program():
        with session_at(service) as session:
            store_all(session, rows_of(1, 500))
        return session.unacknowledged

    assert await user(program) == 0
    assert service.stored() == list(range(1, 501))
    agent = (await service.client.status()).agents[0]
    assert (agent.lease, agent.reason, agent.progress.step) == ("left", "left after 500 transitions", 500)


async def test_who_the_learner_is_and_what_the_run_is_are_known_in_the_block(service):
    def program():
        with session_at(service, agent=3) as session:
            session.store(rows_of(1, 1)[0])
            member = session.member
            return session.agent_id, member.run_id, member.epoch, member.capacity, member.min_size

    assert await user(program) == (3, "the-run", 1, 1_000, 1)
    assert service.stored(agent_id=3) == [1]  # whatever the row's own agent id said


async def test_without_enough_in_the_buffer_there_is_no_batch_and_then_there_are_some():
    async with serving(min_size=20) as service:

        def program():
            with session_at(service) as session:
                assert session.next() is None
                store_all(session, rows_of(1, 20))
                while (batch := session.next()) is None:
                    pass
                return *batch, session.next() is not None

        rows, size, another = await user(program)
    assert (rows.shape, rows.dtype, size, another) == ((4, SCHEMA.width), np.float32, 20, True)
    assert set(serials_of(rows)) <= set(range(1, 21))


async def test_a_row_may_be_changed_once_it_is_stored(service):
    def program():
        with session_at(service) as session:
            row = rows_of(1, 1)[0]
            session.store(row)
            row[:] = 0

    await user(program)
    assert service.stored() == [1]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (np.zeros(3, np.float32), ("9 float32", "(3,)")),
        (np.zeros(9), ("9 float32", "float64")),
        (np.full(9, np.nan, np.float32), ("not finite",)),
    ],
)
async def test_a_row_that_is_none_is_refused_where_it_is_stored_and_the_session_goes_on(service, row, words):
    def program():
        with session_at(service) as session:
            with pytest.raises(MalformedError) as refusal:
                session.store(row)
            session.store(rows_of(1, 1)[0])
        return refusal.value

    assert_one_sentence(await user(program), *words)
    assert service.stored() == [1]


async def test_policies_go_out_and_come_in_as_arrays(service):
    weights = {"weight": np.arange(6.0).reshape(2, 3)[:, ::2], "step": np.int64([4])}

    def program():
        with (
            session_at(service, agent=0, follow=[1]) as one,
            session_at(service, agent=1, follow=[0]) as other,
        ):
            assert one.latest(1) is None
            other.publish(7, weights)
            while (seen := one.latest(1)) is None:
                pass
            with pytest.raises(KeyError, match="agent 5 is not among those followed"):
                one.latest(5)
            with pytest.raises(ValueError, match="policy 6 cannot be published after policy 7"):
                other.publish(6, weights)
        return seen

    version, arrays = await user(program)
    assert version == 7
    assert {name: each.tolist() for name, each in arrays.items()} == {
        name: each.tolist() for name, each in weights.items()
    }


async def test_the_policy_published_last_arrives_before_the_block_is_left(service):
    def program():
        with session_at(service) as session:
            for version in range(100):
                session.publish(version, f"policy {version}".encode())

    await user(program)
    policy = service.run.policies.latest(0)
    assert (policy.version, policy.payload) == (99, b"policy 99")


async def test_a_policy_of_other_bytes_is_an_error_in_one_sentence(service):
    await PolicyPublisher(await service.target(1)).publish(3, b"no arrays")

    def program():
        with session_at(service, agent=0, follow=[1]) as session:
            while session.latest(1) is None:
                pass

    assert_one_sentence(
        await error_of(DaseError, program), "policy 3 of agent 1 cannot be read", "safetensors"
    )


async def test_the_cluster_sees_the_progress_that_is_set(service):
    def program():
        with session_at(service) as session:
            session.progress(updates=12, total_steps=100)
            session.progress(step=30, evaluation_return=5.0)
            with pytest.raises(TypeError, match="stepp"):
                session.progress(stepp=3)

    await user(program)
    progress = (await service.client.status()).agents[0].progress
    assert (progress.step, progress.updates, progress.total_steps) == (30, 12, 100)
    assert (progress.evaluation_return, progress.state) == (5.0, "training")


async def test_a_sharded_replay_works_alike():
    room = {"capacity": 100_000}
    async with serving(shard=Shard(0, 2), **room) as one, serving(shard=Shard(1, 2), **room) as other:

        def program():
            with session_at(one, other) as session:
                stored = 0
                while not all(each.run.opened and len(each.run.store.ring) for each in (one, other)):
                    stored += 100  # streams to both do not open at one moment
                    store_all(session, rows_of(stored - 99, stored))
                    while session.unacknowledged:
                        pass
                while (batch := session.next()) is None:
                    pass
                return batch, stored, session

        (rows, size), stored, session = await user(program)
    assert (rows.shape, size > 0, session.unacknowledged) == ((4, SCHEMA.width), True, 0)
    assert sorted(one.stored() + other.stored()) == list(range(1, stored + 1))


@pytest.mark.slow
async def test_each_row_is_stored_once_although_the_replay_is_started_again_and_again(tmp_path):
    data = {"data_dir": tmp_path / "data"}
    went, go_on = threading.Event(), threading.Event()

    def program(address):
        with Session(str(address), schema=SCHEMA, batch_size=4) as session:
            for number, row in enumerate(rows_of(1, 6_000)):
                session.store(row)
                if number == 300:
                    went.set()
                if number % 500 == 0:
                    session.next()
            go_on.wait(PATIENCE_S)
        return session.unacknowledged

    async with replay_node(**data) as first:
        address = first.address
        running = asyncio.ensure_future(asyncio.to_thread(program, address))
        await user(went.wait)
        await first.end()
        async with replay_node(**data, listen=address):
            pass
        async with replay_node(**data, listen=address):
            go_on.set()
            assert await promptly(running) == 0
    with store_at(tmp_path / "data") as store:
        assert serials_of(store.ring.ordered(), SCHEMA) == list(range(1, 6_001))


@pytest.mark.slow
async def test_while_the_replay_is_away_there_is_no_batch_but_rows_are_taken(tmp_path):
    data = {"data_dir": tmp_path / "data"}
    began, away, back = (threading.Event() for _ in range(3))

    def program(address):
        with Session(str(address), schema=SCHEMA, batch_size=4, prefetch=1) as session:
            session.store(rows_of(1, 1)[0])
            while session.next() is None:
                pass
            began.set()
            away.wait(PATIENCE_S)
            while session.next() is not None:
                pass
            store_all(session, rows_of(2, 10))
            back.set()

    async with replay_node(**data) as first:
        address = first.address
        running = asyncio.ensure_future(asyncio.to_thread(program, address))
        await user(began.wait)
        await first.end()
        away.set()
        await user(back.wait)
        async with replay_node(**data, listen=address):
            await promptly(running)


async def test_another_schema_is_refused_before_the_block_begins(service):
    await service.join(1)

    def program():
        with session_at(service, schema=WIDE):
            raise AssertionError("the block has begun")

    error = await error_of(SchemaMismatchError, program)
    assert_one_sentence(error, "environment = 'worlds:Small'", "environment = 'worlds:Wide'")


async def test_a_replay_that_never_comes_is_waited_for_as_long_as_is_said():
    def program():
        with Session("127.0.0.1:9", schema=SCHEMA, connect_timeout_s=0.2):
            raise AssertionError("the block has begun")

    assert_one_sentence(await error_of(UnreachableError, program), "does not answer (waited up to 0.2 s)")


async def test_a_session_is_for_one_block(service):
    def program():
        session = session_at(service)
        with pytest.raises(UsageError) as early:
            session.next()
        with session:
            pass
        with pytest.raises(UsageError) as late:
            session.store(rows_of(1, 1)[0])
        with pytest.raises(UsageError) as again, session:
            pass
        return early.value, late.value, again.value

    for error, words in zip(
        await user(program), ("begins with its block", "ended", "one block"), strict=True
    ):
        assert_one_sentence(error, words)


def test_what_cannot_be_used_is_refused_before_anything_is_asked(tmp_path):
    with pytest.raises(AddressError):
        Session("nowhere", schema=SCHEMA)
    with pytest.raises(AddressError):
        Session(50051, schema=SCHEMA)
    credentials = Credentials(token_file=tmp_path / "token")
    with (
        pytest.raises(UsageError, match="--tls"),
        Session("localhost:1", schema=SCHEMA, credentials=credentials),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"agent": "0"}, "agent = '0'"),
        ({"agent": -1}, "agent = -1"),
        ({"batch_size": 0.5}, "batch_size = 0.5"),
    ],
)
def test_what_is_no_whole_number_is_refused(given, said):
    with refuses(ConfigError, f"{said} has to be a whole number of at least"):
        Session("localhost:1", schema=SCHEMA, **given)
    Session("localhost:1", schema=SCHEMA, agent=np.int64(1), batch_size=np.uint16(8), prefetch=np.int8(2))


@pytest.mark.parametrize("prefetch", [-3, 0, MAX_CREDITS + 1, "4"])
def test_batches_drawn_ahead_that_no_service_could_send_are_refused(prefetch):
    with refuses(ConfigError, f"prefetch = {prefetch!r} has to be a whole number from 1 to {MAX_CREDITS}"):
        Session("localhost:1", schema=SCHEMA, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [1, MAX_CREDITS])
async def test_batches_come_with_the_least_and_the_most_that_may_be_drawn_ahead(service, prefetch):
    def program():
        with session_at(service, prefetch=prefetch) as session:
            session.store(rows_of(1, 1)[0])
            while (batch := session.next()) is None:
                pass
            return batch

    assert set(serials_of((await user(program))[0])) == {1}


def test_a_program_with_a_session_loads_neither_torch_nor_gymnasium():
    code = (
        "import sys; from dase_grpc.replay.client.session import Session; "
        "print(sorted({'torch', 'gymnasium', 'mujoco', 'matplotlib'} & set(sys.modules)))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env=importing(),
    )
    assert said.stdout == "[]\n"


@pytest.mark.parametrize("in_place", [True, False])
async def test_batches_are_read_in_place_on_the_replays_machine_unless_told_otherwise(service, in_place):
    def program():
        with session_at(service, **({} if in_place else {"in_place": False})) as session:
            store_all(session, rows_of(1, 50))
            batches = []
            while len(batches) < 20:
                if (batch := session.next()) is not None:
                    batches.append(batch[0])
            return session.reads_in_place, batches

    reads_in_place, batches = await user(program)
    assert reads_in_place == in_place
    assert all(set(serials_of(rows)) <= set(range(1, 51)) for rows in batches)
