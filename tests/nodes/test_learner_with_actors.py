"""A learner whose agent's actors explore: the same updates for the same steps, and nothing lost."""

import pytest
from nodes.acting_cases import act, acting, actor_options
from nodes.learning_cases import (
    held_at_ends,
    learner_options,
    learning,
    tiny_config,
    train,
    training,
    until_trained,
)
from nodes.running import ended, replay_node
from replay.wire.services import eventually, serving

from dase_grpc.errors import ConfigError, WaitedTooLongError
from dase_grpc.replay.client.admission import require_one_piece
from dase_grpc.runs.checkpoint import latest, load_checkpoint
from dase_grpc.runs.logs import read_evaluations

PACED = {"train__explore": False, "train__step_error_buffer": 30}


@pytest.fixture
async def service():
    async with serving(capacity=10_000) as running:
        yield running


def collected(service):
    return service.run.store.traffic.inserted[0] if service.run.opened else 0


def counted(run_dir):
    checkpoint = load_checkpoint(latest(run_dir / "agents/0/checkpoints"))
    return checkpoint.step, checkpoint.training["counters"]["used"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratio", "updates"), [pytest.param(1.0, 181, marks=pytest.mark.long), (0.5, 91), (2.0, 362)]
)
async def test_a_run_ends_with_the_updates_of_its_steps_and_evaluates_at_the_same_multiples(
    service, tmp_path, ratio, updates
):
    options = learner_options(
        service.address, tmp_path / "run", train__steps=200, train__updates_per_step=ratio, **PACED
    )
    async with (
        acting(actor_options(service.address, **PACED)),
        acting(actor_options(service.address, **PACED)),
    ):
        await train(options)
        assert 200 <= collected(service) <= 200 + 30 + 2
        writers = {name.partition("-")[0] for agent, name in service.run.store._committed}
        assert writers == {"actor"}
    step, used = counted(tmp_path / "run")
    assert used == updates
    assert step == 200
    steps = read_evaluations(tmp_path / "run/agents/0/evaluations.csv").step.tolist()
    assert steps == [0, 40, 80, 120, 160, 200]


@pytest.mark.slow
async def test_without_actors_it_says_so_and_ends_in_time(service, tmp_path, caplog):
    options = learner_options(service.address, tmp_path / "run", replay_timeout_s=1.0, **PACED)
    with pytest.raises(WaitedTooLongError, match="the actors of agent 0 have collected nothing for 1 s"):
        await train(options)
    assert "waiting for an actor of agent 0: start one with `dase node --role actor --agent 0`" in caplog.text


@pytest.mark.slow
async def test_actors_wait_while_the_learner_is_gone_and_go_on_when_it_resumes(service, tmp_path):
    run = tmp_path / "run"
    settings = {**PACED, "train__steps": 100_000, "eval__every": 1_000}
    async with acting(actor_options(service.address, **PACED)):
        async with training(learner_options(service.address, run, **settings), updates=50) as (task, stop):
            await ended(task, stop)
        step, used = counted(run)
        assert used == step - 19
        await eventually(lambda: service.run.leases.held(0) is None)
        again = learner_options(service.address, run, resume=True, **settings)
        async with training(again, epoch=2, updates=used + 50) as (task, stop):
            await ended(task, stop)
    step, used = counted(run)
    assert used == step - 19
    assert step <= collected(service) <= step + 30


@pytest.mark.slow
async def test_resumed_into_another_buffer_it_collects_anew_before_its_next_update(service, tmp_path):
    run, settings = tmp_path / "run", {**PACED, "eval__every": 1_000}
    async with acting(actor_options(service.address, **PACED)):
        options = learner_options(service.address, run, train__steps=100_000, **settings)
        async with training(options, updates=50) as (task, stop):
            await ended(task, stop)
    begun, _ = counted(run)
    async with serving(capacity=10_000) as another:
        options = learner_options(another.address, run, resume=True, train__steps=begun + 200, **settings)
        async with acting(actor_options(another.address, **PACED)):
            await train(options)
        assert 200 <= collected(another) <= 200 + 30 + 2
    assert counted(run) == (begun + 200, 181)  # of its own steps in this buffer


@pytest.mark.slow
async def test_when_the_replay_comes_back_without_its_buffer_both_go_on_at_their_pace(tmp_path, caplog):
    settings = {**PACED, "train__steps": 100_000, "eval__every": 1_000}
    run = tmp_path / "run"
    async with replay_node() as first:
        address = first.address
        async with (
            acting(actor_options(address, **PACED)),
            learning(learner_options(address, run, **settings)) as (task, stop),
        ):
            progress = await until_trained(address, updates=50, task=task)
            await first.end()
            async with replay_node(listen=address):
                await until_trained(address, updates=progress.updates + 50, task=task)
                await ended(task, stop)
    assert "came back without its data" in caplog.text
    step, used = counted(run)
    assert used <= step - 2 * 19
    assert step <= sum(held_at_ends(caplog)) + 2 * 30


@pytest.mark.slow
async def test_an_actor_whose_learner_makes_no_updates_says_what_it_waits_for_and_ends_in_time(
    service, tmp_path, caplog
):
    settings = {**PACED, "train__steps": 100_000, "eval__every": 1_000}
    async with learning(learner_options(service.address, tmp_path / "run", **settings)) as (task, stop):
        await eventually(lambda: bool(service.run.limiters))
        async with acting(actor_options(service.address, **PACED)):
            await until_trained(service.address, updates=20, task=task)
        await ended(task, stop)
    lease = await service.join(0, schema=service.run.store.schema)  # it holds the agent, and updates nothing
    assert lease.epoch == 2
    options = actor_options(service.address, replay_timeout_s=1.0, **PACED)
    with pytest.raises(WaitedTooLongError, match="waiting for updates of agent 0"):
        await act(options)


def test_a_replay_of_several_shards_is_refused():
    with pytest.raises(ConfigError, match=r"train.explore = false needs a replay in one piece"):
        require_one_piece(tiny_config(train__explore=False), shards=2)
