"""A learner whose replay goes and comes back: it explores on, then trains on, and each row is stored once."""

import asyncio
import re
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from nodes.learning_cases import (
    FOREVER,
    QUICK,
    checkpoint_step,
    held_at_ends,
    learner_options,
    learning,
    status_of,
    train,
    training,
    until_stored,
    until_trained,
)
from nodes.running import ended, joined, replay_node, store_at
from replay.wire.services import SCHEMA, eventually, promptly, rows_of, serials_of

from dase_grpc.errors import UnreachableError
from dase_grpc.replay.client.connection import Stream
from dase_grpc.replay.client.link import ReplayLink
from dase_grpc.replay.client.membership import LearnerConnection
from dase_grpc.replay.client.shards import Shards

ON = {"train__steps": FOREVER, "eval__every": 100_000, "replay__capacity": 10_000}


def rows_on_disk(path):
    """The rows of a directory that no replay holds, oldest first, their schema, and what was committed."""
    with store_at(path) as store:
        return store.ring.ordered().copy(), store.schema, store.committed("learner-0", agent_id=0)


def assert_one_unbroken_story(rows, schema):
    """The rows of one agent in PointGoal, episodes of 20 steps: none missing, none doubled, in order."""
    own = schema.named(np.ascontiguousarray(rows))
    within = np.arange(len(rows) - 1) % 20 != 19
    assert (own["next_observation"][:-1] == own["observation"][1:])[within].all()
    assert (np.diff(own["policy_version"].astype(int)) >= 0).all()


@pytest.mark.slow
async def test_a_learner_trains_on_when_a_durable_replay_is_back_and_no_row_is_lost_or_doubled(
    tmp_path, caplog
):
    data, run = {"data_dir": tmp_path / "data", "min_size": 20}, tmp_path / "run"
    async with replay_node(**data) as first:
        address = first.address
        async with learning(learner_options(address, run, **ON)) as (task, stop):
            progress = await until_trained(address, task=task)
            await first.end()
            for _ in range(2):
                await eventually(lambda: "trying again for up to 600 s" in caplog.text)
                async with replay_node(**data, listen=address):
                    progress = await until_trained(address, updates=progress.updates + 30, task=task)
                    await eventually(lambda: "answers again" in caplog.text)  # on all streams
                    caplog.clear()
            async with replay_node(**data, listen=address):
                await until_trained(address, updates=progress.updates + 30, task=task)
                await ended(task, stop)
                agent = (await status_of(address)).agents[0]
    assert (agent.lease, agent.epoch) == ("left", 1)
    steps = checkpoint_step(run)
    rows, schema, committed = rows_on_disk(tmp_path / "data")
    assert (len(rows), committed) == (steps, steps)
    assert_one_unbroken_story(rows, schema)


async def test_a_learner_explores_on_while_its_replay_is_away_until_its_queue_is_full_and_says_so(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("dase_grpc.replay.client.link.QUEUED_ROWS", 400)  # far more than wait to be sent
    hasty = replace(QUICK, gather_s=0.001)
    data, run = {"data_dir": tmp_path / "data", "min_size": 20}, tmp_path / "run"
    async with replay_node(**data) as replay:
        address = replay.address
        async with learning(learner_options(address, run, timing=hasty, **ON)) as (task, stop):
            before = await until_trained(address, task=task)
            await replay.end()
            await eventually(lambda: "no more fit" in caplog.text)
            shut_down = f"waiting for the replay service at {address}, which shut down"
            await eventually(lambda: shut_down in caplog.text)  # another thread says it
            async with replay_node(**data, listen=address):
                after = await until_trained(address, updates=before.updates + 100, task=task)
                await eventually(lambda: "going on, after a wait of" in caplog.text)
                await ended(task, stop)
    # explored without updating, for as long as there was room beside the rows that waited already
    assert after.step - after.updates >= before.step - before.updates + 100
    rows, schema, committed = rows_on_disk(tmp_path / "data")
    assert len(rows) == committed == checkpoint_step(run)
    assert_one_unbroken_story(rows, schema)


async def test_a_replay_that_came_back_empty_is_said_refilled_and_trained_from(tmp_path, caplog):
    async with replay_node(min_size=20) as replay:
        address = replay.address
        async with learning(learner_options(address, tmp_path / "run", **ON)) as (task, stop):
            before = await until_trained(address, updates=50, task=task)
            await replay.end()
            async with replay_node(min_size=20, listen=address):
                await until_trained(address, updates=before.updates + 50, task=task)
                status = await status_of(address)
                await ended(task, stop)
    assert "came back without its data" in caplog.text
    assert status.agents[0].epoch == 1
    assert status.buffer.inserted_total > 20  # how far training went on is told with a delay
    steps = checkpoint_step(tmp_path / "run")
    assert steps > before.step
    assert held_at_ends(caplog)[1] < steps  # not the whole story: the first part is gone


@pytest.mark.slow
async def test_a_learner_whose_replay_came_back_empty_explores_until_it_has_stored_enough_anew(
    tmp_path, caplog
):
    """Though a replay that serves from the first transition on would let it train on a handful of them."""
    settings = {**ON, "agent__start_steps": 100, "replay__min_size": 1}
    async with replay_node() as replay:
        address = replay.address
        async with training(learner_options(address, tmp_path / "run", **settings)) as (task, _):
            await replay.end()
            async with replay_node(listen=address):
                rejoined = await until_trained(address, task=task)
                after = await until_trained(address, updates=rejoined.updates + 20, task=task)
                await until_stored(address, 100)
    (said,) = [each.getMessage() for each in caplog.records if "updates begin once" in each.getMessage()]
    assert re.fullmatch(r"the buffer holds \d+ transitions, so updates .* has stored 100 new ones", said)
    skipped = after.step - after.updates
    assert skipped >= 2 * 99


@pytest.mark.slow
async def test_a_replay_that_came_back_empty_while_all_wait_for_each_other_fills_up_again(tmp_path):
    """Each of two agents has collected what it has to before its first update, and the replay lost it."""
    settings = {**ON, "train__agents": 2, "replay__min_size": 40}
    async with replay_node(min_size=40) as replay:
        address = replay.address
        first = learner_options(address, tmp_path / "run", agent_id=0, **settings)
        async with learning(first) as (task, _):
            await until_stored(address, 20)
            await replay.end()
            async with replay_node(min_size=40, listen=address):
                await until_trained(address, task=task)


@pytest.mark.slow
async def test_a_replay_that_stays_away_is_given_up_with_a_checkpoint(tmp_path, caplog):
    async with replay_node(min_size=20) as replay:
        options = learner_options(replay.address, tmp_path / "run", replay_timeout_s=0.5, **ON)
        async with training(options) as (task, _):
            await replay.end()
            with pytest.raises(UnreachableError, match=r"gave up after|does not answer"):
                await promptly(task)
    assert "is kept in" in caplog.text
    assert "transitions were not acknowledged" in caplog.text
    assert "could not give the lease back" not in caplog.text
    assert checkpoint_step(tmp_path / "run") > 20


@pytest.mark.slow
async def test_a_learner_whose_replay_is_away_can_be_stopped_soon(tmp_path):
    async with (
        replay_node(min_size=20) as replay,
        learning(learner_options(replay.address, tmp_path / "run", **ON)) as (task, stop),
    ):
        await until_trained(replay.address, task=task)
        await replay.end()
        await asyncio.sleep(0.3)
        stop.set()
        with pytest.raises(UnreachableError):
            await promptly(task)


@pytest.mark.slow
async def test_a_learner_that_finishes_while_its_replay_is_away_waits_for_it(tmp_path):
    data = {"data_dir": tmp_path / "data", "min_size": 20}
    async with replay_node(**data) as replay:
        address = replay.address
        options = learner_options(address, tmp_path / "run", **{**ON, "train__steps": 3_000})
        async with training(options) as (task, _):
            await replay.end()
            await asyncio.sleep(0.5)
            async with replay_node(**data, listen=address):
                await promptly(task)
    rows, schema, committed = rows_on_disk(tmp_path / "data")
    assert len(rows) == committed == 3_000
    assert_one_unbroken_story(rows, schema)


async def test_a_new_process_goes_on_from_the_number_its_writer_has_committed(tmp_path):
    data = {"data_dir": tmp_path / "data", "min_size": 20}
    async with replay_node(**data) as replay:
        for run, steps in (("first", 80), ("second", 120)):
            options = learner_options(replay.address, tmp_path / run, **{**ON, "train__steps": steps})
            await train(options)
    rows, _, committed = rows_on_disk(tmp_path / "data")
    assert len(rows) == committed == 200


@asynccontextmanager
async def power_lost(tmp_path, monkeypatch, *, rows):
    """A link whose replay had committed `rows` rows, then lost power before any sync, and is back."""
    boots = iter(("one", "two"))
    monkeypatch.setattr("dase_grpc.nodes.replay.boot_id", lambda: next(boots))
    monkeypatch.setattr(
        "dase_grpc.replay.buffer.run.SharedRun.close", lambda run: run._disk.directory.close()
    )
    data = {"data_dir": tmp_path / "data"}
    async with replay_node(**data) as replay, joined(replay.address) as target:
        connection = LearnerConnection(target, timeout_s=60, timing=QUICK)
        link = ReplayLink(Shards([connection]), batch_size=4, prefetch=1, writer_id="w")
        inserting = asyncio.ensure_future(link.insert_rows())
        for row in rows_of(1, rows):
            link.store(row)
        await eventually(lambda: not link.unacknowledged)
        await replay.end()
        async with replay_node(**data, listen=replay.address):
            yield link, inserting, connection
            await promptly(inserting)


async def test_acknowledged_rows_that_a_power_loss_took_are_said_and_the_next_follow_without_a_gap(
    tmp_path, monkeypatch, caplog
):
    async with power_lost(tmp_path, monkeypatch, rows=20) as (link, _, connection):
        for row in rows_of(21, 25):
            link.store(row)
        link.no_more_rows()
    assert connection.losses == 1
    assert "without the latest 20 transitions of this agent that it had acknowledged" in caplog.text
    with store_at(tmp_path / "data", "two") as store:
        assert serials_of(store.ring.ordered(), SCHEMA) == [21, 22, 23, 24, 25]


@pytest.mark.slow
async def test_streams_that_break_again_and_again_store_each_row_once(tmp_path):
    data = {"data_dir": tmp_path / "data"}
    async with replay_node(**data) as first, joined(first.address) as target:
        link = ReplayLink(
            Shards([LearnerConnection(target, timeout_s=60, timing=QUICK)]),
            batch_size=4,
            prefetch=1,
            writer_id="w",
        )
        inserting = asyncio.ensure_future(link.insert_rows())
        address = first.address
        storing = asyncio.ensure_future(
            asyncio.to_thread(lambda: [link.store(row) for row in rows_of(1, 8_000)])
        )
        await asyncio.sleep(0.05)
        await first.end()
        for _ in range(3):
            async with replay_node(**data, listen=address):
                await asyncio.sleep(0.1)
        async with replay_node(**data, listen=address):
            await promptly(storing)
            link.no_more_rows()
            await promptly(inserting)
            assert not link.unacknowledged
    with store_at(tmp_path / "data") as store:
        assert serials_of(store.ring.ordered(), SCHEMA) == [*range(1, 8_001)]
    assert Stream.INSERT not in link._shards.first._broken
