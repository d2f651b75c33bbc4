"""The gate's bookkeeping and its two kinds of peers; what it measures is in docs/similarity.md."""

import sys

import numpy as np
import pytest

from dase_grpc.errors import ConfigError


@pytest.fixture
def gate(script):
    """The script as a module under the name that its environment has."""
    return script("similarity_gate")


def test_the_gate_is_the_design_s_but_for_the_number_of_random_peers(gate):
    flip, noise = gate.HALVES["flip"], gate.HALVES["random"]
    assert (flip.agents, flip.steps, flip.threshold) == (3, 10_000, -800)
    assert (noise.agents, noise.steps, noise.threshold) == (16, 9_000, -450)
    assert noise.peer.random
    assert noise.peer.env is None
    config = gate.configuration(gate.Cell("flip", gate.label({}), 3, 10_000, 3))
    assert (config.env.id, config.train.seed, config.agent.hidden) == ("Pendulum-v1", 3, (64, 64))
    assert (config.agent.batch_size, config.agent.actor_lr, config.agent.critic_lr) == (64, 1e-3, 1e-3)


def test_the_reversed_pendulum_differs_by_the_sign_of_the_torque_alone(gate):
    plain, turned = gate.gymnasium.make("Pendulum-v1"), gate.reversed_pendulum()
    first, second = plain.reset(seed=4)[0], turned.reset(seed=4)[0]
    np.testing.assert_array_equal(first, second)
    for torque in (1.3, -0.2, 2.0):
        action = np.array([torque], np.float32)
        expected, found = plain.step(action), turned.step(-action)
        np.testing.assert_array_equal(expected[0], found[0])
        assert expected[1] == found[1]
    assert plain.action_space == turned.action_space


def test_a_measure_is_named_by_what_differs_from_the_default(gate):
    assert gate.label({}) == '{"divergence": "jeffreys"}'
    assert gate.label({"floor": True, "scope": "pooled"}) == '{"divergence": "jeffreys", "floor": true}'
    with pytest.raises(ConfigError, match=r"dps\.scope"):
        gate.label({"scope": "everyone"})


@pytest.mark.slow
@pytest.mark.parametrize("half", ["flip", "random"])
def test_each_half_plays_and_scores_a_short_run(gate, half, monkeypatch):
    monkeypatch.setitem(gate.SETTINGS, "eval", {"every": 20, "episodes": 1, "max_episode_steps": 10})
    monkeypatch.setitem(gate.SETTINGS["agent"], "start_steps", 20)
    cell = gate.Cell(half, gate.label({"scope": "agent", "floor": True}), 0, 30, 3)
    assert -200 < gate.play(cell) < 0


def test_finished_cells_are_not_run_again(gate, tmp_path):
    file = tmp_path / "results/gate.csv"
    cells = [gate.Cell("flip", gate.label({"divergence": "kl"}), seed, 10_000, 3) for seed in (0, 1)]
    for seed, cell in enumerate(cells):
        gate.append_result(file, cell, -100.25 - seed)

    def refuse(*_given):
        pytest.fail("ran a finished cell")

    done = gate.run_missing(cells, gate.read_results(file), play=refuse, note=refuse, jobs=1)
    assert done == dict(zip(cells, (-100.25, -101.25), strict=True))
    assert len(file.read_text().splitlines()) == 3


def size(gate, half):
    return gate.HALVES[half].steps, gate.HALVES[half].agents


def scored(gate, scores, *, seeds=(0, 1, 2)):
    """Results that lie 10 below, at and 10 above what is given for a measure and a half."""
    return {
        gate.Cell(half, gate.label(gate.NAMED[measure]), seed, *size(gate, half)): score + 10 * (seed - 1)
        for (measure, half), score in scores.items()
        for seed in seeds
    }


SHARP = {
    ("jeffreys", "flip"): -400,
    ("jeffreys", "random"): -200,
    ("none", "flip"): -1300,
    ("none", "random"): -190,
    ("isolated", "flip"): -500,
    ("isolated", "random"): -700,
}


def test_the_table_says_which_half_passes(gate):
    results = scored(gate, SHARP)
    measures = [gate.label(gate.NAMED[name]) for name in ("jeffreys", "none", "isolated")]
    lines = gate.table(gate.verdicts(measures, [0, 1, 2, 3], results)).splitlines()
    assert [line.endswith("| passes |") for line in lines[2:]] == [True, True, False, True, True, False]
    assert lines[2].startswith("| `jeffreys` | flip | −400 | 10 | −410 to −3")
    assert "| 3 | passes |" in lines[2]


@pytest.mark.parametrize(
    ("changed", "holds", "said"),
    [
        ({}, True, "The gate holds"),
        ({("none", "flip"): -700}, False, "none passes flip with −700"),
        ({("isolated", "random"): -400}, False, "isolated passes random with −400"),
        ({("jeffreys", "flip"): -900}, False, "jeffreys fails flip with −900"),
        ({("jeffreys", "random"): -450}, False, "jeffreys fails random with −450"),
    ],
)
def test_the_gate_holds_when_the_default_passes_and_the_two_others_fail(gate, changed, holds, said):
    found, sentence = gate.judgement([0, 1, 2], scored(gate, SHARP | changed))
    assert found is holds
    assert said in sentence


def test_the_gate_is_not_judged_without_its_three_measures(gate):
    scores = {key: score for key, score in SHARP.items() if key[0] != "none"}
    assert gate.judgement([0, 1, 2], scored(gate, scores)) == (
        None,
        "The gate is not judged: no run of none (flip) of 3 of 3 seeds.",
    )
    assert gate.judgement([7], scored(gate, SHARP))[0] is None


def test_the_gate_is_judged_over_the_same_seeds_of_all_three(gate):
    found, sentence = gate.judgement([0, 1, 2, 3], scored(gate, SHARP, seeds=(0, 1, 2, 3)))
    assert found is True, sentence
    short = scored(gate, {("isolated", "random"): -700}, seeds=(0, 1, 2))
    others = {key: score for key, score in SHARP.items() if key != ("isolated", "random")}
    found, sentence = gate.judgement([0, 1, 2, 3], short | scored(gate, others, seeds=(0, 1, 2, 3)))
    assert (found, sentence) == (
        None,
        "The gate is not judged: no run of isolated (random) of 1 of 4 seeds.",
    )


def test_one_or_two_seeds_are_no_verdict(gate):
    measures = [gate.label(gate.NAMED["jeffreys"])]
    lines = gate.table(gate.verdicts(measures, [0, 1], scored(gate, SHARP))).splitlines()
    assert [line.endswith("| 2 | – |") for line in lines[2:]] == [True, True]


@pytest.mark.parametrize(("changed", "code"), [({}, 0), ({("none", "flip"): -700}, 1)])
def test_the_command_ends_with_1_where_the_gate_does_not_hold(
    gate, tmp_path, monkeypatch, capsys, changed, code
):
    file = tmp_path / "gate.csv"
    for cell, score in scored(gate, SHARP | changed).items():
        gate.append_result(file, cell, score)
    monkeypatch.setattr(sys, "argv", ["gate", "--summary", "--results", str(file), "--seeds", "0,1,2"])
    with pytest.raises(SystemExit) as ended:
        gate.main()
    assert ended.value.code == code
    assert capsys.readouterr().out.count("\n") == 10


def test_another_size_is_shown_and_not_judged(gate, tmp_path, monkeypatch, capsys):
    file = tmp_path / "gate.csv"
    for seed in (0, 1, 2):
        gate.append_result(file, gate.Cell("random", gate.label({}), seed, 500, 5), -800.0)
    monkeypatch.setattr(
        sys, "argv", ["gate", "--summary", "--results", str(file), "--steps", "500", "--agents", "5"]
    )
    gate.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| `jeffreys` | random | −800 | 0 | −800 to −800 | 3 | fails |"
    ]
