"""Stages of an update, timed by a clock that a test moves."""

import pytest

from dase_grpc.learning.training.updates import UpdateTiming
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.metrics.nodes import LearnerMetrics

STAGES = ("sample", "update", "load", "weigh", "learn")


class Timed:
    """Updates of given durations, and how often each stage was seen, and for how long."""

    def __init__(self):
        self.now, self._registry = 100.0, make_registry()
        self._timing = UpdateTiming(LearnerMetrics(self._registry, 0), lambda: self.now)

    def update(self, *, parts, finished=True, **seconds):
        self._timing.begin()
        for stage, duration in seconds.items():
            self.now += duration
            if stage != "learn":
                assert self._timing.lap(stage) == self.now
        if finished:
            assert self._timing.finish(parts=parts) == self.now

    def seen(self):
        name = "dase_learner_update_duration_seconds"
        values = (
            [self._registry.get_sample_value(f"{name}_{what}", {"agent_id": "0", "stage": stage}) or 0.0]
            for stage in STAGES
            for what in ("count", "sum")
        )
        return [(count, total) for (count,), (total,) in zip(values, values, strict=True)]


@pytest.mark.parametrize(
    ("parts", "of_parts"), [(False, [(0, 0), (0, 0), (0, 0)]), (True, [(1, 2), (1, 4), (1, 8)])]
)
def test_every_update_counts_its_wait_and_the_rest_and_its_parts_where_it_is_looked_at(parts, of_parts):
    timed = Timed()
    timed.update(parts=parts, sample=1.0, load=2.0, weigh=4.0, learn=8.0)
    assert timed.seen() == [(1, 1), (1, 14), *of_parts]


def test_an_update_that_is_skipped_counts_nothing():
    timed = Timed()
    timed.update(parts=True, finished=False, sample=1.0, load=2.0)
    timed.update(parts=False, sample=0.5, load=0.0, weigh=0.0, learn=0.0)
    assert timed.seen() == [(1, 0.5), (1, 0), (0, 0), (0, 0), (0, 0)]
