"""When a node that fails is started again, with the time brought by the test."""

import pytest

from dase_grpc.launch.supervision import (
    HEALTHY_S,
    IN_ALL,
    LONGEST_PAUSE_S,
    MAX_RESTARTS,
    RestartPolicy,
    is_lasting,
)


def test_the_pauses_double_from_a_second_until_the_node_is_given_up():
    policy = RestartPolicy()
    pauses = [policy.pause_s(ran_s=5.0) for _ in range(MAX_RESTARTS + 2)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, None, None]
    assert policy.failures == MAX_RESTARTS


def test_no_pause_is_longer_than_the_longest():
    policy = RestartPolicy(limit=2_000)
    pauses = [policy.pause_s(ran_s=0.0) for _ in range(2_000)]
    assert pauses[4:7] == [16.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_node_that_was_well_for_a_while_begins_anew():
    policy = RestartPolicy(limit=2)
    assert [policy.pause_s(ran_s=1.0) for _ in range(2)] == [1.0, 2.0]
    assert policy.pause_s(ran_s=HEALTHY_S) == 1.0
    assert policy.pause_s(ran_s=HEALTHY_S - 1) == 2.0
    assert policy.pause_s(ran_s=HEALTHY_S - 1) is None


def test_a_learner_that_fails_at_the_same_step_is_given_up_however_long_it_takes_to_get_there():
    policy = RestartPolicy(limit=3)
    assert [policy.pause_s(ran_s=10 * HEALTHY_S, step=500) for _ in range(4)] == [1.0, 2.0, 4.0, None]


def test_a_learner_with_a_newer_checkpoint_begins_anew():
    policy = RestartPolicy(limit=2)
    assert [policy.pause_s(ran_s=1.0, step=step) for step in (0, 0, 10, 10, 11)] == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert [policy.pause_s(ran_s=1.0, step=step) for step in (11, 7)] == [2.0, None]


@pytest.mark.parametrize("learner", [True, False])
def test_a_node_that_gets_on_between_its_failures_has_a_bound_too(learner):
    policy = RestartPolicy(limit=2)
    pauses = [
        policy.pause_s(ran_s=HEALTHY_S, step=count if learner else None) for count in range(2 * IN_ALL + 1)
    ]
    assert pauses == [1.0] * 2 * IN_ALL + [None]


def test_a_limit_of_none_gives_up_at_once():
    assert RestartPolicy(limit=0).pause_s(ran_s=10 * HEALTHY_S) is None


@pytest.mark.parametrize(("code", "lasting"), [(-9, False), (0, False), (1, False), (2, True), (3, True)])
def test_what_would_end_the_same_way_again_is_known_by_its_exit_code(code, lasting):
    assert is_lasting(code) is lasting


def test_what_refuses_a_node_at_its_restart_may_pass_unless_the_service_says_for_good():
    assert is_lasting(2)
    assert not is_lasting(2, at_restart=True)
    assert is_lasting(3)
    assert is_lasting(3, at_restart=True)
    assert not is_lasting(1)
