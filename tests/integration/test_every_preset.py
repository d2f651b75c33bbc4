"""Every preset of the paper trains: 3 algorithms, 8 environments, single, DASE and DPD."""

from itertools import product
from threading import Event

import numpy as np
import pytest

from dase_grpc.config.algorithms import ALGORITHMS
from dase_grpc.config.presets import ENVIRONMENTS, layered
from dase_grpc.launch.lockstep import open_lockstep, run_lockstep
from dase_grpc.runs.directory import RunDirectory, checkpoint_paths
from dase_grpc.runs.logs import read_evaluations, read_metrics

STEPS = 1_000
UPDATES = 51
"""The first update comes with step 950, the last with step 1 000."""

SHORTENED = ("agent.start_steps=950", "eval.every=1000", "eval.episodes=1", "eval.max_episode_steps=200")


METHODS = ("single", "dase", "dpd")


def combinations() -> list[object]:
    """All of them; usually each environment once, with every algorithm and method among those."""
    return [
        pytest.param(algorithm, environment, method, marks=() if usual == number % 9 else pytest.mark.long)
        for number, environment in enumerate(sorted(ENVIRONMENTS))
        for usual, (algorithm, method) in enumerate(product(ALGORITHMS, METHODS))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "environment", "method"), combinations())
def test_a_preset_trains(algorithm, environment, method, tmp_path):
    config = layered(
        preset_name=f"paper/{algorithm}/{environment}",
        file=None,
        flags={"train.steps": STEPS},
        assignments=SHORTENED,
        method=method,
    )
    directory = RunDirectory.create(tmp_path, "run", config, mode="lockstep")
    with open_lockstep(config, directory) as run:
        run_lockstep(run, Event(), lambda: None)

    assert len(run.store.ring) == STEPS * config.train.agents
    agents = directory.agents()
    assert len(agents) == (1 if method == "single" else 2)
    for agent in agents:
        assert list(checkpoint_paths(agent.checkpoints)) == [STEPS]
        evaluations = read_evaluations(agent.evaluations.path)
        assert list(evaluations.step) == [0, STEPS]
        assert np.isfinite(evaluations.return_mean).all()
        last = read_metrics(agent.metrics.path)[-1]
        assert (last["step"], last["updates"]) == (STEPS, UPDATES)
        assert np.isfinite(last["critic_loss"])
