"""The learner node: it trains to its budget, and however it ends nothing hangs and nothing is lost."""

import asyncio
import re
import socket
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import numpy as np
import pytest
from contracts.sentences import refuses
from nodes.learning_cases import (
    ENDLESS,
    FOREVER,
    QUICK,
    checkpoint_step,
    learner_options,
    learning,
    tiny_config,
    train,
    training,
    until_stored,
    until_trained,
)
from nodes.running import ended, replay_node
from replay.wire.services import eventually, listening, promptly, serving

from dase_grpc.errors import AddressError, AgentTakenError, DrainingError, StaleLeaseError, UnreachableError
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.nodes.learner import learner_main, run_learner
from dase_grpc.nodes.options import LearnerOptions
from dase_grpc.replay.client.handoff import Times
from dase_grpc.replay.client.insert import WINDOW_ROWS
from dase_grpc.replay.service.cluster import ClusterServicer
from dase_grpc.replay.service.server import ReplayServicer
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_evaluations


async def test_a_learner_trains_to_its_budget_and_says_why_it_leaves(service, tmp_path):
    await train(learner_options(service.address, tmp_path / "run"))
    assert service.run.store.traffic.inserted == {0: 80}
    agent = (await service.client.status()).agents[0]
    assert (agent.lease, agent.reason) == ("left", "finished after 80 steps")
    assert (agent.progress.state, agent.progress.step, agent.progress.updates) == ("finished", 80, 61)
    assert checkpoint_step(tmp_path / "run") == 80
    evaluations = read_evaluations(RunDirectory.open(tmp_path / "run").agent(0).evaluations.path)
    assert evaluations.step.tolist() == [0, 40, 80]


async def test_a_learner_logs_each_evaluation_and_where_its_results_are(service, tmp_path, caplog):
    await train(learner_options(service.address, tmp_path / "run"))
    lines = [record.getMessage() for record in caplog.records]
    assert f"joined run the-run at {service.address} as agent 0" in lines
    assert lines.index(f"results go to {tmp_path / 'run'}") < lines.index(f"results: {tmp_path / 'run'}")
    told = [line for line in lines if line.startswith("step ") and "evaluation" in line]
    assert [line.split(":")[0] for line in told] == ["step 0 of 80", "step 40 of 80", "step 80 of 80"]
    assert re.fullmatch(r"step 0 of 80: evaluation -[\d.]+", told[0])
    assert re.fullmatch(
        r"step 80 of 80: evaluation -[\d.]+ \(first -[\d.]+\), return -[\d.]+, \d+ updates/s", told[-1]
    )


async def test_every_transition_of_every_agent_is_in_the_buffer_once_and_in_order(service, tmp_path):
    options = [
        learner_options(service.address, tmp_path / "run", agent_id=agent_id, train__agents=2)
        for agent_id in (0, 1)
    ]
    await promptly(asyncio.gather(*(run_learner(o, asyncio.Event()) for o in options)))
    store = service.run.store
    rows, schema = store.ring.ordered(), store.schema
    assert store.ring.size_by_agent == {0: 80, 1: 80}
    assert store.traffic.refused == {}
    firsts = []
    for agent_id in (0, 1):
        own = schema.named(np.ascontiguousarray(rows[schema.agent_ids(rows) == agent_id]))
        within_episode = np.arange(79) % 20 != 19
        assert (own["next_observation"][:-1] == own["observation"][1:])[within_episode].all()
        assert (own["bootstrap"] == 1).all()
        assert (own["reward"] == -np.abs(own["next_observation"][:, 0])).all()
        assert (np.diff(own["policy_version"].astype(int)) >= 0).all()
        assert own["policy_version"][[0, -1]].tolist() == [0, 60]
        firsts.append(own["observation"][0, 0])
    assert firsts[0] != firsts[1]


async def test_a_learner_without_an_id_takes_the_next_free_one(service, tmp_path):
    for agent_id in (0, 1):
        # the first has left, so its id must stay taken by somebody else
        if agent_id:
            env = make_env("worlds:PointGoal", {})
            await service.client.join(node_name="x", schema=schema_of(env, "worlds:PointGoal"), agent_id=0)
            env.close()
        await train(learner_options(service.address, tmp_path / f"run{agent_id}", train__agents=2))
        assert (tmp_path / f"run{agent_id}" / "agents" / str(agent_id) / "evaluations.csv").exists()


async def test_stopping_in_the_middle_drains_keeps_a_checkpoint_and_leaves(service, tmp_path):
    options = learner_options(service.address, tmp_path / "run", **ENDLESS)
    async with training(options, updates=20) as (task, stop):
        await ended(task, stop)
    agent = (await service.client.status()).agents[0]
    steps = agent.progress.step
    assert agent.reason == f"stopped after {steps:,} steps"
    assert checkpoint_step(tmp_path / "run") == steps
    assert service.run.store.traffic.inserted == {0: steps}


@pytest.mark.parametrize("attempt", range(5))
async def test_stopping_at_any_moment_ends_well(service, tmp_path, attempt):
    """A batch that is on its way when the thread takes no more used to be an error."""
    options = learner_options(service.address, tmp_path / "run", **ENDLESS, replay__prefetch=8)
    async with training(options, updates=10 * attempt) as (task, stop):
        await ended(task, stop)


async def test_stopping_before_training_starts_ends_well(service, tmp_path):
    stop = asyncio.Event()
    stop.set()
    await promptly(run_learner(learner_options(service.address, tmp_path / "run"), stop))
    assert not (await service.client.status()).agents


async def test_stopping_while_transitions_are_missing_ends_well(tmp_path):
    async with serving(min_size=50) as service:
        options = learner_options(
            service.address, tmp_path / "run", train__agents=3, agent__start_steps=20, replay__min_size=50
        )
        async with learning(options) as (task, stop):
            await eventually(lambda: service.run.opened and len(service.run.store.ring) == 20)
            await service.round_trips()
            await ended(task, stop)
        agent = (await service.client.status()).agents[0]
        assert (agent.progress.step, agent.reason) == (20, "stopped after 20 steps")
        assert checkpoint_step(tmp_path / "run") == 20


@pytest.mark.slow
async def test_a_wait_is_shown_in_the_status(tmp_path):
    async with serving(min_size=50) as service:
        options = learner_options(service.address, tmp_path / "run", train__agents=3, replay__min_size=50)
        async with learning(options):
            await eventually(lambda: "waiting: 30 more transitions (20 of 50)" in states(service))


def states(service):
    return [lease.progress.state for lease in service.run.leases.all()]


async def test_a_replay_that_shuts_down_ends_the_learner_promptly_with_a_checkpoint(tmp_path, caplog):
    async with replay_node() as replay:
        options = learner_options(replay.address, tmp_path / "run", **ENDLESS, replay_timeout_s=0)
        async with training(options) as (task, _):
            await replay.end()
            with pytest.raises((DrainingError, UnreachableError)):
                await promptly(task)
    assert checkpoint_step(tmp_path / "run") > 20
    assert "is kept in" in caplog.text
    assert "could not give the lease back" not in caplog.text


async def test_a_replay_that_shuts_down_ends_a_learner_that_waits_for_transitions(tmp_path):
    async with replay_node(min_size=50) as replay:
        options = learner_options(
            replay.address, tmp_path / "run", train__agents=3, replay__min_size=50, replay_timeout_s=0
        )
        async with learning(options) as (task, _):
            await until_stored(replay.address, 20)
            await replay.end()
            with pytest.raises((DrainingError, UnreachableError)):
                await promptly(task)
    assert checkpoint_step(tmp_path / "run") == 20


async def test_a_server_that_is_torn_down_without_draining_ends_the_learner(service, tmp_path):
    options = learner_options(service.address, tmp_path / "run", **ENDLESS, replay_timeout_s=0)
    async with training(options) as (task, _):
        await service.server.stop(None)
        with pytest.raises(UnreachableError):
            await promptly(task)
    assert checkpoint_step(tmp_path / "run") > 20


async def test_a_learner_whose_lease_was_taken_ends_as_such(service, tmp_path):
    options = learner_options(service.address, tmp_path / "run", **ENDLESS)
    async with training(options) as (task, _):
        service.clock.now += 100
        service.run.leases.join("usurper", 0, service.clock.now)
        with pytest.raises(StaleLeaseError, match="usurper"):
            await promptly(task)
    assert service.run.leases.all()[0].state(service.clock.now) == "live"


async def test_a_replay_that_never_answers_is_given_up_in_time(tmp_path, caplog):
    nobody, hasty = Address("127.0.0.1", 1), Times(say_silent_after_s=0.05)
    with pytest.raises(
        UnreachableError,
        match=r":1 does not answer .*: nothing listens there; start it with `dase node --role replay",
    ):
        await train(learner_options(nobody, tmp_path / "run", connect_timeout_s=0.3, timing=hasty))
    said = "waiting up to 0.3 s for the replay service at 127.0.0.1:1: nothing listens there; start it"
    assert caplog.text.count(said) == 1
    assert not (tmp_path / "run").exists()


async def test_stopping_while_the_replay_is_not_there_yet_ends_well(tmp_path, caplog):
    async with learning(learner_options(Address("127.0.0.1", 1), tmp_path / "run")) as (task, stop):
        await asyncio.sleep(0)
        await ended(task, stop)
    assert "stopped before joining" in caplog.text


async def test_a_replay_that_comes_later_is_joined(tmp_path):
    async with replay_node() as first:
        address = first.address
    options = learner_options(address, tmp_path / "run")
    async with learning(options) as (task, _):
        await asyncio.sleep(0.05)
        async with replay_node(listen=address):
            await promptly(task)
    assert checkpoint_step(tmp_path / "run") == 80


class Hiccup(ClusterServicer):
    """Fails heartbeats while `failing`, as if they were lost."""

    failing = False
    failed = 0

    async def Heartbeat(self, request, context):
        if self.failing:
            self.failed += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a hiccup")
        return await super().Heartbeat(request, context)


@asynccontextmanager
async def hiccuping(ttl_s):
    """A service whose heartbeats can fail while its streams go on, and its address."""
    async with serving(ttl_s=ttl_s) as service:
        cluster = Hiccup(service.run, clock=service.clock, on_event=service.events.append)
        async with listening(service.replay, cluster) as (_, address):
            yield cluster, address
            service.replay.streams.drain()


@pytest.mark.slow
async def test_heartbeats_that_fail_while_the_streams_go_on_are_ridden_out(tmp_path, caplog):
    async with hiccuping(ttl_s=60) as (cluster, address):
        options = learner_options(address, tmp_path / "run", **ENDLESS)
        async with learning(options) as (task, stop):
            progress = await until_trained(address, task=task)
            cluster.failing = True
            await eventually(lambda: cluster.failed > 3)
            cluster.failing = False
            await until_trained(address, updates=progress.updates + 20, task=task)
            await ended(task, stop)
    assert "UNAVAILABLE" in caplog.text
    assert "answers again" in caplog.text


@pytest.mark.slow
async def test_heartbeats_that_fail_for_as_long_as_the_replay_may_be_away_end_the_learner(tmp_path):
    async with hiccuping(ttl_s=60) as (cluster, address):
        options = learner_options(address, tmp_path / "run", **ENDLESS, replay_timeout_s=0.3)
        async with training(options) as (task, _):
            cluster.failing = True
            with pytest.raises(UnreachableError, match=r"gave up after .*UNAVAILABLE"):
                await promptly(task)
    assert checkpoint_step(tmp_path / "run") > 20


class Motionless(ReplayServicer):
    """Opens Insert streams and reads nothing from them."""

    opened = 0

    async def Insert(self, request_iterator, context):
        await context.read()
        await context.write(replay_pb2.InsertResponse())
        self.opened += 1
        await asyncio.Event().wait()


@pytest.mark.parametrize("steps", [500, 9_000], ids=["rows are not acknowledged", "store blocks"])
@pytest.mark.slow
async def test_a_learner_whose_rows_nobody_takes_is_ended_by_a_limit(tmp_path, monkeypatch, steps):
    monkeypatch.setattr("dase_grpc.replay.client.link.QUEUED_ROWS", 10)
    async with serving(capacity=steps) as service:
        replay = Motionless(service.run)
        async with listening(replay, service.cluster) as (_, address):
            options = learner_options(
                address,
                tmp_path / "run",
                train__steps=FOREVER,
                agent__start_steps=steps,
                replay__capacity=steps,
                eval__every=FOREVER,
                timing=replace(QUICK, drain_s=0.2),
            )
            async with learning(options) as (task, stop):
                await eventually(lambda: step_of(service) >= min(steps, WINDOW_ROWS) - 20)
                await service.round_trips()
                stop.set()
                with pytest.raises(
                    UnreachableError, match=r"has not acknowledged \d+ transitions within 0\.2 s"
                ):
                    await promptly(task)
    assert checkpoint_step(tmp_path / "run") > 0


def step_of(service):
    return max((lease.progress.step for lease in service.run.leases.all()), default=0)


async def test_a_learner_says_whether_it_has_taken_its_last_step(tmp_path):
    async with replay_node() as replay:
        options = learner_options(replay.address, tmp_path / "whole")
        assert await train(options)
        endless = learner_options(replay.address, tmp_path / "cut", train__steps=FOREVER)
        async with training(endless, epoch=2) as (task, stop):
            assert not await ended(task, stop)


async def test_a_learner_that_is_to_stay_has_left_and_waits_to_be_stopped(
    service, tmp_path, caplog, monkeypatch
):
    registry = make_registry()
    monkeypatch.setattr("dase_grpc.nodes.frame.make_registry", lambda: registry)
    async with learning(learner_options(service.address, tmp_path / "run", stay=True)) as (task, stop):
        await eventually(lambda: "stays until it is stopped" in caplog.text)
        assert (await service.client.status()).agents[0].lease == "left"
        assert registry.get_sample_value("dase_explorer_finished", {"agent_id": "0"}) == 1
        assert not task.done()
        assert await ended(task, stop)


@pytest.mark.parametrize(("finished", "code"), [(True, 0), (False, 75)])
def test_a_learner_that_is_stopped_before_its_last_step_ends_with_the_code_for_that(
    tmp_path, monkeypatch, finished, code
):
    async def trained(options, stop):
        return finished

    monkeypatch.setattr("dase_grpc.nodes.learner.run_learner", trained)
    options = learner_options(Address("127.0.0.1", 1), tmp_path, unfinished_code=75)
    assert learner_main(options, stdin_is_leash=False) == code


@pytest.mark.parametrize("code", [75, 0])
def test_a_learner_whose_agent_another_one_still_has_ends_with_that_code_if_there_is_one(
    tmp_path, monkeypatch, code
):
    async def refused(options, stop):
        raise AgentTakenError("agent 0 is held by the live node 'old'")

    monkeypatch.setattr("dase_grpc.nodes.learner.run_learner", refused)
    options = learner_options(Address("127.0.0.1", 1), tmp_path, unfinished_code=code)
    assert learner_main(options, stdin_is_leash=False) == (code or AgentTakenError.exit_code)


@pytest.mark.parametrize(
    ("agent_id", "said"),
    [
        (None, "a learner without --agent takes agent 0's port, metrics.port + 1, so give each learner"),
        (0, "choose another metrics port, or 0 for none"),
    ],
)
async def test_a_metrics_port_that_is_taken_is_said_with_what_to_do(tmp_path, agent_id, said):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = tiny_config(metrics__port=port - 1)
        options = LearnerOptions.parse(config=config, agent_id=None if agent_id is None else [agent_id])
        with refuses(AddressError, f"cannot serve metrics on 127.0.0.1:{port}", said):
            await run_learner(replace(options, run_dir=tmp_path / "run"), asyncio.Event())
