"""How long a step takes."""

import pytest

from dase_grpc.launch.time_left import StepPace, left


def test_a_pace_is_not_known_before_it_was_measured_for_long_enough():
    pace = StepPace()
    assert (pace.step, pace.since_s, pace.step_s(measured_s=0)) == (-1, None, None)
    pace.observe(100, 5.0)
    assert (pace.step, pace.since_s, pace.step_s(measured_s=0)) == (100, 5.0, None)
    pace.observe(120, 15.0)
    assert (pace.step_s(measured_s=10), pace.step_s(measured_s=10.1)) == (0.5, None)


@pytest.mark.parametrize(("horizon_s", "first"), [(60.0, 940.0), (float("inf"), 0.0)])
def test_a_pace_reaches_back_as_far_as_its_horizon_in_bounded_memory(horizon_s, first):
    pace = StepPace(horizon_s)
    for tick in range(10_001):
        pace.observe(tick, tick / 10)
    assert pace.since_s == pytest.approx(first, abs=1.1)
    assert pace.step_s(measured_s=1) == pytest.approx(0.1)
    assert len(pace._seen) <= 122


def test_the_time_left_is_a_few_words():
    assert [left(None), left(130.0)] == ["time left not known yet", "about 2 min 10 s left"]
