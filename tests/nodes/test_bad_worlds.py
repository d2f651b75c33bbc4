"""Bad environments: how each ends its learner, or does not, and that it never touches another's training."""

import asyncio
from pathlib import Path

import pytest
import worlds
from meddling import DEEDS, put_back
from nodes.learning_cases import (
    FOREVER,
    checkpoint_step,
    compute_threads,
    learner_options,
    learning,
    status_of,
    train,
)
from nodes.processes import learner_arguments, process, replay_process
from patience import PATIENCE_S
from replay.wire.services import eventually, promptly

from dase_grpc.errors import EnvironmentFailedError, EnvironmentHangsError, EnvironmentSpecError
from dase_grpc.replay.wire.addresses import parse_address
from dase_grpc.runs.logs import read_metrics

STEPS = 1_500


def learner(address, run_dir, agent_id, kwargs, **settings):
    arguments = learner_arguments(
        address,
        run_dir,
        env__id="rude:Misbehaves",
        env__kwargs=kwargs,
        train__agents=2,
        train__steps=STEPS,
        train__checkpoint_every=40,
        **settings,
    )
    return process(*arguments, f"--agent={agent_id}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kwargs", "settings", "sentence", "place"),
    [
        pytest.param(
            "{what = 'breaks', at = 1}",
            {"eval__max_episode_steps": 1, "eval__every": STEPS, "env__max_restarts": 2},
            "evaluation of agent 0: the environment raised RuntimeError: the simulator broke in step",
            "in breaks",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "{what = 'breaks', at = 100, ever = true}",
            {"env__max_restarts": 2},
            "agent 0 at step 99: the environment raised RuntimeError: the simulator broke in step, after 2",
            "in breaks",
            marks=pytest.mark.long,
        ),
        (
            "{what = 'sleeps_for_ever', at = 100}",
            {"env__timeout_s": 3},
            "the environment's step has not returned since",
            "in sleeps_for_ever",
        ),
    ],
    ids=["cannot be evaluated", "always raises", "hangs"],
)
async def test_an_agent_whose_environment_is_bad_ends_and_the_other_trains_to_its_end(
    tmp_path, kwargs, settings, sentence, place
):
    good_kwargs = "{what = 'nothing'}"
    with (
        replay_process() as (replay, address),
        learner(address, tmp_path / "good", 1, good_kwargs) as good,
        learner(address, tmp_path / "bad", 0, kwargs, **settings) as bad,
    ):
        assert bad.exit_code() == 1, bad.log
        assert f"error: {sentence}" in bad.log
        assert place in bad.log
        assert good.exit_code() == 0, good.log
        assert f"finished after {STEPS:,} steps" in good.log
        leases = {agent.agent_id: agent for agent in (await status_of(parse_address(address))).agents}
        assert {agent.lease for agent in leases.values()} == {"left"}
        assert sentence[:60] in leases[0].reason
        assert "Traceback" not in good.log + replay.log
    assert checkpoint_step(tmp_path / "good", 1) == STEPS
    if "at = 100" in kwargs:
        assert checkpoint_step(tmp_path / "bad", 0) == (99 if "breaks" in kwargs else 80)


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
        await train(options)
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
