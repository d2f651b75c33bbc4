"""A replay node on a data directory: what it restores, what it says, and how it refuses."""

import asyncio
import os
import threading

import pytest
from nodes.processes import process, replay_process
from nodes.running import joined, replay_node, store_at
from patience import PATIENCE_S
from replay.wire.services import SCHEMA, eventually, promptly, rows_of, serials_of

from dase_grpc.errors import ConfigError, DataDirectoryError, SequenceGapError, StaleLeaseError
from dase_grpc.nodes.replay import _sync
from dase_grpc.nodes.replay_options import ReplayOptions
from dase_grpc.progress import Progress
from dase_grpc.replay.buffer.directory import DataDirectory
from dase_grpc.replay.buffer.durable import DurableStore
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.wire.addresses import parse_address


async def insert(target: StreamTarget, first: int, last: int) -> None:
    """Stores rows first..last as the writer's next ones, every one acknowledged."""
    async with asyncio.TaskGroup() as tasks:
        inserter = await Inserter(target, writer_id="w").open()
        assert inserter.sent_seq == first - 1
        tasks.create_task(inserter.receive())
        await inserter.append(rows_of(first, last))
        await inserter.finish()


def stored(path) -> list[int]:
    """The rows of a directory that no replay holds, read offline."""
    with store_at(path) as store:
        return serials_of(store.ring.ordered())


async def test_a_learner_goes_on_after_a_restart_with_its_lease_and_its_number(tmp_path, caplog):
    data = {"data_dir": tmp_path / "data"}
    async with replay_node(**data) as replay, joined(replay.address) as target:
        assert "holds no buffer yet" in caplog.text
        await insert(target, 1, 20)
        address = replay.address
    async with replay_node(**data, listen=address), open_channel(address) as channel:
        assert "restored run the-run" in caplog.text
        assert "20 transitions of 1 writer; leases of agents 0 (epoch 1) wait" in caplog.text
        again = StreamTarget(channel, str(address), target.member, SCHEMA)
        await ClusterClient(channel, str(address)).heartbeat(target.member, Progress(step=20))
        await insert(again, 21, 25)
        sampler = await Sampler(again, batch_size=64).open(credits=1)
        assert set(serials_of((await sampler.next()).rows)) <= set(range(1, 26))
        sampler.cancel()
    assert stored(tmp_path / "data") == [*range(1, 26)]


async def test_settings_come_from_the_command_and_what_is_different_is_said(tmp_path, caplog):
    async with replay_node(data_dir=tmp_path, seed=7):
        pass
    async with replay_node(data_dir=tmp_path, seed=7):
        assert "other settings" not in caplog.text
    async with replay_node(data_dir=tmp_path, seed=8, min_size=2) as replay, joined(replay.address) as target:
        assert target.member.min_size == 2
    said = [record.getMessage() for record in caplog.records if "other settings" in record.getMessage()]
    assert [line.partition("last time: ")[2] for line in said] == ["--min-size 2, was 1", "--seed 8, was 7"]
    (tmp_path / "settings.json").write_text("[not json")
    async with replay_node(data_dir=tmp_path, seed=9):
        assert "--seed 9" not in caplog.text


async def test_a_disk_that_is_slow_to_reserve_the_buffer_keeps_waiting_only_who_joins(tmp_path, monkeypatch):
    reserved, go, reserve = list[int](), threading.Event(), os.posix_fallocate

    def slow(descriptor: int, offset: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("rows.new"):
            reserved.append(size)
            go.wait(PATIENCE_S)
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    async with replay_node(data_dir=tmp_path / "data") as replay, open_channel(replay.address) as channel:
        client = ClusterClient(channel, str(replay.address))
        given_up, *joining = [
            asyncio.ensure_future(client.join(node_name="n", node_id=each, schema=SCHEMA, agent_id=None))
            for each in "abc"
        ]
        await eventually(lambda: reserved)
        given_up.cancel()
        assert (await promptly(client.status())).buffer.capacity == 0
        go.set()
        members = await promptly(asyncio.gather(*joining))
        assert sorted((each.agent_id, each.epoch) for each in members) == [(0, 1), (1, 1)]
    assert len(reserved) == 1


async def test_an_old_epoch_stays_fenced_after_a_restart(tmp_path):
    data = {"data_dir": tmp_path / "data"}
    async with replay_node(**data) as replay, joined(replay.address) as target:
        await target.cluster.leave(target.member, reason="done")
    async with replay_node(**data) as replay, joined(replay.address) as new:
        assert new.member.epoch == target.member.epoch + 1
        old = StreamTarget(new.channel, new.address, target.member, SCHEMA)
        with pytest.raises(StaleLeaseError):
            await Inserter(old, writer_id="w").open()


async def test_what_is_committed_reaches_the_disk_again_and_again(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(DurableStore, "_flush", lambda self: synced.append(self.ring.total))
    async with (
        replay_node(data_dir=tmp_path / "data", sync_every_s=0.01) as replay,
        joined(replay.address) as target,
    ):
        await insert(target, 1, 5)
        await eventually(lambda: 5 in synced)
        await insert(target, 6, 9)
        await eventually(lambda: 9 in synced)


async def test_what_a_round_of_syncing_names_as_its_time_is_when_it_began():
    at, told = [100.0], []

    class Rounds:
        def sync(self):
            at[0] += 7.0  # it takes that long
            return []

    def done(since):
        told.append(since)
        if len(told) == 2:
            task.cancel()

    task = asyncio.ensure_future(_sync(Rounds(), 0.0, done, clock=lambda: at[0]))
    with pytest.raises(asyncio.CancelledError):
        await promptly(task)
    assert told == [100.0, 107.0]


async def test_a_second_node_on_the_same_directory_is_refused(tmp_path):
    async with replay_node(data_dir=tmp_path):
        with pytest.raises(DataDirectoryError, match="in use by another replay"):
            async with replay_node(data_dir=tmp_path):
                pass


async def test_a_node_that_cannot_listen_lets_the_directory_go(tmp_path):
    async with replay_node(data_dir=tmp_path / "one") as replay:
        with pytest.raises(Exception, match="cannot listen"):
            async with replay_node(data_dir=tmp_path / "two", listen=replay.address):
                pass
    DataDirectory.open(tmp_path / "two").close()


async def test_a_gap_that_a_loss_left_is_named_to_a_writer_that_is_ahead(tmp_path, monkeypatch):
    """After a power loss a writer that goes on from its own number is told the one that the buffer has."""
    boots = iter(("one", "two"))
    monkeypatch.setattr("dase_grpc.nodes.replay.boot_id", lambda: next(boots))
    monkeypatch.setattr(
        "dase_grpc.replay.buffer.run.SharedRun.close", lambda run: run._disk.directory.close()
    )
    async with replay_node(data_dir=tmp_path / "data") as replay, joined(replay.address) as target:
        await insert(target, 1, 20)
    async with replay_node(data_dir=tmp_path / "data") as replay, open_channel(replay.address) as channel:
        again = StreamTarget(channel, str(replay.address), target.member, SCHEMA)
        inserter = await Inserter(again, writer_id="w").open()
        assert inserter.sent_seq == 0
        inserter.sent_seq = 20
        await inserter.append(rows_of(21, 21))
        with pytest.raises(SequenceGapError, match="resend from 1"):
            await inserter.receive()


def options(path, **changes) -> ReplayOptions:
    texts = {
        "run_id": None,
        "listen": "127.0.0.1:0",
        "capacity": None,
        "min_size": 1,
        "seed": 0,
        "metrics_port": 0,
        "insecure": False,
        "data_dir": path,
    }
    return ReplayOptions.parse(**{**texts, **changes})


async def test_a_run_and_a_capacity_that_are_not_given_are_those_that_lie_there(tmp_path):
    assert options(tmp_path).capacity == "1000000"
    async with replay_node(data_dir=tmp_path) as replay, joined(replay.address):
        pass
    found = options(tmp_path)
    assert (found.run_id, found.capacity) == ("the-run", "10000")
    assert options(tmp_path, run_id="other", capacity="7").run_id == "other"


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_time_between_syncs_that_is_none_is_a_config_error(tmp_path, seconds):
    with pytest.raises(ConfigError, match="--sync-every"):
        options(tmp_path, sync_every_s=seconds)


@pytest.mark.slow
def test_by_the_command_line_a_killed_node_is_restored_and_a_wrong_start_ends_in_one_sentence(tmp_path):
    data = f"--data-dir={tmp_path / 'data'}"

    async def write(address: str, first: int, last: int) -> None:
        async with joined(parse_address(address)) as target:
            await insert(target, first, last)
            await target.cluster.leave(target.member, reason="done")

    with replay_process(data, "--run-id=one") as (node, address):
        asyncio.run(write(address, 1, 30))
        with process("--role=replay", "--listen=127.0.0.1:0", data) as second:
            assert second.exit_code() == 2
            assert second.log.count("\n") == 1
            assert "in use by another replay" in second.log
        node.popen.kill()
        node.exit_code()
    with replay_process(data) as (node, address):
        node.until_says("restored run one")
        asyncio.run(write(address, 31, 40))
    with process("--role=replay", "--listen=127.0.0.1:0", data, "--run-id=two") as wrong:
        assert wrong.exit_code() == 2
        assert wrong.log.count("\n") == 1
        assert "run_id = 'one', not 'two'" in wrong.log
    assert stored(tmp_path / "data") == [*range(1, 41)]
