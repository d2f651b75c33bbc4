"""The learner node: it trains to its budget, and however it ends nothing hangs and nothing is lost."""

import asyncio
import logging
import re
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
import worlds
from meddling import DEEDS, put_back
from nodes.learning_cases import (
    FOREVER,
    QUICK,
    checkpoint_step,
    compute_threads,
    learner_options,
    learning,
    until_stored,
    until_trained,
)
from nodes.running import replay_node
from patience import PATIENCE_S
from replay.wire.services import eventually, listening, promptly, serving

from dase_grpc.errors import (
    AgentTakenError,
    ConfigError,
    DeviceError,
    DrainingError,
    EnvironmentFailedError,
    EnvironmentHangsError,
    EnvironmentSpecError,
    RunDirectoryError,
    RunMismatchError,
    SchemaMismatchError,
    StaleLeaseError,
    UnreachableError,
)
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.nodes.learner import learner_main, run_learner
from dase_grpc.replay.client.handoff import Times
from dase_grpc.replay.client.insert import WINDOW_ROWS
from dase_grpc.replay.service.cluster import ClusterServicer
from dase_grpc.replay.service.server import ReplayServicer
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.runs.checkpoint import latest, load_checkpoint
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.files import FolderLock
from dase_grpc.runs.logs import read_evaluations, read_metrics


@pytest.fixture(autouse=True)
def no_compute_thread_is_left():
    yield
    assert compute_threads() == []


async def train(options):
    await promptly(run_learner(options, asyncio.Event()))


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
    caplog.set_level(logging.INFO, "dase")
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
    options = learner_options(service.address, tmp_path / "run", train__steps=FOREVER, eval__every=10_000)
    async with learning(options) as (task, stop):
        await until_trained(service.address, updates=20, task=task)
        stop.set()
        await promptly(task)
    agent = (await service.client.status()).agents[0]
    steps = agent.progress.step
    assert agent.reason == f"stopped after {steps} steps"
    assert checkpoint_step(tmp_path / "run") == steps
    assert service.run.store.traffic.inserted == {0: steps}


@pytest.mark.parametrize("attempt", range(5))
async def test_stopping_at_any_moment_ends_well(service, tmp_path, attempt):
    """A batch that is on its way when the thread takes no more used to be an error."""
    options = learner_options(
        service.address, tmp_path / "run", train__steps=FOREVER, eval__every=10_000, replay__prefetch=8
    )
    async with learning(options) as (task, stop):
        await until_trained(service.address, updates=10 * attempt, task=task)
        stop.set()
        await promptly(task)


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
            stop.set()
            await promptly(task)
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
    caplog.set_level(logging.INFO, "dase")
    async with replay_node() as replay:
        options = learner_options(
            replay.address, tmp_path / "run", train__steps=FOREVER, eval__every=10_000, replay_timeout_s=0
        )
        async with learning(options) as (task, _):
            await until_trained(replay.address, task=task)
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
    options = learner_options(
        service.address, tmp_path / "run", train__steps=FOREVER, eval__every=10_000, replay_timeout_s=0
    )
    async with learning(options) as (task, _):
        await until_trained(service.address, task=task)
        await service.server.stop(None)
        with pytest.raises(UnreachableError):
            await promptly(task)
    assert checkpoint_step(tmp_path / "run") > 20


async def test_a_learner_whose_lease_was_taken_ends_as_such(service, tmp_path):
    options = learner_options(service.address, tmp_path / "run", train__steps=FOREVER, eval__every=10_000)
    async with learning(options) as (task, _):
        await until_trained(service.address, task=task)
        service.clock.now += 100
        service.run.leases.join("usurper", 0, service.clock.now)
        with pytest.raises(StaleLeaseError, match="usurper"):
            await promptly(task)
    assert service.run.leases.all()[0].state(service.clock.now) == "live"


async def test_an_environment_that_always_raises_ends_its_learner_with_a_checkpoint(
    service, tmp_path, caplog
):
    options = learner_options(
        service.address,
        tmp_path / "run",
        env__id="worlds:RaisesAtStep",
        env__kwargs={"at": 7},
        env__max_restarts=2,
        eval__max_episode_steps=5,
    )
    with pytest.raises(EnvironmentFailedError, match=r"RuntimeError: the simulator broke at step 7 in step"):
        await train(options)
    assert "in reward" in caplog.text  # the traceback of the environment
    agent = (await service.client.status()).agents[0]
    assert agent.lease == "left"
    assert agent.reason.startswith("failed: agent 0 at step 18: the environment raised RuntimeError")
    assert checkpoint_step(tmp_path / "run") == 18
    assert service.run.store.traffic.inserted == {0: 18}


async def test_an_environment_that_raises_once_is_made_anew_and_training_reaches_its_end(service, tmp_path):
    options = learner_options(
        service.address,
        tmp_path / "run",
        env__id="rude:Misbehaves",
        env__kwargs={"what": "stops_iterating", "at": 50},
        train__steps=80,
    )
    await train(options)
    assert service.run.store.traffic.inserted == {0: 80}
    records = read_metrics(tmp_path / "run" / "agents" / "0" / "metrics.jsonl")
    assert [record["env_restarts"] for record in records] == [{}, {}, {"step": 1}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["constructor", "reset", "step", "late"])
async def test_a_learner_trains_where_it_was_started_whatever_its_environment_does_to_the_process(
    service, tmp_path, monkeypatch, when
):
    monkeypatch.chdir(tmp_path)
    deeds = [deed for deed in DEEDS if (when, deed) != ("late", "computes elsewhere")]
    options = learner_options(
        service.address, Path("run"), env__id="meddling:Meddles", env__kwargs={"when": when, "deeds": deeds}
    )
    with put_back():
        await promptly(run_learner(options, asyncio.Event()))
    assert service.run.store.traffic.inserted == {0: 80}
    assert checkpoint_step(tmp_path / "run") == 80


@pytest.mark.slow
async def test_an_environment_that_hangs_is_shown_then_ends_its_learner_and_the_lease_is_given_back(
    service, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("dase_grpc.process.watchdog.SAY_AFTER_S", 0.1)
    options = learner_options(
        service.address, tmp_path / "run", env__id="worlds:Gated", env__timeout_s=3.0, train__steps=FOREVER
    )
    worlds.Gated.gate.clear()
    try:
        async with learning(options) as (task, _):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    agents = (await service.client.status()).agents
                    if agents and agents[0].progress.state.startswith("waiting: the environment's step"):
                        break
                    await asyncio.sleep(0.01)
            with pytest.raises(EnvironmentHangsError, match=r"the environment's step has not returned since"):
                await promptly(task)
            agent = (await service.client.status()).agents[0]
            assert agent.lease == "left"
            assert agent.reason.startswith("failed: the environment's step has not returned")
            assert "hangs here" in caplog.text
    finally:
        worlds.Gated.gate.set()
    await eventually(lambda: compute_threads() == [])


async def test_an_environment_that_breaks_its_own_space_is_a_usage_error(service, tmp_path):
    with pytest.raises(EnvironmentSpecError, match="shape"):
        await train(learner_options(service.address, tmp_path / "run", env__id="worlds:WrongShape"))
    assert (await service.client.status()).agents[0].reason.startswith("failed: the environment returned")


async def test_transitions_that_are_not_finite_are_left_out_and_training_goes_on(service, tmp_path):
    options = learner_options(
        service.address, tmp_path / "run", env__id="worlds:NanAtStep50", train__steps=120, replay__min_size=16
    )
    await train(options)
    assert service.run.store.traffic.inserted == {0: 118}
    assert (await service.client.status()).agents[0].reason == "finished after 120 steps"


async def test_a_replay_that_never_answers_is_given_up_in_time(tmp_path, caplog):
    caplog.set_level(logging.INFO, "dase")
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
    caplog.set_level(logging.INFO, "dase")
    async with learning(learner_options(Address("127.0.0.1", 1), tmp_path / "run")) as (task, stop):
        await asyncio.sleep(0)
        stop.set()
        await promptly(task)
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


async def refused(service, options, error, match):
    """Checks that a learner is refused, and that its lease does not keep the next one out."""
    with pytest.raises(error, match=match):
        await train(options)
    assert [agent.lease for agent in (await service.client.status()).agents] == ["left"]


async def test_a_minimum_that_is_never_reached_is_a_config_error(tmp_path):
    async with serving(min_size=21) as service:
        await refused(
            service, learner_options(service.address, tmp_path / "run"), ConfigError, "no batch before 21"
        )


async def test_a_batch_or_warm_up_beyond_the_replays_capacity_is_a_config_error(tmp_path):
    async with serving(capacity=15) as service:
        options = learner_options(service.address, tmp_path / "run")
        await refused(service, options, ConfigError, "exceeds replay.capacity = 15")


async def test_an_agent_id_beyond_the_configured_agents_is_a_config_error(service, tmp_path):
    options = learner_options(service.address, tmp_path / "run", agent_id=1)
    await refused(service, options, ConfigError, "agent id 1.*--agents 2")


async def test_results_are_never_overwritten(service, tmp_path):
    await train(learner_options(service.address, tmp_path / "run"))
    options = learner_options(service.address, tmp_path / "run")
    await refused(service, options, RunDirectoryError, "already holds results of agent 0.*--run-dir")


async def test_a_run_directory_of_something_else_is_refused_with_the_learners_remedy(service, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    options = learner_options(service.address, tmp_path / "run")
    await refused(service, options, RunDirectoryError, "is not empty; choose another --run-dir$")


async def test_another_configuration_in_the_run_directory_is_refused(service, tmp_path):
    await train(learner_options(service.address, tmp_path / "run"))
    options = learner_options(service.address, tmp_path / "run", agent__gamma=0.5)
    await refused(
        service,
        options,
        RunDirectoryError,
        r"is 0\.99 there and 0\.5 here.*; start it with the same settings, or choose another --run-dir$",
    )


async def test_a_taken_id_another_run_and_another_environment_are_refused_without_a_trace(service, tmp_path):
    await service.join(0)
    options = learner_options(service.address, tmp_path / "run", agent_id=0)
    with pytest.raises(RunMismatchError, match="leave --run-id out"):
        await train(replace(options, run_id="another"))
    with pytest.raises(SchemaMismatchError, match=r"worlds:PointGoal.*; start it with --env worlds:"):
        await train(options)
    with pytest.raises(SchemaMismatchError):
        await train(replace(options, agent_id=None))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
async def test_a_live_holder_of_the_id_is_named(service, tmp_path):
    options = learner_options(service.address, tmp_path / "run", agent_id=0, train__steps=FOREVER)
    async with learning(options) as (task, _):
        await until_trained(service.address, task=task)
        with pytest.raises(AgentTakenError, match="held by the live node 'learner@"):
            await train(replace(options, run_dir=tmp_path / "other"))


async def test_a_device_that_is_not_there_is_refused_before_anything_is_joined(service, tmp_path):
    with pytest.raises(DeviceError, match="--gpu 99"):
        await train(learner_options(service.address, tmp_path / "run", gpu=99))
    assert not service.run.opened


async def test_products_that_the_cpu_does_not_have_are_refused_before_anything_is_joined(
    service, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(DeviceError, match=r"agent\.products = bfloat16: torch finds no instructions"):
        await train(learner_options(service.address, tmp_path / "run", agent__products="bfloat16"))
    assert not service.run.opened


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
    caplog.set_level(logging.INFO, "dase")
    async with hiccuping(ttl_s=60) as (cluster, address):
        options = learner_options(address, tmp_path / "run", train__steps=FOREVER, eval__every=10_000)
        async with learning(options) as (task, stop):
            progress = await until_trained(address, task=task)
            cluster.failing = True
            await eventually(lambda: cluster.failed > 3)
            cluster.failing = False
            await until_trained(address, updates=progress.updates + 20, task=task)
            stop.set()
            await promptly(task)
    assert "UNAVAILABLE" in caplog.text
    assert "answers again" in caplog.text


@pytest.mark.slow
async def test_heartbeats_that_fail_for_as_long_as_the_replay_may_be_away_end_the_learner(tmp_path):
    async with hiccuping(ttl_s=60) as (cluster, address):
        options = learner_options(
            address, tmp_path / "run", train__steps=FOREVER, eval__every=10_000, replay_timeout_s=0.3
        )
        async with learning(options) as (task, _):
            await until_trained(address, task=task)
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


async def test_the_recorded_configuration_says_what_the_replay_really_holds(service, tmp_path):
    options = learner_options(service.address, tmp_path / "run", replay__capacity=777_777)
    await train(replace(options, command=("dase", "node")))
    run = RunDirectory.open(tmp_path / "run")
    assert run.config.replay.capacity == service.run.store.ring.capacity
    assert run.config.replay.min_size == service.run.min_size
    assert run.run["command"] == "dase node"


async def test_a_run_id_that_leads_out_of_the_folder_of_runs_is_refused(service, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    service.run.run_id = "../elsewhere"
    options = replace(learner_options(service.address, tmp_path / "run"), run_dir=None)
    with pytest.raises(RunDirectoryError, match="cannot name a folder"):
        await train(options)
    assert list(tmp_path.parent.glob("elsewhere")) == []


# -- going on from a checkpoint -----------------------------------------------------------------------


async def stopped(service, run_dir, **settings):
    """A learner that is stopped in the midst of training; returns the step of its checkpoint."""
    options = learner_options(service.address, run_dir, train__steps=FOREVER, **settings)
    async with learning(options) as (task, stop):
        await until_trained(service.address, updates=30, task=task)
        stop.set()
        await promptly(task)
    return checkpoint_step(run_dir)


@pytest.mark.slow
async def test_a_resumed_learner_goes_on_from_its_checkpoint_with_the_sequence_numbers_that_follow(
    service, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "dase")
    step = await stopped(service, tmp_path / "run")
    stored = service.run.store.traffic.inserted[0]
    assert stored == step
    total = step // 40 * 40 + 100
    resume_dir = tmp_path / "run"
    await train(learner_options(service.address, resume_dir, train__steps=total, resume=True))
    assert service.run.store.traffic.inserted[0] == total
    assert service.run.store.committed("learner-0", agent_id=0) == total
    agent = RunDirectory.open(resume_dir).agent(0)
    steps = read_evaluations(agent.evaluations.path).step.tolist()
    assert steps == [*range(0, total, 40), total]
    assert checkpoint_step(resume_dir) == total
    run = RunDirectory.open(resume_dir)
    assert run.config.train.steps == total
    assert [each["from_steps"] for each in run.run["resumed"]] == [[step]]
    assert "updates begin once" not in caplog.text


async def test_a_resumed_learner_that_finds_an_empty_buffer_fills_it_before_it_updates(tmp_path, caplog):
    async with serving() as first:
        step = await stopped(first, tmp_path / "run")
    kept = load_checkpoint(latest(tmp_path / "run/agents/0/checkpoints"))
    run_dir = tmp_path / "run"
    async with serving() as second:
        options = learner_options(second.address, run_dir, train__steps=step + 30, resume=True)
        await train(options)
        assert second.run.store.traffic.inserted == {0: 30}
    last = load_checkpoint(latest(run_dir / "agents/0/checkpoints"))
    assert last.tensors["updates"] - kept.tensors["updates"] == 30 - 20 + 1
    assert "the buffer holds 0 transitions, so updates begin once this agent has stored 20" in caplog.text


async def test_a_resumed_learner_without_a_checkpoint_begins_anew_and_says_so(service, tmp_path, caplog):
    options = learner_options(service.address, tmp_path / "run", resume=True)
    await train(options)
    assert "agent 0 has no checkpoint to resume from, so it begins anew" in caplog.text
    assert checkpoint_step(tmp_path / "run") == 80


async def test_a_resumed_learner_passes_over_a_damaged_checkpoint_and_says_so(service, tmp_path, caplog):
    await train(learner_options(service.address, tmp_path / "run", train__checkpoint_every=30))
    (tmp_path / "run/agents/0/checkpoints/step-000000080/state.safetensors").write_bytes(b"")
    await train(learner_options(service.address, tmp_path / "run", train__checkpoint_every=30, resume=True))
    assert "its checksum does not match state.safetensors; an older checkpoint is used" in caplog.text
    assert checkpoint_step(tmp_path / "run") == 80
    curve = read_evaluations(RunDirectory.open(tmp_path / "run").agent(0).evaluations.path)
    assert curve.step.tolist() == [0, 40, 80]


async def test_a_learner_does_not_resume_with_other_settings(service, tmp_path):
    await train(learner_options(service.address, tmp_path / "run"))
    options = learner_options(service.address, tmp_path / "run", agent__tau=0.5, resume=True)
    await refused(
        service, options, ConfigError, r"learned with other settings \(agent.tau: 0.005 then, 0.5 now"
    )


async def test_two_learners_never_write_the_same_results(service, tmp_path):
    await train(learner_options(service.address, tmp_path / "run"))
    lock = FolderLock.acquire(tmp_path / "run/agents/0")
    options = learner_options(service.address, tmp_path / "run", resume=True)
    await refused(service, options, RunDirectoryError, "another process is still writing")
    lock.close()


async def test_a_learner_says_whether_it_has_taken_its_last_step(tmp_path):
    async with replay_node() as replay:
        options = learner_options(replay.address, tmp_path / "whole")
        assert await promptly(run_learner(options, asyncio.Event()))
        endless = learner_options(replay.address, tmp_path / "cut", train__steps=FOREVER)
        async with learning(endless) as (task, stop):
            await until_trained(replay.address, epoch=2, task=task)
            stop.set()
            assert not await promptly(task)


@pytest.mark.parametrize(("finished", "code"), [(True, 0), (False, 75)])
def test_a_learner_that_is_stopped_before_its_last_step_ends_with_the_code_for_that(
    tmp_path, monkeypatch, finished, code
):
    async def trained(options, stop):
        return finished

    monkeypatch.setattr("dase_grpc.nodes.learner.run_learner", trained)
    options = learner_options(Address("127.0.0.1", 1), tmp_path, unfinished_code=75)
    assert learner_main(options, stdin_is_leash=False) == code
