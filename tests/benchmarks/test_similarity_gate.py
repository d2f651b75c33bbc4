"""The gate's bookkeeping and its two kinds of peers; what it measures is in docs/similarity.md."""

import numpy as np
import pytest

from dase_grpc.errors import ConfigError


@pytest.fixture
def gate(script):
    """The script as a module under the name that its environment has."""
    return script("similarity_gate")


def test_the_gate_is_the_design_s(gate):
    flip, noise = gate.HALVES["flip"], gate.HALVES["random"]
    assert (flip.agents, flip.steps, flip.threshold) == (3, 10_000, -800)
    assert (noise.agents, noise.steps, noise.threshold) == (4, 9_000, -450)
    assert noise.peer.random
    assert noise.peer.env is None
    config = gate.configuration(gate.Cell("flip", gate.label({}), 3, 10_000))
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


@pytest.mark.parametrize("half", ["flip", "random"])
def test_each_half_plays_and_scores_a_short_run(gate, half, monkeypatch):
    monkeypatch.setitem(gate.SETTINGS, "eval", {"every": 20, "episodes": 1, "max_episode_steps": 10})
    monkeypatch.setitem(gate.SETTINGS["agent"], "start_steps", 20)
    cell = gate.Cell(half, gate.label({"scope": "agent", "floor": True}), 0, 30)
    assert -200 < gate.play(cell) < 0


def test_finished_cells_are_not_run_again(gate, tmp_path, monkeypatch):
    file = tmp_path / "results/gate.csv"
    cells = [gate.Cell("flip", gate.label({"divergence": "kl"}), seed, 10_000) for seed in (0, 1)]
    for seed, cell in enumerate(cells):
        gate.append_result(file, cell, -100.25 - seed)
    monkeypatch.setattr(gate, "play", lambda _cell: pytest.fail("ran a finished cell"))
    assert gate.run_missing(cells, file, jobs=1) == dict(zip(cells, (-100.25, -101.25), strict=True))
    assert len(file.read_text().splitlines()) == 3


def test_the_table_says_which_half_passes(gate):
    good, bad = gate.label({}), gate.label({"divergence": "none"})
    scores = {(good, "flip"): -400, (good, "random"): -200, (bad, "flip"): -1300, (bad, "random"): -190}
    results = {
        gate.Cell(half, measure, seed, gate.HALVES[half].steps): score + seed
        for (measure, half), score in scores.items()
        for seed in (0, 2)
    }
    lines = gate.table([good, bad], [0, 2], results).splitlines()
    assert [" yes " in line for line in lines[1:]] == [True, True, False, True]
    assert "-399      1  yes     -400 -398" in lines[1]
