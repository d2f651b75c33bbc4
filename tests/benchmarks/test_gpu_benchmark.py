"""The GPU's benchmark where there is no GPU: that it says so, that it works, and what its tables say."""

import sys

import pytest
import torch


@pytest.fixture
def gpu(script):
    script("measuring")
    return script("gpu")


@pytest.fixture
def run(gpu, monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, arguments)])
        gpu.main()
        return capsys.readouterr().out

    return run


def test_without_a_gpu_it_says_in_one_sentence_that_it_was_not_run_and_fails(run):
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == (
        "gpu.py was not run: torch finds no CUDA device on this machine; --device cpu shows that it works"
    )


@pytest.mark.slow
def test_a_quick_run_on_a_cpu_measures_everything_and_says_that_it_was_a_cpu(run, tmp_path):
    shown = run("--device", "cpu", "--quick", "--results", tmp_path / "gpu.csv")
    assert shown.startswith("**On a CPU, to see that it works: none of this says anything about a GPU.**")
    for who in (
        "td3",
        "captured, overlapping",
        "environment alone",
        "K = 2",
        "LeanRL, compiled and captured",
    ):
        assert f"| {who}" in shown
    assert run("--show", tmp_path / "gpu.csv") == shown


def figures(gpu, what, subject, **rates):
    return [gpu.Figure("H200", 1.0, subject, what, who, 0, rate) for who, rate in rates.items()]


def test_tables_hold_a_graph_against_eager_updates_and_steps_against_their_slower_half_and_leanrl(gpu):
    found = figures(gpu, gpu.UPDATES, "td3", eager=500.0, compiled=800.0, captured=4000.0)
    found += figures(gpu, gpu.STEPS, gpu.ENV, eager=468.0, captured=1872.0)
    found += [gpu.Figure("H200", 1.0, gpu.ENV, gpu.STEPS, gpu.ENVIRONMENT, 0, 20_000.0)]
    found += [gpu.Figure("H200", 1.0, gpu.ENV, gpu.STEPS, gpu.OVERLAPPING, 0, 3_800.0)]
    found += figures(gpu, gpu.ROUNDS, "td3", **{"K = 1": 4000.0, "K = 10": 3200.0})
    shown = gpu.tables(found)
    assert shown.startswith("H200; load average 1.0 to 1.0")
    assert "| td3 | 500 | 800 | 4,000 |  | 8.00 |" in shown
    assert "| K = 10 | 3,200 | 32,000 | 1.25 |" in shown
    assert "| eager | 468 | 94% | 0.50 |" in shown
    assert "| captured | 1,872 | 47% | 2.00 |" in shown
    assert "| captured, overlapping | 3,800 | 95% | 4.06 |" in shown
    assert "| LeanRL, eager, published, on an H100 | 272 |  | 0.29 |" in shown
