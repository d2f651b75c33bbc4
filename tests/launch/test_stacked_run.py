"""Runs whose agents are a stack: reproducible, resumable, and with all that a run writes."""

from dataclasses import replace

import pytest
import worlds
from contracts.sentences import assert_one_sentence
from resuming import assert_equal, config, mixed, records, resume, train, train_killed_after, train_until
from small import small_config

from dase_grpc.errors import ConfigError, EnvironmentFailedError
from dase_grpc.launch.train import TrainOptions, train_here
from dase_grpc.runs.checkpoint import latest
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_evaluations
from dase_grpc.runs.rounds import newest_whole_round
from dase_grpc.runs.verify import verify

CONFIGS = {
    "ddpg, overlapped": config(
        agent__algorithm="ddpg", agent__normalise_observations=True, train__overlap=True
    ),
    "sac by transition": config(agent__algorithm="sac", dps__scope="transition"),
    "one agent": config(train__agents=1),
    "priorities": config(
        replay__sampling="prioritised", replay__own_share=0.5, priorities__beta=1.0, train__agents=3
    ),
    "remembered similarity by agent": config(dps__memory=20.0, dps__scope="agent", train__agents=3),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("straight"), config(), mode="stack")


def test_each_agent_updates_after_each_of_its_steps_and_writes_what_it_always_does(straight):
    for agent in straight.agents():
        assert read_evaluations(agent.evaluations.path).step.tolist() == [0, 30, 60, 90, 120]
        found = records(agent)
        assert [record["step"] for record in found] == [20, 40, 60, 80, 100, 120]
        assert [record["updates"] for record in found] == [1, 21, 41, 61, 81, 101]
        assert found[-1]["skipped_updates"] == 0
    looks = [record["similarity"] for record in records(straight.agent(1)) if record["similarity"]]
    assert looks
    assert all(similarity["1"] == 1.0 and 0 <= similarity.get("0", 0) <= 1 for similarity in looks)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_files_to_the_last_bit(straight, tmp_path):
    assert_equal(straight, train(tmp_path, config(), mode="stack"))


@pytest.mark.parametrize("step", [37, pytest.param(90, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_from_that_very_step(straight, tmp_path, step):
    stopped = train_until(tmp_path, config(), step, mode="stack")
    assert latest(stopped.agent(1).checkpoints).name == f"step-{step:09d}"
    assert_equal(straight, resume(stopped))


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_from_its_last_round(straight, tmp_path):
    assert_equal(straight, resume(train_killed_after(tmp_path, config(), 75, mode="stack")))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_n_steps_and_n_more_are_as_2n_at_once(tmp_path, name):
    settings = CONFIGS[name]
    half = settings.model_copy(update={"train": settings.train.model_copy(update={"steps": 60})})
    resumed = resume(train(tmp_path, half, mode="stack"), steps=120)
    assert_equal(train(tmp_path, settings, "straight", mode="stack"), resumed, first_steps=60)


@pytest.mark.parametrize("step_before", [50, 59], ids=["nothing is due", "much is due"])
@pytest.mark.slow
def test_a_run_that_ended_within_a_round_first_ends_it_with_the_update_of_all(
    tmp_path, monkeypatch, step_before
):
    step, broken = worlds.PointGoal.step, []

    def failing(self, action):
        if broken and broken.pop() == "next":
            raise RuntimeError("not now")
        return step(self, action)

    def on_round(opened):
        if opened.learners[0].steps == step_before:
            broken.extend(["next", "the one after"])  # popped from the end: agent 1's step raises

    monkeypatch.setattr(worlds.PointGoal, "step", failing)
    with pytest.raises(EnvironmentFailedError):
        train(tmp_path, config(env__max_restarts=0), on_round=on_round, mode="stack")
    ended = RunDirectory.open(tmp_path / "run")
    assert newest_whole_round(ended).round.steps == (step_before + 1, step_before)
    for agent in resume(ended).agents():
        regular = [record for record in records(agent) if record["step"] % 20 == 0]
        assert {record["step"]: record["updates"] for record in regular} == {
            step: step - 19 for step in range(20, 121, 20)
        }
        assert read_evaluations(agent.evaluations.path).step.tolist() == [0, 30, 60, 90, 120]


def test_its_folder_says_that_it_is_a_stack_and_what_it_can_be_resumed_from(straight):
    assert straight.run["mode"] == "stack"
    assert (
        verify(straight.path, kept_buffer=lambda path: None).resumable
        == "all agents and the buffer from step 120"
    )


@pytest.mark.slow
def test_train_here_makes_a_stack(tmp_path, capsys):
    train_here(TrainOptions(small_config(train__steps=25), tmp_path, name="run", stack=True))
    assert RunDirectory.open(tmp_path / "run").run["mode"] == "stack"


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        (mixed("dase"), {}, "all have to be alike"),
        (config(train__method="dpd"), {}, "distils its peer's policy"),
        (config(agent__products="bfloat16"), {}, "by float32 products"),
        (config(), {"lockstep": True}, "give one"),
        (config(), {"max_restarts": 1}, "--stack has none"),
        (config(eval__by="evaluator"), {}, "--stack has none"),
    ],
    ids=["mixed", "dpd", "bfloat16", "lockstep", "restarts", "evaluator"],
)
def test_what_cannot_be_stacked_is_refused_in_one_sentence_before_anything_is_made(
    tmp_path, settings, options, said
):
    with pytest.raises(ConfigError) as refused:
        train_here(replace(TrainOptions(settings, tmp_path, stack=True), **options))
    assert_one_sentence(refused.value, said)
    assert not list(tmp_path.iterdir())
