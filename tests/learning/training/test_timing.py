"""Stages of an update, timed by a clock that a test moves."""

from collections.abc import Callable

import pytest

from dase_grpc.learning.training.updates import UpdateTiming
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.metrics.nodes import LearnerMetrics


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def timed() -> tuple[Callable[..., None], Callable[[], dict[str, tuple[float, float]]]]:
    """Makes an update with given durations; and how often each stage was seen, and for how long."""
    registry, clock = make_registry(), Clock()
    timing = UpdateTiming(LearnerMetrics(registry, 0), clock)

    def update(*, parts: bool, finished: bool = True, **seconds: float) -> None:
        timing.begin()
        for stage, duration in seconds.items():
            clock.now += duration
            if stage != "learn":
                assert timing.lap(stage) == clock.now
        if finished:
            assert timing.finish(parts=parts) == clock.now

    def seen() -> dict[str, tuple[float, float]]:
        def value(what: str, stage: str) -> float:
            name = f"dase_learner_update_duration_seconds_{what}"
            return registry.get_sample_value(name, {"agent_id": "0", "stage": stage}) or 0.0

        stages = ("sample", "update", "load", "weigh", "learn")
        return {stage: (value("count", stage), value("sum", stage)) for stage in stages}

    return update, seen


def test_every_update_counts_its_wait_and_the_rest(timed):
    update, seen = timed
    update(parts=False, sample=1.0, load=2.0, weigh=4.0, learn=8.0)
    assert seen() == {"sample": (1, 1), "update": (1, 14), "load": (0, 0), "weigh": (0, 0), "learn": (0, 0)}


def test_an_update_that_is_looked_at_closely_counts_its_parts_too(timed):
    update, seen = timed
    update(parts=True, sample=1.0, load=2.0, weigh=4.0, learn=8.0)
    assert seen() == {"sample": (1, 1), "update": (1, 14), "load": (1, 2), "weigh": (1, 4), "learn": (1, 8)}


def test_an_update_that_is_skipped_counts_nothing(timed):
    update, seen = timed
    update(parts=True, finished=False, sample=1.0, load=2.0)
    update(parts=False, sample=0.5, load=0.0, weigh=0.0, learn=0.0)
    assert seen()["sample"] == (1, 0.5)
    assert seen()["load"] == (0, 0)
