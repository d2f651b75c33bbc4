"""StepLimiter: updates and environment steps keep their proportion, and never wait for each other."""

import math
from fractions import Fraction

import pytest
from contracts.sentences import assert_one_sentence, refuses
from hypothesis import given
from hypothesis import strategies as st

from dase_grpc.errors import MalformedError
from dase_grpc.pace import Pace, StepLimiter, deadlock

RATIOS = st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 7.0])


@st.composite
def paces(draw):
    ratio = draw(RATIOS)
    least = 1 + math.ceil(1 / Fraction(str(ratio)))
    return Pace(
        ratio,
        draw(st.integers(least, least + 30)),
        first_steps=draw(st.integers(1, 40)),
        collected_before=draw(st.integers(0, 9)),
    )


def test_no_update_comes_before_the_first_steps_and_one_after_each_from_then_on():
    limiter = StepLimiter(Pace(1.0, 10, first_steps=5))
    assert [limiter.missing(steps) for steps in range(7)] == [5, 4, 3, 2, 1, 0, 0]


def test_before_the_first_update_the_actors_may_be_as_far_ahead_as_later():
    limiter = StepLimiter(Pace(1.0, 10, first_steps=5))
    assert limiter.room(0) == 14
    assert limiter.room(14) == 0


def test_a_batch_that_was_only_drawn_makes_no_room_for_steps_and_one_that_was_used_does():
    limiter = StepLimiter(Pace(1.0, 2, first_steps=1))
    assert limiter.room(2) == 0
    limiter.draw()
    assert limiter.room(2) == 0
    limiter.charge(1)
    assert limiter.room(2) == 1


def test_batches_on_their_way_are_counted_so_that_updates_are_never_ahead():
    limiter = StepLimiter(Pace(1.0, 5, first_steps=1), used=3, held=2)
    assert [limiter.missing(steps) for steps in (5, 6)] == [1, 0]


@pytest.mark.parametrize("batches", [-1, 1])
def test_updates_cannot_have_taken_what_was_not_sent(batches):
    with pytest.raises(MalformedError) as refused:
        StepLimiter(Pace(1.0, 5)).charge(batches)
    assert_one_sentence(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"updates_per_step": 0.0},
        {"updates_per_step": math.inf},
        {"updates_per_step": math.nan},
        {"step_error_buffer": 1},
        {"updates_per_step": 0.1, "step_error_buffer": 10},
        {"first_steps": 0},
        {"collected_before": -1},
    ],
)
def test_a_pace_that_makes_no_sense_or_could_stand_still_is_refused_with_the_cause(wrong):
    with refuses(MalformedError):
        Pace(**{"updates_per_step": 1.0, "step_error_buffer": 10, **wrong})


def test_what_could_stand_still_says_how_much_is_enough():
    assert "set it to at least 11" in (deadlock(0.1, 10) or "")
    assert deadlock(0.1, 11) is None


@given(paces(), st.integers(1, 20), st.lists(st.sampled_from(["insert", "draw", "use"]), max_size=300))
def test_in_every_order_steps_and_updates_keep_within_the_error_buffer_and_one_of_them_can_go_on(
    pace, chunk, wishes
):
    limiter, collected = StepLimiter(pace), pace.collected_before
    for wish in wishes:
        if wish == "insert":
            collected += min(chunk, limiter.room(collected))
        elif wish == "draw" and not limiter.missing(collected):
            limiter.draw()
        elif wish == "use" and limiter.drawn > limiter.used:
            limiter.charge(1)
        after_first = collected - pace.collected_before - (pace.first_steps - 1)
        ahead = after_first - limiter.used / pace.ratio
        assert ahead <= pace.step_error_buffer
        assert limiter.used == 0 or ahead >= 0
        idle = limiter.drawn == limiter.used  # a learner that has used all it was sent
        assert not idle or limiter.room(collected) or not limiter.missing(collected)


@given(paces(), st.integers(1, 20))
def test_a_run_of_accepted_settings_comes_to_its_end_with_exactly_the_updates_of_its_steps(pace, chunk):
    limiter, collected, target = StepLimiter(pace), pace.collected_before, pace.first_steps + 200
    while limiter.used < pace.ratio * (target - pace.first_steps + 1):
        stored = min(chunk, limiter.room(collected))
        collected += stored
        while not limiter.missing(collected):
            limiter.draw()
        assert stored or limiter.drawn > limiter.used  # else nothing would ever move again
        limiter.charge(limiter.drawn - limiter.used)
    assert collected - pace.collected_before - target <= pace.step_error_buffer + chunk
