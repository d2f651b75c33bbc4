"""Who may write evaluations.csv."""

from dataclasses import replace

import pytest
from contracts.sentences import assert_one_sentence
from nodes.learning_cases import FOREVER, learner_options, train, training
from nodes.test_evaluator_node import (
    BY_EVALUATOR,
    Published,
    evaluate,
    evaluating,
    evaluator_options,
    steps_of,
)
from replay.wire.services import eventually, promptly

from dase_grpc.errors import (
    RunDirectoryError,
)
from dase_grpc.runs.directory import RunDirectory


async def test_a_run_of_learners_that_evaluate_themselves_is_refused_and_another_folder_is_not(
    service, tmp_path
):
    run_dir = tmp_path / "run"
    options = learner_options(service.address, run_dir, train__steps=FOREVER)
    async with training(options):
        mine = {"eval__by": "learner", "eval__episodes": 1, "train__steps": FOREVER}
        with pytest.raises(RunDirectoryError) as refusal:
            await evaluate(evaluator_options(service.address, run_dir, **mine))
        assert_one_sentence(refusal.value, "evaluate themselves", "eval.by=evaluator", "--run-dir")
        own = evaluator_options(service.address, tmp_path / "own", **mine)
        async with evaluating(own):
            await eventually(lambda: len(steps_of(tmp_path / "own")) > 1)
    assert RunDirectory.open(tmp_path / "own").run["mode"] == "evaluator"


async def test_a_second_evaluator_of_the_same_folder_is_refused(service, tmp_path):
    learner = await Published.joined(service)
    options = evaluator_options(service.address, tmp_path / "run")
    async with evaluating(options):
        await learner.publish(0)
        await eventually(lambda: steps_of(tmp_path / "run") == [0])
        with pytest.raises(RunDirectoryError, match="another process is still writing"):
            await evaluate(options)


async def test_a_learner_that_evaluates_itself_is_refused_in_an_evaluators_folder(service, tmp_path):
    learner = await Published.joined(service, 1)
    mine = {"eval__by": "learner", "train__agents": 2}
    options = evaluator_options(service.address, tmp_path / "run", agents=(1,), **mine)
    async with evaluating(options):
        await learner.publish(0)
        await eventually(lambda: steps_of(tmp_path / "run", 1) == [0])
    theirs = learner_options(
        service.address, tmp_path / "run", agent_id=0, resume=True, train__agents=2, eval__episodes=2
    )
    with pytest.raises(RunDirectoryError, match="evaluations of an evaluator node"):
        await train(theirs)


async def test_a_learner_that_is_resumed_leaves_the_evaluators_rows_alone(service, tmp_path):
    run_dir, before = tmp_path / "run", []
    for steps in (80, 160):
        settings = {**BY_EVALUATOR, "train__steps": steps, "train__checkpoint_every": 30}
        async with evaluating(evaluator_options(service.address, run_dir, **settings)) as (task, _):
            learner = learner_options(service.address, run_dir, agent_id=0, resume=bool(before), **settings)
            await train(learner)
            await promptly(task)
        assert steps_of(run_dir)[: len(before)] == before
        before = steps_of(run_dir)
        assert before[-1] == steps
    with pytest.raises(RunDirectoryError, match="already holds results of agent 0"):
        await train(replace(learner, resume=False))
