"""The evaluator node: the learners' own protocol and files, each due policy once, and an end of its own."""

import asyncio
import signal
from functools import partial

import numpy as np
import pytest
import torch
import worlds
from contracts.sentences import assert_one_sentence
from nodes.learning_cases import FOREVER, QUICK, learner_options, tiny_config
from nodes.processes import learner_arguments, process, replay_process
from nodes.running import ended, in_this_loop, joined, replay_node
from patience import PATIENCE_S
from replay.wire import services
from replay.wire.services import eventually, promptly

from dase_grpc import seeding
from dase_grpc.errors import (
    ConfigError,
    DrainingError,
    EnvironmentFailedError,
    RunMismatchError,
    SchemaMismatchError,
    UnreachableError,
    WaitedTooLongError,
)
from dase_grpc.launch.evaluate import evaluate_checkpoint
from dase_grpc.learning.agents.registry import make_agent
from dase_grpc.learning.envs.evaluation import Evaluator
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.learning.training.parts import to_bytes
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.nodes.evaluator import run_evaluator
from dase_grpc.nodes.learner import run_learner
from dase_grpc.nodes.options import EvaluatorOptions
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.policies import PolicyPublisher
from dase_grpc.replay.service.streams import Streams
from dase_grpc.replay.wire.addresses import Address, ReplayPlace
from dase_grpc.runs.checkpoint import latest, load_checkpoint
from dase_grpc.runs.curves import AgentFiles, status
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_evaluations
from dase_grpc.runs.reports.report import write_report
from dase_grpc.runs.verify import verify

BY_EVALUATOR = {"eval__by": "evaluator", "eval__episodes": 2}
CPU = torch.device("cpu")


def evaluator_options(address, run_dir, *, agents=(), **changes):
    settings = {key: changes.pop(key) for key in list(changes) if "__" in key}
    config = tiny_config(**{**BY_EVALUATOR, **settings})
    place = address if isinstance(address, ReplayPlace) else ReplayPlace.at(address)
    options = {"timing": QUICK, **changes}
    return EvaluatorOptions(replay=place, config=config, agents=agents, run_dir=run_dir, **options)


evaluating = partial(in_this_loop, run_evaluator)


async def evaluate(options):
    await promptly(run_evaluator(options, asyncio.Event()))


def rows_of(run_dir, agent_id=0):
    return read_evaluations(RunDirectory.open(run_dir).agent(agent_id).evaluations.path)


def steps_of(run_dir, agent_id=0):
    path = run_dir / "agents" / str(agent_id) / "evaluations.csv"
    return rows_of(run_dir, agent_id).step.tolist() if path.exists() else []


def point_goal():
    env = make_env("worlds:PointGoal", {})
    try:
        return schema_of(env, "worlds:PointGoal")
    finally:
        env.close()


class Published:
    """An agent that a test plays: publishes policies of its own making."""

    def __init__(self, service, target, config):
        self._publisher = PolicyPublisher(target)
        self._config = config
        self._schema = target.schema

    @classmethod
    async def joined(cls, service, agent_id=0, **settings):
        target = await service.target(agent_id, schema=point_goal())
        return cls(service, target, tiny_config(**{**BY_EVALUATOR, **settings}))

    def agent(self, version):
        return make_agent(self._config.agent, self._schema, seed=version, agent_id=0, device=CPU)

    async def publish(self, step, version=None):
        version = step if version is None else version
        tensors = dict(self.agent(version).policy.named_tensors())
        await self._publisher.publish(version, to_bytes(tensors), step=step)

    def evaluated(self, version):
        """What a learner with this policy would write down."""
        settings = self._config
        evaluator = Evaluator(
            lambda: make_env("worlds:PointGoal", {}),
            self._schema,
            episodes=settings.eval.episodes,
            max_episode_steps=settings.eval.max_episode_steps,
            seed=seeding.integer(settings.train.seed, seeding.Purpose.EVALUATION),
        )
        return evaluator.evaluate(self.agent(version))


async def test_each_policy_that_is_due_is_evaluated_as_a_learner_would_and_then_the_evaluator_ends(
    service, tmp_path
):
    learner = await Published.joined(service)
    run_dir = tmp_path / "run"
    async with evaluating(evaluator_options(service.address, run_dir)) as (task, _):
        for step in (0, 17, 40, 80):
            await learner.publish(step)
            await eventually(lambda step=step: step == 17 or step in steps_of(run_dir))
        await promptly(task)
    rows = rows_of(run_dir)
    expected = [learner.evaluated(version) for version in (0, 40, 80)]
    assert rows.step.tolist() == [0, 40, 80]
    assert rows.return_mean.tolist() == [each.return_mean for each in expected]
    assert rows.return_std.tolist() == [each.return_std for each in expected]
    assert rows.episodes.tolist() == [2, 2, 2]
    assert (np.diff(rows.wall_seconds) >= 0).all()


async def test_an_evaluator_that_is_to_stay_waits_to_be_stopped_after_the_last_policy(
    service, tmp_path, caplog
):
    learner = await Published.joined(service)
    options = evaluator_options(service.address, tmp_path / "run", stay=True)
    async with evaluating(options) as (task, stop):
        await learner.publish(80)
        await eventually(lambda: "stays until it is stopped" in caplog.text)
        assert steps_of(tmp_path / "run") == [80]
        assert not task.done()
        await ended(task, stop)


@pytest.mark.slow
async def test_with_real_learners_it_writes_their_evaluations_and_they_write_none(service, tmp_path):
    run_dir = tmp_path / "run"
    settings = {**BY_EVALUATOR, "train__agents": 2}
    learners = [learner_options(service.address, run_dir, agent_id=each, **settings) for each in (0, 1)]
    async with evaluating(evaluator_options(service.address, run_dir, train__agents=2)) as (task, _):
        await promptly(asyncio.gather(*(run_learner(o, asyncio.Event()) for o in learners)))
        await promptly(task)
    for agent_id in (0, 1):
        assert steps_of(run_dir, agent_id)[-1] == 80
        kept = load_checkpoint(latest(run_dir / f"agents/{agent_id}/checkpoints"))
        assert kept.metadata["evaluation"] is None
        (again,) = evaluate_checkpoint(kept.path, 2)
        assert rows_of(run_dir, agent_id).return_mean[-1] == again.evaluation.return_mean
    run = RunDirectory.open(run_dir)
    assert run.run["mode"] == "node"
    assert status(run, {agent.agent_id: AgentFiles.read(agent) for agent in run.agents()}) == "finished"
    assert verify(run_dir).damaged == []
    assert write_report(run).exists()


async def test_the_best_policy_is_kept_and_evaluate_finds_it(service, tmp_path):
    learner = await Published.joined(service)
    run_dir = tmp_path / "run"
    async with evaluating(evaluator_options(service.address, run_dir)) as (task, _):
        for step in (0, 40, 80):
            await learner.publish(step)
            await eventually(lambda step=step: step in steps_of(run_dir))
        await promptly(task)
    best = max((0, 40, 80), key=lambda version: learner.evaluated(version).return_mean)
    (found,) = evaluate_checkpoint(run_dir, 2, best=True)
    assert found.step == best
    assert found.evaluation.return_mean != learner.evaluated(best).return_mean
    assert load_checkpoint(found.checkpoint).metadata["policy_version"] == best


async def test_an_evaluator_started_again_goes_on_without_repeating_a_step(service, tmp_path):
    learner = await Published.joined(service)
    options = evaluator_options(service.address, tmp_path / "run")
    for _ in range(2):
        async with evaluating(options) as (task, stop):
            await learner.publish(40)
            await eventually(lambda: steps_of(tmp_path / "run") == [40])
            await service.round_trips()
            await ended(task, stop)
    assert steps_of(tmp_path / "run") == [40]
    async with evaluating(options) as (task, _):
        await learner.publish(80)
        await promptly(task)
    assert steps_of(tmp_path / "run") == [40, 80]
    assert (np.diff(rows_of(tmp_path / "run").wall_seconds) > 0).all()


async def test_what_it_is_too_slow_for_is_skipped_and_counted(service, tmp_path, monkeypatch, caplog):
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    evaluate = Evaluator.evaluate

    def gated(self, policy):
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return evaluate(self, policy)

    monkeypatch.setattr(Evaluator, "evaluate", gated)
    learner = await Published.joined(service)
    options = evaluator_options(service.address, tmp_path / "run", train__steps=240)
    async with evaluating(options) as (task, _):
        for step in range(0, 241, 40):
            await learner.publish(step)
            await eventually(lambda: service.run.policies.followers(0) == 1)
            await service.round_trips()
        gate.set()
        await promptly(task)
    assert steps_of(tmp_path / "run") == [0, 240]
    assert "2 evaluations; skipped 5" in caplog.text


async def test_status_shows_what_it_does(service, tmp_path):
    learner = await Published.joined(service)
    async with evaluating(evaluator_options(service.address, tmp_path / "run")):
        await learner.publish(40, version=7)
        await eventually(lambda: steps_of(tmp_path / "run") == [40])

        async def node():
            (found,) = (await service.client.status()).nodes
            return found

        async with asyncio.timeout(PATIENCE_S):
            while (await node()).attendance.policy_version != 7:  # noqa: ASYNC110 - another node's state
                await asyncio.sleep(0.01)
        shown = await node()
        assert shown.role == "evaluator"
        assert (shown.attendance.envs, shown.attendance.env_steps) == (2, 40)
        assert shown.attendance.state == "idle: no policy is due"
    assert list((await service.client.status()).nodes) == []


async def test_without_a_learner_it_ends_in_time_with_one_sentence(service, tmp_path):
    options = evaluator_options(service.address, tmp_path / "run", replay_timeout_s=0.2)
    with pytest.raises(WaitedTooLongError) as refusal:
        await evaluate(options)
    assert_one_sentence(refusal.value, "no learner has joined run the-run for 0.2 s", "--replay-timeout")
    assert service.events[-1].endswith("evaluator, left")


async def test_it_may_come_before_any_learner(service, tmp_path):
    options = evaluator_options(service.address, tmp_path / "run", replay_timeout_s=30.0)
    async with evaluating(options) as (task, _):
        await eventually(lambda: service.events != [])
        learner = await Published.joined(service)
        await learner.publish(80)
        await promptly(task)
    assert steps_of(tmp_path / "run") == [80]


async def test_an_evaluation_in_hand_is_dropped_when_it_is_told_to_stop(service, tmp_path, monkeypatch):
    began = asyncio.Event()
    loop = asyncio.get_running_loop()
    step = worlds.PointGoal.step

    def telling(self, action):
        loop.call_soon_threadsafe(began.set)
        return step(self, action)[0], 0.0, False, False, {}

    monkeypatch.setattr(worlds.PointGoal, "step", telling)
    learner = await Published.joined(service)
    options = evaluator_options(service.address, tmp_path / "run", eval__max_episode_steps=FOREVER)
    async with evaluating(options) as (task, stop):
        await learner.publish(0)
        await promptly(began.wait())
        await ended(task, stop)
    assert steps_of(tmp_path / "run") == []


async def test_policies_that_are_not_finite_are_left_out(service, tmp_path, caplog):
    learner = await Published.joined(service)
    async with evaluating(evaluator_options(service.address, tmp_path / "run")) as (task, _):
        tensors = {name: tensor * np.nan for name, tensor in learner.agent(1).policy.named_tensors()}
        await learner._publisher.publish(1, to_bytes(tensors), step=40)
        await eventually(lambda: "left out" in caplog.text)
        await learner.publish(80)
        await promptly(task)
    assert steps_of(tmp_path / "run") == [80]


async def test_an_environment_that_fails_is_told_as_by_a_learner(service, tmp_path, monkeypatch):
    learner = await Published.joined(service)

    def broken(self, action):
        raise ZeroDivisionError("the simulator")

    monkeypatch.setattr(worlds.PointGoal, "step", broken)
    options = evaluator_options(service.address, tmp_path / "run", env__max_restarts=1)
    async with evaluating(options) as (task, _):
        await learner.publish(0)
        with pytest.raises(EnvironmentFailedError, match="evaluation of agent 0"):
            await promptly(task)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"agents": (0, 3)}, ConfigError, "--agent 3 is not of this run, whose agents are 0..0"),
        ({"env__id": "worlds:Clock"}, SchemaMismatchError, "environment|fingerprint"),
        ({"run_id": "another"}, RunMismatchError, "another"),
    ],
)
async def test_what_does_not_fit_the_run_is_refused(service, tmp_path, changes, error, sentence):
    await Published.joined(service)
    options = evaluator_options(service.address, tmp_path / "run", **changes)
    with pytest.raises(error, match=sentence):
        await evaluate(options)
    assert not (tmp_path / "run").exists()


async def test_policies_of_other_settings_are_refused(service, tmp_path):
    learner = await Published.joined(service)
    options = evaluator_options(service.address, tmp_path / "run", agent__hidden=[9])
    async with evaluating(options) as (task, _):
        await learner.publish(0)
        with pytest.raises(ConfigError) as refusal:
            await promptly(task)
    assert_one_sentence(refusal.value, "policy 0 of agent 0", "settings of the learners")


@pytest.mark.slow
async def test_a_replay_that_stays_away_ends_it_with_one_sentence(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.client.policies.UNARY_TIMEOUT_S", 0.2)
    async with replay_node() as replay, joined(replay.address, schema=point_goal()):
        options = evaluator_options(replay.address, tmp_path / "run", replay_timeout_s=0.3)
        async with evaluating(options) as (task, _):
            await eventually(lambda: "attending run" in caplog.text)
            await replay.end()
            with pytest.raises((UnreachableError, DrainingError)) as refusal:
                await promptly(task)
    assert_one_sentence(refusal.value, "gave up after")


@pytest.fixture
def counted(monkeypatch):
    """What the registry of the node that runs now has counted."""
    kept = []
    monkeypatch.setattr(
        "dase_grpc.nodes.frame.make_registry", lambda: kept.append(make_registry()) or kept[0]
    )
    return lambda name, **labels: kept[0].get_sample_value(f"dase_{name}_total", labels)


async def test_a_replay_that_came_back_without_its_data_is_said_and_counted_once(tmp_path, counted, caplog):
    async with replay_node() as replay:
        address = replay.address
        async with joined(address, schema=point_goal()) as target:
            async with asyncio.TaskGroup() as tasks:
                inserter = await Inserter(target, writer_id="w").open()
                tasks.create_task(inserter.receive())
                await inserter.append(services.rows_of(1, 5, schema=target.schema))
                await inserter.finish()
            async with evaluating(evaluator_options(address, tmp_path / "run")):
                await eventually(lambda: "attending run" in caplog.text)
                await replay.end()
                async with replay_node(listen=address):
                    await eventually(lambda: counted("evaluator_replay_losses") == 1)
                    await eventually(lambda: "was started again" in caplog.text)
    assert "came back without its data" in caplog.text
    assert "the 5 transitions of the run that it held are gone" in caplog.text


async def test_environments_made_anew_within_an_evaluation_are_counted(
    service, tmp_path, counted, monkeypatch
):
    learner, step, failures = (
        await Published.joined(service),
        worlds.PointGoal.step,
        [ZeroDivisionError("once")],
    )

    def once(self, action):
        if failures:
            raise failures.pop()
        return step(self, action)

    monkeypatch.setattr(worlds.PointGoal, "step", once)
    async with evaluating(evaluator_options(service.address, tmp_path / "run", env__max_restarts=1)):
        await learner.publish(0)
        await eventually(lambda: counted("evaluation_env_restarts", agent_id="0") == 1)


async def test_streams_that_broke_and_were_answered_again_are_counted(service, tmp_path, counted):
    learner = await Published.joined(service)
    async with evaluating(evaluator_options(service.address, tmp_path / "run")):
        await learner.publish(0)
        await eventually(lambda: steps_of(tmp_path / "run") == [0])
        service.policies.streams.drain()
        service.policies.streams = Streams(service.run, "Publish", "Subscribe")
        labels = {"stream": "subscribe", "grpc_code": "UNAVAILABLE"}
        await eventually(lambda: counted("evaluator_reconnects", **labels) == 1)


async def test_a_replay_that_does_not_come_is_said(tmp_path):
    options = evaluator_options(Address("127.0.0.1", 1), tmp_path / "run", connect_timeout_s=0.2)
    with pytest.raises(UnreachableError, match="does not answer"):
        await evaluate(options)


def arguments_of(role, address, run_dir):
    settings = {"train__steps": 80, "eval__every": 40, "eval__by": "evaluator", "eval__episodes": 2}
    _, *others = learner_arguments(address, run_dir, **settings)
    return [f"--role={role}", *others]


@pytest.mark.slow
def test_nodes_of_their_own_write_what_the_learner_would_have_written_and_end_by_themselves(tmp_path):
    run_dir = tmp_path / "run"
    with replay_process() as (_, address), process(*arguments_of("evaluator", address, run_dir)) as evaluator:
        evaluator.until_says("attending run")
        with process(*arguments_of("learner", address, run_dir)) as learner:
            assert learner.exit_code() == 0, learner.log
        assert evaluator.exit_code() == 0, evaluator.log
    assert steps_of(run_dir)[-1] == 80
    kept = latest(run_dir / "agents/0/checkpoints")
    (again,) = evaluate_checkpoint(kept, 2)
    assert rows_of(run_dir).return_mean[-1] == again.evaluation.return_mean
    assert rows_of(run_dir).return_std[-1] == again.evaluation.return_std


@pytest.mark.slow
def test_a_process_that_is_told_to_stop_exits_with_0(tmp_path):
    with (
        replay_process() as (_, address),
        process(*arguments_of("evaluator", address, tmp_path / "run")) as evaluator,
    ):
        evaluator.until_says("attending run")
        evaluator.send(signal.SIGTERM)
        assert evaluator.exit_code() == 0, evaluator.log
