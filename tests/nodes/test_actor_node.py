"""The actor node: explores for an agent that another node trains, and stores each transition once."""

import asyncio
import re
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from nodes.acting_cases import FakeLearner, act, acting, actor_options, assert_unbroken, rows_in
from nodes.learning_cases import QUICK, learner_options, training
from nodes.running import ended
from replay.wire.services import eventually, promptly, serving

from dase_grpc.errors import ConfigError, UnreachableError, WaitedTooLongError
from dase_grpc.launch.drill.cluster import proxied
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.progress import Progress


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """What takes seconds takes milliseconds."""
    monkeypatch.setattr("dase_grpc.learning.training.collection.RATE_OVER_S", 0.05)


@pytest.fixture
async def service():
    async with serving(capacity=100_000) as running:
        yield running


def inserted(service, agent_id=0):
    return service.run.store.traffic.inserted[agent_id] if service.run.opened else 0


@asynccontextmanager
async def exploring(service, rows, **changes):
    """An actor that has stored more than some rows."""
    async with acting(actor_options(service.address, **changes)) as node:
        await eventually(lambda: inserted(service) > rows)
        yield node


def seen(service):
    """What the one actor says of itself."""
    return service.run.attendance.all(0.0)[0].attendance


@pytest.mark.slow
async def test_an_actor_explores_by_the_latest_policy_and_each_row_says_which_that_was(service):
    learner = await FakeLearner.publishing(service, 30)
    async with exploring(service, 50) as (task, stop):
        await learner.publish(77)
        await eventually(lambda: inserted(service) and 77 in rows_in(service).view(np.uint32)[:, -1])
        await ended(task, stop)
    rows = rows_in(service)
    versions = rows.view(np.uint32)[:, -1].astype(int)
    assert set(versions) == {30, 77}
    assert (np.diff(versions) >= 0).all()
    assert set(learner.schema.agent_ids(rows)) == {0}
    assert_unbroken(rows, learner.schema)
    assert service.run.attendance.all(0.0) == []
    assert any("actor of agent 0, left" in event for event in service.events)


async def test_an_actor_that_is_stopped_stores_the_steps_held_back_for_n_step_returns(service, caplog):
    await FakeLearner.publishing(service, 0)
    async with exploring(service, 50, envs=2, agent__n_step=5) as (task, stop):
        await ended(task, stop)
    (steps,) = re.findall(r"stopped after (\d+) environment steps", caplog.text)
    assert len(rows_in(service)) == int(steps)


async def test_it_waits_for_a_learner_and_for_a_policy_and_says_for_what(service, caplog):
    async with acting(actor_options(service.address)) as (task, stop):
        await eventually(lambda: bool(service.run.attendance.all(0.0)))
        assert seen(service).state == (
            "waiting: a learner of agent 0: start one with `dase node --role learner --agent 0`"
        )
        learner = await FakeLearner.join(service)
        await eventually(lambda: seen(service).state == "waiting: a policy of agent 0")
        await eventually(lambda: "waiting for a policy of agent 0" in caplog.text)
        await learner.publish(0)
        await eventually(lambda: inserted(service) > 5)
        await ended(task, stop)
    assert "waiting up to 600 s for a learner of agent 0" in caplog.text


async def test_it_ends_with_a_sentence_where_no_learner_or_no_policy_comes_in_time(service):
    with pytest.raises(WaitedTooLongError, match="agent 0 has had no learner for 0 s"):
        await act(actor_options(service.address, replay_timeout_s=0))
    await FakeLearner.join(service)
    options = actor_options(service.address, replay_timeout_s=0.2)
    with pytest.raises(WaitedTooLongError, match="the learner of agent 0 has published no policy"):
        await act(options)


@pytest.mark.slow
async def test_an_untrained_agent_is_explored_uniformly_until_all_its_actors_have_collected_start_steps(
    service,
):
    learner = await FakeLearner.join(service)
    agent = await learner.publish(0)
    options = actor_options(service.address, agent__start_steps=600, agent__exploration_noise=0.0)

    def by_policy(rows):
        own = learner.schema.named(rows_in(service)[rows])
        return np.isclose(own["action"], agent.act(own["observation"]), atol=1e-5)[:, 0]

    async with acting(options), acting(options):
        await eventually(lambda: inserted(service) > 600)
        # rows that are stored and not yet acknowledged count twice for the actor that collected them
        assert by_policy(slice(300)).mean() < 0.1
        await eventually(lambda: by_policy(slice(-300, None)).all())  # once both have heard of it


async def test_a_trained_policy_is_acted_by_even_if_the_buffer_came_back_empty(service):
    learner = await FakeLearner.join(service)
    agent = await learner.publish(5)
    options = actor_options(service.address, agent__start_steps=600, agent__exploration_noise=0.0)
    async with acting(options):
        await eventually(lambda: inserted(service) > 200)
    own = learner.schema.named(rows_in(service))
    assert np.isclose(own["action"], agent.act(own["observation"]), atol=1e-5).all()


@pytest.mark.slow
async def test_when_the_learner_is_replaced_the_actor_goes_on_under_the_new_epoch_as_the_same_writer(
    service, caplog
):
    learner = await FakeLearner.publishing(service, 3)
    async with exploring(service, 50) as (task, stop):
        for epoch in (2, 3):
            await learner.leave()
            await eventually(lambda: "waiting: a learner of agent 0" in seen(service).state)
            before = inserted(service)
            await learner.join_again()
            await eventually(lambda count=before: inserted(service) > count + 50)
            assert f"agent 0 has another learner (epoch {epoch})" in caplog.text
        (writer,) = {name for agent, name in service.run.store._committed if agent == 0}
        assert writer.startswith("actor-")
        await ended(task, stop)
    assert service.run.store.committed(writer, agent_id=0) == inserted(service)
    assert_unbroken(rows_in(service), learner.schema)


@pytest.mark.slow
async def test_streams_that_break_again_and_again_lose_and_double_nothing(service):
    learner = await FakeLearner.publishing(service, 3)
    async with proxied(service.address) as (proxy, address), acting(actor_options(address)) as (task, stop):
        for _ in range(5):
            before = inserted(service)
            await eventually(lambda count=before: inserted(service) > count + 100)
            proxy.cut()
            await asyncio.sleep(0)
            proxy.heal()
        await ended(task, stop)
    assert_unbroken(rows_in(service), learner.schema)


@pytest.mark.slow
async def test_while_the_replay_is_away_it_explores_until_its_queue_is_full_then_waits_and_gives_up(
    service, caplog, monkeypatch
):
    monkeypatch.setattr("dase_grpc.replay.client.link.QUEUED_ROWS", 40)
    await FakeLearner.publishing(service, 3)
    async with (
        proxied(service.address) as (proxy, address),
        acting(actor_options(address, replay_timeout_s=1.0)) as (task, _),
    ):
        await eventually(lambda: inserted(service) > 50)
        proxy.cut()
        await eventually(lambda: "no more fit" in caplog.text)
        with pytest.raises(UnreachableError, match="gave up after"):
            await promptly(task)
    assert "transitions were not acknowledged" in caplog.text


@pytest.mark.slow
async def test_stopping_while_the_learner_is_gone_says_what_was_not_stored(service, monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.client.link.QUEUED_ROWS", 10)
    learner = await FakeLearner.publishing(service, 3)
    options = actor_options(service.address, timing=replace(QUICK, drain_s=0.3))
    async with acting(options) as (task, stop):
        await eventually(lambda: inserted(service) > 20)
        await learner.leave()
        await eventually(lambda: "waiting: a learner" in seen(service).state)
        stop.set()
        with pytest.raises(UnreachableError, match="has not acknowledged"):
            await promptly(task)


async def test_when_its_agent_has_finished_an_actor_drops_what_nobody_needs_and_ends_well(
    service, caplog, monkeypatch
):
    monkeypatch.setattr("dase_grpc.replay.client.link.QUEUED_ROWS", 10)
    learner = await FakeLearner.publishing(service, 3)
    async with exploring(service, 20) as (task, stop):
        await learner.finish()
        await promptly(task)
        assert not stop.is_set()
    assert "agent 0 has finished, so this actor ends after" in caplog.text
    assert "no learner needs any more are dropped" in caplog.text
    assert service.run.attendance.all(0.0) == []


async def test_an_actor_that_is_stopping_waits_no_longer_once_its_agent_has_finished(service, monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.client.link.QUEUED_ROWS", 10)
    learner = await FakeLearner.publishing(service, 3)
    async with exploring(service, 20) as (task, stop):
        await learner.leave()
        await eventually(lambda: "waiting: a learner" in seen(service).state)
        stop.set()
        await learner.join_again()
        await learner.finish()
        await promptly(task)


async def test_an_actor_that_comes_when_its_agent_has_finished_ends_at_once(service, caplog):
    await (await FakeLearner.join(service)).finish()
    await act(actor_options(service.address))
    assert "agent 0 has finished, so this actor ends" in caplog.text


async def test_an_actor_that_is_to_stay_waits_to_be_stopped_once_its_agent_has_finished(
    service, caplog, monkeypatch
):
    registry = make_registry()
    monkeypatch.setattr("dase_grpc.nodes.frame.make_registry", lambda: registry)

    def shown():
        return registry.get_sample_value("dase_explorer_finished", {"agent_id": "0"})

    learner = await FakeLearner.publishing(service, 3)
    async with exploring(service, 20, stay=True) as (task, stop):
        assert shown() == 0
        await learner.finish()
        await eventually(lambda: "stays until it is stopped" in caplog.text)
        assert shown() == 1
        assert service.run.attendance.all(0.0) == []
        assert not task.done()
        await ended(task, stop)


async def test_an_actor_that_is_to_stay_does_so_where_its_agent_has_finished_before(service, caplog):
    await (await FakeLearner.join(service)).finish()
    async with acting(actor_options(service.address, stay=True)) as (task, stop):
        await eventually(lambda: "stays until it is stopped" in caplog.text)
        assert not task.done()
        await ended(task, stop)


async def test_an_actor_that_leaves_gives_its_place_among_the_writers_back(service):
    await FakeLearner.publishing(service, 3)
    async with exploring(service, 5) as (task, stop):
        await ended(task, stop)
    store = service.run.store
    (writer,) = store._committed
    await eventually(lambda: store.watch.gone([writer], time.monotonic()) == [writer])


async def test_several_environments_are_several_and_the_actor_says_so(service):
    learner = await FakeLearner.publishing(service, 9)
    async with acting(actor_options(service.address, envs=3)) as (task, stop):
        await eventually(lambda: inserted(service) > 100 and seen(service).env_steps_per_second > 0)
        attendance = seen(service)
        await ended(task, stop)
    assert (attendance.envs, attendance.policy_version, attendance.state) == (3, 9, "exploring")
    rows = rows_in(service)
    for index in range(3):
        assert_unbroken(np.ascontiguousarray(rows[index::3]), learner.schema)


async def test_the_lag_is_counted_from_what_the_learner_has_done(service):
    learner = await FakeLearner.publishing(service, 100)
    async with acting(actor_options(service.address)):
        await eventually(lambda: inserted(service) > 10)
        await service.client.heartbeat(learner.member, Progress(updates=130))
        await eventually(lambda: seen(service).policy_lag_updates == 30)


async def test_a_policy_of_other_settings_ends_the_actor_with_a_sentence(service):
    await FakeLearner.publishing(service, 1, agent__hidden=[16])
    with pytest.raises(ConfigError, match="start it with the settings of the learner"):
        await act(actor_options(service.address))


async def test_normalised_observations_come_with_the_policy(service):
    learner = await FakeLearner.join(service)
    settings = {"agent__algorithm": "ddpg", "agent__normalise_observations": True}
    await learner.publish(4, **settings)
    async with acting(actor_options(service.address, **settings)):
        await eventually(lambda: inserted(service) > 20)


async def test_a_real_learner_and_an_actor_fill_one_buffer(service, tmp_path):
    options = learner_options(
        service.address,
        tmp_path / "run",
        train__steps=10_000_000,
        eval__every=1_000,
        replay__capacity=100_000,
    )
    async with training(options), acting(actor_options(service.address)):
        await eventually(lambda: len(service.run.store._committed) == 2)
        await eventually(lambda: (seen(service).policy_version or 0) > 50)
