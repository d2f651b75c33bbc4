"""Runs by the command line: trained in lockstep, evaluated, resumed, verified, reported, compared."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from small import small_flags
from synthetic import flat, write_run

from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_evaluations, read_metrics
from dase_grpc.runs.reports.comparison_tables import FILES
from dase_grpc.seeding import Purpose, integer


def trained(dase, *arguments: object) -> tuple[RunDirectory, str]:
    code, out, err = dase("train", "--lockstep", "--name", "run", *arguments)
    assert (code, err) == (0, "")
    return RunDirectory.open(Path("runs/run")), out


@pytest.mark.slow
def test_lockstep_says_what_it_does_and_where_the_results_are(dase):
    directory, out = trained(dase, *small_flags())
    assert out.startswith("2 TD3 agents sharing one replay on worlds:PointGoal, 120 steps each, seed 0\n")
    first_and_last = r"^agent 1: evaluation return -[\d.]+ at step 0, -[\d.]+ at step 120$"
    assert re.search(first_and_last, out, re.MULTILINE)
    assert "results: runs/run\nreport:  runs/run/report.html\n" in out
    assert out.endswith("next:    dase evaluate runs/run\n")
    assert directory.report.is_file()
    assert directory.run["mode"] == "lockstep"
    assert directory.run["command"].startswith("dase train --lockstep --name run")
    evaluated = [read_evaluations(agent.evaluations.path).step.tolist() for agent in directory.agents()]
    assert evaluated == [[0, 50, 100, 120]] * 2


@pytest.mark.slow
def test_what_was_trained_can_be_evaluated_and_reported(dase):
    trained(dase, *small_flags(train__agents=1))
    code, out, _ = dase("evaluate", "runs/run", "--episodes", 2)
    assert code == 0
    assert re.fullmatch(r"agent 0 in worlds:PointGoal after 120 steps: mean return .* over 2 episodes\n", out)
    assert dase("report", "runs/run") == (0, "runs/run/report.html\n", "")


@pytest.mark.slow
def test_a_run_whose_steps_are_all_random_says_so(dase):
    _, out = trained(dase, *small_flags(train__steps=20))
    assert "note: agent.start_steps = 20 covers the whole run, so hardly anything is learned; lower it" in out


@pytest.mark.slow
def test_a_run_whose_layers_are_too_small_for_its_products_says_so(dase, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    flags = small_flags(train__steps=20, train__agents=1, agent__products="bfloat16")
    _, out = trained(dase, *flags)
    assert "note: agent.products = bfloat16 changes nothing in layers of fewer than 96 units, and" in out
    code, out, _ = dase("train", "--lockstep", *flags, "--set=agent.hidden=[8, 96]")
    assert code == 0
    assert "agent.products" not in out


@pytest.mark.parametrize(
    ("env", "refused"),
    [("worlds:NanAtStep50", {"observation": 2}), ("worlds:HugeReward", {"reward": 10})],
    ids=["an observation that is NaN at step 50", "a reward of 1e300"],
)
@pytest.mark.slow
def test_what_is_not_finite_is_refused_and_counted_and_the_run_goes_on(dase, env, refused):
    directory, _ = trained(dase, *small_flags(env, train__steps=100, train__log_every=100))
    for agent in directory.agents():
        (record,) = read_metrics(agent.metrics.path)
        assert record["refused"] == refused
        assert record["updates"] >= 75
        assert record["critic_loss"] is not None


def test_an_error_of_the_environment_is_one_sentence_after_the_results_and_its_traceback_is_logged(
    dase, caplog
):
    flags = small_flags("worlds:RaisesAtStep", env__kwargs="{at=9}", eval__max_episode_steps=5)
    code, out, err = dase("train", "--lockstep", "--name", "run", "--set=env.max_restarts=0", *flags)
    assert code == 1
    assert "results: runs/run\n" in out
    raised = "the environment raised RuntimeError: the simulator broke at step 9"
    assert f"error: agent 0 at step 8: {raised}" in err
    assert "in reward" in caplog.text


@pytest.mark.slow
def test_a_run_is_resumed_to_a_larger_total_verified_and_its_best_evaluated(dase):
    trained(dase, *small_flags(train__steps=60, train__checkpoint_every=20, eval__every=20))
    code, out, _ = dase("resume", "runs/run", "--steps", "8e1")
    assert code == 0
    assert "resuming runs/run from step 60 of 80\n" in out
    assert out.endswith("next:    dase evaluate runs/run\n")
    directory = RunDirectory.open(Path("runs/run"))
    assert read_evaluations(directory.agent(1).evaluations.path).step.tolist() == [0, 20, 40, 60, 80]
    code, out, _ = dase("verify", "runs/run")
    assert code == 0
    assert "can be resumed: all agents and the buffer from step 80" in out
    curve = read_evaluations(directory.agent(0).evaluations.path)
    best = max(range(1, 5), key=lambda index: (curve.return_mean[index], index))
    code, out, _ = dase("evaluate", "runs/run", "--best", "--episodes", 2)
    assert code == 0
    assert f"after {curve.step[best]} steps: mean return " in out
    assert f"mean return {curve.return_mean[best]:,.1f} " not in out, "those are the episodes it is chosen by"
    chosen_by = str(integer(directory.config.train.seed, Purpose.EVALUATION))
    code, _, err = dase("evaluate", "runs/run", "--best", "--episodes", 2, "--seed", chosen_by)
    assert code == 2
    assert "would report episodes that --best chooses by" in err
    assert dase("resume", "runs/run")[0] == 2


@pytest.mark.slow
def test_where_no_checkpoint_was_evaluated_at_its_step_there_is_no_best(dase):
    trained(dase, *small_flags(train__steps=20, eval__every=50, train__checkpoint_every=7))
    for path in Path("runs/run/agents").glob("*/checkpoints/step-000000020"):
        shutil.rmtree(path)
    code, _, err = dase("evaluate", "runs/run", "--best")
    assert code == 2
    assert "has no best checkpoint, because none was evaluated at its own step" in err


@pytest.mark.slow
def test_runs_are_compared_into_a_folder_named_comparison(dase):
    for seed in (0, 1):
        write_run(Path("runs"), f"run{seed}", flat(10 + seed), seed=seed)
    code, out, err = dase("compare", "runs")
    assert code == 0
    assert out.splitlines()[-1] == "comparison/comparison.html"
    assert all((Path("comparison") / name).is_file() for name in FILES)
    caution = "caution: fewer than 5 runs, so an interval that means little:\n  HalfCheetah-v5: TD3, single\n"
    assert caution in err
    assert dase("compare", "runs/run0", "runs/run1", "--out", "other", "--unfinished")[0] == 0
    assert (Path("other") / "runs.csv").read_text().count("\n") == 3


def test_nothing_to_compare_is_one_sentence(dase):
    told = "error: there is no nowhere; a run is a folder with a run.toml, such as runs/NAME\n"
    assert dase("compare", "nowhere") == (2, "", told)
    write_run(Path("runs"), "going", flat(1, 5), steps=100_000)
    code, out, err = dase("compare", "runs")
    assert (code, out) == (2, "")
    assert err.startswith("error: the run cannot be compared; runs/going is left out: it has not finished")
    assert not Path("comparison").exists()
