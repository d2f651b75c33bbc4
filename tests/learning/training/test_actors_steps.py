"""The environment steps of a learner whose actors explore: what is due at a multiple comes at it."""

import math
from fractions import Fraction

import pytest

from dase_grpc.learning.training.collection import ActorsSteps
from dase_grpc.learning.training.state import Counters
from dase_grpc.pace import Origin, Schedule

FIRST, TOTAL, EVALUATIONS, LINES = 1_000, 20_000, 1_000, 250


class Collected:
    """A source whose actors are as far as anybody asks."""

    origin = Origin("buffer", 0)

    def reach(self, steps: int) -> int:
        return steps


def counted(ratio: str, *, marks=(EVALUATIONS, LINES)) -> tuple[list[int], int]:
    """The steps that the updates of a run reach, and how many updates these are."""
    at = Counters()
    collection = ActorsSteps(Schedule(Fraction(ratio), FIRST, TOTAL, marks), Collected(), at)
    reached, updates = [], 0
    while at.steps < TOTAL:
        collection.step()
        if collection.may_update:
            collection.took_batch()
            updates += 1
        reached.append(at.steps)
    return reached, updates


@pytest.mark.parametrize("ratio", ["2", "1", "0.5", "0.3", "0.25", "0.1", "0.01"])
def test_no_evaluation_is_passed_over_and_the_run_ends_at_its_last_step(ratio):
    reached, updates = counted(ratio)
    assert reached[-1] == TOTAL
    assert {*range(EVALUATIONS, TOTAL + 1, EVALUATIONS)} <= {*reached}
    assert updates == math.ceil(Fraction(ratio) * (TOTAL - FIRST + 1))


@pytest.mark.parametrize("ratio", ["1", "0.5", "0.1", "0.005"])
def test_lines_of_metrics_come_at_their_multiples_where_updates_are_not_rarer(ratio):
    reached, _ = counted(ratio)
    assert {*range(LINES, TOTAL + 1, LINES)} <= {*reached}


def test_an_update_that_passes_several_marks_stops_at_the_evaluation():
    assert Schedule(Fraction("0.001"), FIRST, TOTAL, (EVALUATIONS, LINES)).stop(1_900, 2_800) == 2_000
