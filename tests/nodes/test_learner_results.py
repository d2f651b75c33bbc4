"""What a learner refuses, where its results go, and what it goes on from."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from nodes.learning_cases import FOREVER, checkpoint_step, learner_options, train, training
from nodes.running import ended
from replay.wire.services import serving

from dase_grpc.errors import (
    AgentTakenError,
    ConfigError,
    DeviceError,
    RunDirectoryError,
    RunMismatchError,
    SchemaMismatchError,
)
from dase_grpc.runs.checkpoint import latest, load_checkpoint
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.files import FolderLock
from dase_grpc.runs.logs import read_evaluations


async def refused(service, options, error, match):
    """Checks that a learner is refused, and that its lease does not keep the next one out."""
    with pytest.raises(error, match=match):
        await train(options)
    assert [agent.lease for agent in (await service.client.status()).agents] == ["left"]


@pytest.mark.parametrize(
    ("served", "changes", "match"),
    [
        ({"min_size": 21}, {}, "no batch before 21"),
        ({"capacity": 15}, {}, "exceeds replay.capacity = 15"),
        ({}, {"agent_id": 1}, "agent id 1.*--agents 2"),
    ],
)
async def test_a_learner_that_the_replay_cannot_serve_is_a_config_error(tmp_path, served, changes, match):
    async with serving(**served) as service:
        options = learner_options(service.address, tmp_path / "run", **changes)
        await refused(service, options, ConfigError, match)


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
    async with training(options):
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


async def stopped(service, run_dir, **settings):
    """A learner that is stopped in the midst of training; returns the step of its checkpoint."""
    options = learner_options(service.address, run_dir, train__steps=FOREVER, **settings)
    async with training(options, updates=30) as (task, stop):
        await ended(task, stop)
    return checkpoint_step(run_dir)


@pytest.mark.slow
async def test_a_resumed_learner_goes_on_from_its_checkpoint_with_the_sequence_numbers_that_follow(
    service, tmp_path, caplog
):
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


RANDOM = {"agent__start_steps": 200, "train__checkpoint_every": 30}
"""All of a run's 80 steps are random."""


@pytest.mark.parametrize("kept", ["a checkpoint", "nothing"])
async def test_random_steps_behind_the_checkpoint_are_not_stored_a_second_time(service, tmp_path, kept):
    await train(learner_options(service.address, tmp_path / "run", **RANDOM))
    first, *later = sorted((tmp_path / "run/agents/0/checkpoints").iterdir())
    for path in (*later, *([first] * (kept == "nothing"))):  # as if it had been killed
        shutil.rmtree(path)
    step = 0 if kept == "nothing" else load_checkpoint(first).step
    await train(learner_options(service.address, tmp_path / "run", **RANDOM, resume=True))
    rows = service.run.store.ring.ordered()
    assert len(rows) == 80 + 80 - step
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert checkpoint_step(tmp_path / "run") == 80


async def test_where_the_buffer_holds_nothing_else_a_learner_explores_on_as_without_a_break(tmp_path):
    rows = []
    for breaks in ((80,), (30, 80)):
        async with serving() as service:
            for resume, total in enumerate(breaks):
                await train(
                    learner_options(
                        service.address,
                        tmp_path / f"{len(breaks)}",
                        train__steps=total,
                        resume=resume > 0,
                        **RANDOM,
                    )
                )
            rows.append(service.run.store.ring.ordered())
    assert np.array_equal(*rows)


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
