"""DuePolicies: the latest that is due and nothing behind it, to the last policy of every agent."""

import threading
from collections import Counter

from patience import PATIENCE_S

from dase_grpc.nodes.followed import DuePolicies
from dase_grpc.replay.buffer.policies import PolicyBytes


def policy(step, *, agent_id=0, version=None):
    version = step if version is None else version
    return PolicyBytes.of(b"p", agent_id=agent_id, epoch=1, version=version, step=step)


def due_of(evaluated=None, *, every=10, total=100):
    skipped = Counter()
    due = DuePolicies(
        {0: None} if evaluated is None else evaluated,
        every=every,
        total=total,
        skipped=lambda agent_id, count: skipped.update({agent_id: count}),
    )
    return due, skipped


def evaluated(due):
    """Takes the next and says that it is evaluated; its step."""
    taken = due.take()
    due.done(taken)
    return taken.step


def test_the_first_policy_is_due_and_then_the_first_from_each_multiple_on():
    due, skipped = due_of()
    taken = []
    for step in (0, 4, 9, 10, 14, 25, 26, 30):
        due.offer(policy(step))
        due.close() if step == 30 else None
        if step in (0, 10, 25):
            taken.append(evaluated(due))
    assert (taken, skipped) == ([0, 10, 25], {})


def test_the_same_policy_at_later_steps_is_due_again():
    due, _ = due_of()
    for step in (0, 10):
        due.offer(policy(step, version=0))
        assert evaluated(due) == step


def test_what_is_not_taken_in_time_gives_way_to_the_latest_and_is_counted():
    due, skipped = due_of()
    for step in range(0, 50, 5):
        due.offer(policy(step))
    assert evaluated(due) == 40
    assert skipped == {0: 4}  # 0, 10, 20 and 30


def test_multiples_that_never_arrived_count_as_skipped():
    due, skipped = due_of({0: 20})
    due.offer(policy(63))
    assert evaluated(due) == 63
    assert skipped == {0: 3}  # 30, 40 and 50


def test_what_was_evaluated_before_a_restart_is_not_repeated():
    due, skipped = due_of({0: 30})
    for step in (0, 10, 30, 39):
        due.offer(policy(step))
    due.offer(policy(40))
    assert evaluated(due) == 40
    assert skipped == {}


def test_an_agent_that_goes_back_to_its_checkpoint_is_evaluated_once_it_is_further_than_before():
    due, _ = due_of({0: 30})
    due.offer(policy(12))
    due.offer(policy(45))
    assert evaluated(due) == 45


def test_the_last_step_is_due_although_it_is_no_multiple_and_then_nothing_is_left():
    due, _ = due_of(total=25)
    for step in (0, 10, 20, 25):
        due.offer(policy(step))
        assert evaluated(due) == step
    assert due.take() is None


def test_the_agent_that_is_furthest_behind_comes_first():
    due, _ = due_of({0: 20, 1: 10, 2: None})
    for agent_id in (0, 1, 2):
        due.offer(policy(30, agent_id=agent_id))
    assert [due.take().agent_id for _ in range(3)] == [2, 1, 0]


def test_nothing_is_left_only_once_the_last_of_every_agent_is_evaluated():
    due, _ = due_of({0: None, 1: None}, total=10)
    for agent_id in (0, 1):
        due.offer(policy(10, agent_id=agent_id))
    first, second = due.take(), due.take()
    due.done(first)
    given = []
    thread = threading.Thread(target=lambda: given.append(due.take()))
    thread.start()
    assert given == []
    due.done(second)
    thread.join(PATIENCE_S)
    assert given == [None]


def test_an_agent_that_has_finished_ends_with_the_last_policy_it_published():
    due, _ = due_of(total=100)
    due.offer(policy(90))
    assert evaluated(due) == 90
    due.offer(policy(95))
    due.heard(0, total=100, finished=True, version=99)  # which has not arrived yet
    due.offer(policy(99))
    due.heard(0, total=100, finished=True, version=99)
    assert evaluated(due) == 99
    assert due.take() is None


def test_agents_that_published_nothing_and_have_finished_leave_nothing_to_do():
    due, _ = due_of({0: None, 1: None})
    for agent_id in (0, 1):
        due.heard(agent_id, total=100, finished=True, version=None)
    assert due.take() is None


def test_an_agent_that_has_finished_a_shorter_run_may_be_resumed():
    due, _ = due_of({0: 80}, total=100)
    due.heard(0, total=80, finished=True, version=None)
    due.heard(0, total=100, finished=False, version=None)
    due.offer(policy(100))
    assert evaluated(due) == 100
    assert due.take() is None


def test_an_agent_whose_run_is_longer_than_was_said_is_not_done_early():
    due, _ = due_of(total=20)
    due.heard(0, total=40, finished=False, version=None)
    for step in (20, 40):
        due.offer(policy(step))
        assert evaluated(due) == step
    assert due.take() is None


def test_closing_wakes_whoever_waits():
    due, _ = due_of()
    given = []
    thread = threading.Thread(target=lambda: given.append(due.take()))
    thread.start()
    due.close()
    thread.join(PATIENCE_S)
    assert given == [None]
