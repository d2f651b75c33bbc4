"""Benchmarks that want a GPU where there is none: they say so, they work on a CPU, and their tables hold."""

import pytest


@pytest.fixture
def gpu(script):
    return script("gpu")


NO_GPU = "was not run: torch finds no CUDA device on this machine"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("gpu", f"gpu.py {NO_GPU}; --device cpu shows that it works"),
        ("stack --device cuda:0", f"stack.py {NO_GPU}; leave --device out"),
        ("stack --show stack.csv", "cannot read stack.csv: No such file or directory"),
    ],
)
def test_what_is_missing_is_one_sentence_and_a_failure(script, called, command, said):
    name, *arguments = command.split()
    with pytest.raises(SystemExit) as ended:
        called(script(name), *arguments)
    assert ended.value.code == said


@pytest.mark.slow
def test_a_quick_run_on_a_cpu_measures_everything_and_says_that_it_was_a_cpu(gpu, called, tmp_path):
    shown = called(gpu, "--device", "cpu", "--quick", "--results", tmp_path / "gpu.csv")
    assert shown.startswith("**On a CPU, to see that it works: none of this says anything about a GPU.**")
    for who in (
        "td3",
        "captured, overlapping",
        "environment alone",
        "K = 2",
        "LeanRL, compiled and captured",
    ):
        assert f"| {who}" in shown
    assert called(gpu, "--show", tmp_path / "gpu.csv") == shown


@pytest.mark.slow
def test_a_quick_run_compares_one_and_two_agents_and_its_results_are_shown_again(script, called, tmp_path):
    shown = called(script("stack"), "--quick", "--results", tmp_path / "stack.csv")
    assert "| td3, K = 1 |" in shown
    assert "| td3, K = 2 |" in shown
    assert called(script("stack"), "--show", tmp_path / "stack.csv") == shown


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
