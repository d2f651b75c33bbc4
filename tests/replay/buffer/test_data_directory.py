"""A run in a data directory: what it refuses, what a restart finds, what a full disk does."""

import os
import struct
from pathlib import Path

import pytest
from contracts.sentences import assert_one_sentence, refuses
from replay.buffer.runs_on_disk import TTL_S, join
from store_cases import SCHEMA, WIDER, rows_of, serials_of

from dase_grpc.errors import (
    AgentTakenError,
    CapacityError,
    DataDirectoryError,
    MalformedError,
    RunMismatchError,
    SchemaMismatchError,
    StaleLeaseError,
)
from dase_grpc.progress import Progress
from dase_grpc.replay.buffer.directory import FILE_BYTES, DataDirectory
from dase_grpc.replay.buffer.ledger import PAGE, AlternatingRecord
from dase_grpc.replay.buffer.mapped import MappedFile
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.schema import TransitionSchema


def test_a_killed_run_goes_on_with_rows_writers_counters_and_schema(runs):
    run = runs.start()
    join(run)
    rows = rows_of(range(1, 13), 0)
    rows[3, 0] = float("nan")
    run.store.append("w", 1, rows, agent_id=0)
    buffer_id, incarnation = run.buffer_id, run.incarnation
    runs.kill(run)

    again = runs.start()
    assert again.opened
    assert len(again.store.ring) >= again.min_size
    assert again.store.schema == SCHEMA
    assert serials_of(again.store.ring.ordered()) == [2, 3, *range(5, 13)]
    assert again.store.committed("w", agent_id=0) == 12
    assert again.store.ring.size_by_agent == {0: 10}
    assert again.store.traffic.inserted == {0: 11}
    assert again.store.traffic.refused == {(0, "not_finite"): 1}
    assert again.store.ring.evicted_by_agent == {0: 1}
    assert (again.store.traffic.inserted_total, again.store.traffic.refused_total) == (11, 1)
    assert again.buffer_id == buffer_id
    assert again.incarnation != incarnation
    assert again.recovery is not None
    assert (again.recovery.transitions, again.recovery.writers) == (10, 1)
    again.store.append("w", 13, rows_of([13], 0), agent_id=0)
    assert serials_of(again.store.ring.ordered())[-2:] == [12, 13]


def test_in_memory_there_is_an_incarnation_and_nothing_to_find():
    first, second = (SharedRun("r", capacity=10, min_size=1, seed=0, ttl_s=TTL_S) for _ in range(2))
    assert first.incarnation != second.incarnation
    assert first.buffer_id is first.recovery is None
    assert list(first.sync()) == []
    first.close()


def test_leases_are_for_their_owner_alone_for_node_ids_are_secrets(runs):
    run = runs.start()
    assert (runs.path / "leases").stat().st_mode & 0o077 == 0
    runs.kill(run)
    (runs.path / "leases").chmod(0o644)  # as a version had it that knew of no secrets
    runs.start()
    assert (runs.path / "leases").stat().st_mode & 0o077 == 0


def test_before_the_first_join_a_restart_finds_nothing(runs):
    runs.kill(runs.start())
    run = runs.start(run_id="another", capacity=5)
    assert not run.opened
    assert run.recovery is None
    join(run)
    assert run.store.ring.capacity == 5


def test_a_holder_goes_on_after_a_restart_and_others_wait_for_its_time_to_live(runs):
    run = runs.start()
    epoch = join(run).epoch
    runs.kill(run)
    again = runs.start(now=1_000.0)
    with refuses(AgentTakenError, "agent 0", "'node'"):
        join(again, now=1_000.0 + TTL_S)
    again.leases.renew(0, epoch, 1_005.0, progress=Progress())
    with pytest.raises(AgentTakenError):
        join(again, now=1_005.0 + TTL_S)
    assert join(again, now=1_005.1 + TTL_S).epoch == epoch + 1


def test_a_node_whose_answer_a_restart_swallowed_is_given_its_lease(runs):
    run = runs.start()
    epoch = join(run, node_id="a").epoch
    runs.kill(run)
    again = runs.start(now=1_000.0)
    assert join(again, now=1_000.0, node_id="a").epoch == epoch
    with pytest.raises(AgentTakenError):
        join(again, now=1_000.0, node_id="b")
    again.leases.leave(0, epoch, because="b")
    runs.kill(again)
    assert join(runs.start(now=1_001.0), now=1_001.0, node_id="b").epoch == epoch + 1


def test_epochs_grow_across_restarts_and_old_ones_stay_fenced(runs):
    epochs = []
    for start in range(3):
        run = runs.start(now=100.0 * start)
        epochs.append(join(run, now=100.0 * start + 50.0).epoch)
        runs.kill(run)
    assert epochs == [1, 2, 3]
    again = runs.start()
    with pytest.raises(StaleLeaseError):
        again.leases.require(0, 2)
    again.leases.require(0, 3)


def test_a_lease_that_was_given_back_stays_so_and_says_why(runs):
    run = runs.start()
    run.leases.leave(0, join(run).epoch, because="budget spent: " + "ä" * 200)
    runs.kill(run)
    again = runs.start()
    with pytest.raises(StaleLeaseError, match="budget spent: ääää"):
        again.leases.require(0, 1)
    assert join(again).epoch == 2


@pytest.mark.parametrize(("state", "finished"), [("finished", True), ("stopped", False)])
def test_an_agent_that_has_finished_is_known_to_have_until_its_id_is_leased_again(runs, state, finished):
    run = runs.start()
    epoch = join(run).epoch
    run.leases.renew(0, epoch, 1.0, progress=Progress(step=8, total_steps=8, state=state))
    run.leases.leave(0, epoch, because=f"{state} after 8 steps")
    runs.kill(run)
    again = runs.start()
    assert again.leases.finished(0) is finished
    with pytest.raises(StaleLeaseError, match=f"{state} after 8 steps"):
        again.leases.require(0, epoch)
    assert not again.leases.finished(join(again).agent_id)
    runs.kill(again)
    assert not runs.start().leases.finished(0)


def test_version_0_2_takes_the_lease_of_an_agent_that_has_finished_for_one_given_back(runs):
    run = runs.start()
    epoch = join(run).epoch
    run.leases.renew(0, epoch, 1.0, progress=Progress(state="finished"))
    run.leases.leave(0, epoch, because="done")
    file = MappedFile.open(runs.path / "leases", FILE_BYTES)
    record = AlternatingRecord(file, 0, PAGE)
    file.close()
    assert record.latest is not None
    assert struct.unpack_from("<q?H", record.latest) == (epoch, True, len("node"))
    assert record.latest.endswith(b"nodedone")


def test_a_second_replay_on_the_same_directory_is_refused(runs):
    run = runs.start()
    with refuses(DataDirectoryError, str(runs.path), "in use by another replay"):
        runs.start()
    runs.close(run)
    runs.start()


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ({"run_id": "run-b"}, ("run_id", "'run-a'", "'run-b'", "--run-id")),
        ({"capacity": 11}, ("capacity 10", "11", "--capacity")),
        ({"capacity": "1kB"}, ("capacity 10", "27 (1kB)")),
    ],
)
def test_another_run_or_capacity_is_refused_with_both_values(runs, asked, parts):
    runs.killed()
    with refuses(DataDirectoryError, *parts):
        runs.start(**asked)
    assert runs.start().opened


def test_a_capacity_in_bytes_that_comes_to_the_same_is_the_same(runs):
    runs.killed(capacity="360B")
    assert runs.start(capacity=10).store.ring.capacity == 10


def test_another_schema_is_refused_with_both_values(runs):
    runs.killed()
    again = runs.start()
    with pytest.raises(SchemaMismatchError) as refusal:
        join(again, schema=WIDER)
    assert_one_sentence(refusal.value, "observation_size = 2", "observation_size = 3")


def test_a_min_size_beyond_the_capacity_that_lies_there_is_refused(runs):
    runs.killed()
    with pytest.raises(CapacityError) as refusal:
        runs.start(min_size=11)
    assert_one_sentence(refusal.value, "replay.min_size = 11", "10 transitions")


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with refuses(DataDirectoryError, "file/data cannot be used (Not a directory)"):
        DataDirectory.open(tmp_path / "file" / "data")


def test_a_node_that_is_refused_leaves_no_buffer_behind(runs):
    run = runs.start()
    with pytest.raises(MalformedError):
        join(run, wanted=1024)
    assert not run.opened
    assert sorted(path.name for path in runs.path.iterdir()) == ["leases", "lock"]
    join(run, schema=WIDER)
    assert run.store.schema == WIDER


def test_space_that_was_reserved_is_for_who_joins_with_rows_of_that_size_and_is_else_given_back(runs):
    run = runs.start()
    reserve = run.reservation(WIDER, run_id="")
    assert reserve is not None
    reserve()
    reserved = (runs.path / "rows.new").stat().st_ino
    assert run.reservation(WIDER, run_id="") is None
    join(run, schema=WIDER)
    assert (runs.path / "rows").stat().st_ino == reserved
    assert run.reservation(SCHEMA, run_id="") is None
    with pytest.raises(RunMismatchError):
        run.reservation(WIDER, run_id="run-b")


@pytest.mark.parametrize("joins", [True, False])
def test_space_that_was_reserved_for_others_leaves_nothing(runs, joins):
    run = runs.start()
    for schema in (SCHEMA, WIDER):
        reserve = run.reservation(schema, run_id="run-a")
        assert reserve is not None
        reserve()
    if joins:
        join(run, schema=SCHEMA)
        assert run.store.schema == SCHEMA
    runs.close(run)
    reserve()  # on a thread that was late
    assert not (runs.path / "rows.new").exists()
    assert (runs.path / "rows").exists() is joins


@pytest.mark.slow
def test_a_start_that_was_killed_while_it_made_the_buffer_does_not_block_the_next(runs):
    runs.killed()
    (runs.path / "buffer.json").rename(runs.path / "buffer.json.new")  # as before the last step
    again = runs.start(capacity=20)
    assert not again.opened
    assert join(again, now=TTL_S + 1).epoch == 2
    assert again.store.ring.capacity == 20
    assert len(again.store.ring) == 0


def test_a_buffer_counts_only_once_the_disk_has_all_of_its_files(runs, monkeypatch):
    """A machine that stops then may not have the size of a file that was never synced."""
    synced, sync = set[str](), os.fdatasync

    def fdatasync(descriptor):
        sync(descriptor)
        if not (runs.path / "buffer.json").exists():
            synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.removesuffix(".new"))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    join(runs.start())
    assert synced == {"rows", "commits"}


def test_after_an_orderly_stop_another_boot_finds_every_transition(runs):
    run = runs.start()
    join(run)
    for seq in range(1, 40):  # far more than two syncs foresee
        run.store.append("w", seq, rows_of([seq], 0), agent_id=0)
        if seq == 5:
            for blocking in run.sync():
                blocking()
    runs.close(run)
    again = runs.start(boot_id="another")
    assert serials_of(again.store.ring.ordered()) == [*range(30, 40)]
    assert again.recovery is not None
    assert (again.recovery.machine_stopped, again.recovery.unsure) == (True, 0)


def test_a_machine_that_does_not_tell_its_boot_is_taken_for_one_that_was_stopped(runs):
    run = runs.start(boot_id="")
    join(run)
    run.store.append("w", 1, rows_of([1, 2], 0), agent_id=0)
    for blocking in run.sync():
        blocking()
    run.store.append("w", 3, rows_of([3], 0), agent_id=0)
    runs.kill(run)
    assert runs.start(boot_id="").store.committed("w", agent_id=0) == 2


def test_a_restart_takes_as_long_for_a_large_buffer_as_for_a_small_one(runs, monkeypatch):
    """No row is looked at."""
    run = runs.start(capacity=50_000)
    join(run)
    run.store.append("w", 1, rows_of(range(50_000), 0), agent_id=0)
    runs.kill(run)
    monkeypatch.setattr(TransitionSchema, "agent_ids", lambda self, rows: pytest.fail("rows were read"))
    again = runs.start(capacity=50_000)
    assert again.store.ring.size_by_agent == {0: 50_000}
