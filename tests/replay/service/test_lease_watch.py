"""What the replay's log says about leases, looked at when the test says so."""

import pytest
from replay.wire.services import SCHEMA, rows_of

from dase_grpc.progress import Progress
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.service.monitor import LeaseWatch

ALONE = (
    "no agent is left; the buffer holds {} transitions, and whoever joins finds them until this node is "
    "stopped"
)


class Replay:
    """A run in memory and the watch over it."""

    def __init__(self, caplog):
        caplog.set_level("INFO")
        self._log = caplog
        self.run = SharedRun("r", capacity=100, min_size=1, seed=0, ttl_s=10.0)
        self.watch = LeaseWatch(self.run)

    def join(self, agent_id, *, now):
        return self.run.join("node", wanted=agent_id, run_id="", schema=SCHEMA, now=now)

    def leave(self, lease):
        self.run.leases.leave(lease.agent_id, lease.epoch, because="finished")

    def said(self, *, now):
        """What a look at `now` says."""
        self._log.clear()
        self.watch.look(now)
        return self._log.messages


@pytest.fixture
def replay(caplog):
    return Replay(caplog)


def test_nothing_is_said_before_anybody_has_come(replay):
    assert replay.said(now=0) == []


def test_that_nobody_is_left_is_said_once_each_time_all_have_left(replay):
    first, second = replay.join(0, now=0), replay.join(1, now=0)
    replay.run.store.append("w", 1, rows_of(1, 20), agent_id=0)
    assert replay.said(now=1) == []
    replay.leave(first)
    assert replay.said(now=2) == []
    replay.leave(second)
    assert replay.said(now=3) == [ALONE.format(20)]
    assert replay.said(now=4) == []
    third = replay.join(0, now=5)
    assert replay.said(now=6) == []
    replay.leave(third)
    assert replay.said(now=7) == [ALONE.format(20)]


def test_an_agent_that_comes_and_goes_between_two_looks_counts_too(replay):
    assert replay.said(now=0) == []
    replay.leave(replay.join(0, now=1))
    assert replay.said(now=2) == [ALONE.format(0)]


def test_an_agent_that_falls_silent_is_not_there_until_it_is_heard_again(replay):
    lease = replay.join(0, now=0)
    assert replay.said(now=10) == []
    silent = "agent 0 was silent for 10 s: its lease has ended and its id is free"
    assert replay.said(now=11) == [silent, ALONE.format(0)]
    replay.run.leases.renew(0, lease.epoch, 12, progress=Progress())
    assert replay.said(now=13) == ["agent 0 is heard again: its lease goes on"]


def test_a_replay_that_restores_leases_of_agents_that_left_says_nothing_of_them(replay):
    replay.leave(replay.join(0, now=0))
    replay.watch = LeaseWatch(replay.run)  # as a replay that was started again begins
    assert replay.said(now=1) == []
