"""The benchmark of stacks: that it works, that its results are read again, and what it says without a GPU."""

import sys

import pytest
import torch


@pytest.fixture
def run(script, monkeypatch, capsys):
    script("measuring")
    stack = script("stack")
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["stack.py", *map(str, arguments)])
        stack.main()
        return capsys.readouterr().out

    return run


def test_without_a_gpu_it_says_in_one_sentence_that_it_was_not_run_and_fails(run):
    with pytest.raises(SystemExit) as ended:
        run("--device", "cuda:0")
    assert (
        ended.value.code
        == "stack.py was not run: torch finds no CUDA device on this machine; leave --device out"
    )


def test_results_that_are_not_there_are_one_sentence(run, tmp_path):
    with pytest.raises(SystemExit) as ended:
        run("--show", tmp_path / "stack.csv")
    assert str(ended.value.code).startswith("cannot read ")


@pytest.mark.slow
def test_a_quick_run_compares_one_and_two_agents_and_its_results_are_shown_again(run, tmp_path):
    shown = run("--quick", "--results", tmp_path / "stack.csv")
    assert "| td3, K = 1 |" in shown
    assert "| td3, K = 2 |" in shown
    assert run("--show", tmp_path / "stack.csv") == shown
