"""Which nodes are started again and which are silent, with the time and the replay's answers brought here."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from dase_grpc.launch.processes import Node
from dase_grpc.launch.supervision import (
    IN_ALL,
    LONGEST_LOOK_S,
    MAX_RESTARTS,
    USUAL,
    RestartPolicy,
    Silence,
    is_lasting,
    silent_nodes,
)
from dase_grpc.replay.wire.v1 import cluster_pb2

HEALTHY_S, SILENT_S = USUAL.healthy_s, USUAL.silent_s


# -- restarts -----------------------------------------------------------------------------------------


def test_the_pauses_double_from_a_second_until_the_node_is_given_up():
    policy = RestartPolicy()
    pauses = [policy.pause_s(ran_s=5.0) for _ in range(MAX_RESTARTS + 2)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, None, None]
    assert policy.failures == MAX_RESTARTS


def test_no_pause_is_longer_than_the_longest():
    policy = RestartPolicy(limit=2_000)
    pauses = [policy.pause_s(ran_s=0.0) for _ in range(2_000)]
    assert pauses[4:7] == [16.0, 30.0, 30.0]
    assert pauses[-1] == USUAL.longest_pause_s


H = HEALTHY_S


@pytest.mark.parametrize(
    ("limit", "failures", "pauses"),
    [
        (2, [(1.0, None), (1.0, None), (H, None), (H - 1, None), (H - 1, None)], [1.0, 2.0, 1.0, 2.0, None]),
        (3, [(10 * H, 500)] * 4, [1.0, 2.0, 4.0, None]),
        (
            2,
            [(1.0, step) for step in (0, 0, 10, 10, 11, 11, 7)],
            [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, None],
        ),
        (2, [(H, None)] * (2 * IN_ALL + 1), [1.0] * 2 * IN_ALL + [None]),
        (2, [(H, step) for step in range(2 * IN_ALL + 1)], [1.0] * 2 * IN_ALL + [None]),
        (0, [(10 * H, None)], [None]),
    ],
    ids=[
        "a node that was well for a while begins anew",
        "a learner that fails at the same step is given up however long it takes to get there",
        "a learner with a newer checkpoint begins anew",
        "a replay that is well between its failures has a bound too",
        "a learner that gets on between its failures has a bound too",
        "a limit of none gives up at once",
    ],
)
def test_who_has_got_on_since_the_last_failure_begins_anew(limit, failures, pauses):
    policy = RestartPolicy(limit=limit)
    assert [policy.pause_s(ran_s=ran_s, step=step) for ran_s, step in failures] == pauses


@pytest.mark.parametrize(
    ("code", "lasting", "at_restart"),
    [(-9, False, False), (0, False, False), (1, False, False), (2, True, False), (3, True, True)],
)
def test_what_would_end_the_same_way_again_is_known_by_its_exit_code(code, lasting, at_restart):
    """What refuses a node at its restart may pass, unless the service says it for good."""
    assert (is_lasting(code), is_lasting(code, at_restart=True)) == (lasting, at_restart)


# -- who is silent ------------------------------------------------------------------------------------


@dataclass
class Process:
    """Runs until it has a return code."""

    returncode: int | None = None


def node(*, started_s: float = 0.0, heard: bool = False, ended: bool = False) -> Node:
    return Node("node", Process(0 if ended else None), Path("log"), started_s, heard=heard)


def status(*agents: tuple[int, str, float, str]) -> cluster_pb2.StatusResponse:
    """The replay's answer: of each agent its id, the state of its lease, its last heartbeat, its state."""
    return cluster_pb2.StatusResponse(
        agents=[
            cluster_pb2.AgentStatus(
                agent_id=agent_id,
                lease=lease,
                seconds_since_heartbeat=seconds,
                progress=cluster_pb2.Progress(state=state),
            )
            for agent_id, lease, seconds, state in agents
        ]
    )


def silent(answer, replay, *learners, now=100.0, env_timeout_s=0.0):
    return silent_nodes(answer, replay, learners, silent_s=SILENT_S, env_timeout_s=env_timeout_s, now=now)


def test_a_replay_that_does_not_answer_is_silent_and_nothing_is_known_of_the_learners():
    replay = node()
    assert silent(None, replay, node(heard=True)) == {replay: SILENT_S}
    assert silent(None, node(ended=True)) == {}


def test_a_learner_that_was_heard_of_and_has_no_lease_any_more_is_silent():
    first, second, third = (node() for _ in range(3))
    good = [(agent_id, "live", 0.2, "training") for agent_id in range(3)]
    assert silent(status(*good), node(), first, second, third) == {}
    then = status((0, "live", 0.2, "training"), (1, "expired", 11.0, "training"), (2, "left", 1.0, "stopped"))
    assert silent(then, node(), first, second, third) == {second: SILENT_S, third: SILENT_S}
    assert set(silent(status(), node(), first)) == {first}


def test_a_learner_that_is_not_yet_up_is_not_silent_although_its_predecessors_lease_goes_on():
    learner = node(started_s=95.0)
    old = status((0, "live", 8.0, "training"))
    assert silent(old, node(), learner, now=100.0) == {}
    restored = status((0, "live", 1.0, ""))
    assert silent(restored, node(), learner, now=100.0) == {}
    assert silent(status((0, "expired", 11.0, "training")), node(), learner, now=103.0) == {}
    assert not learner.heard
    assert silent(status((0, "live", 0.1, "training")), node(), learner, now=104.0) == {}
    assert learner.heard


def test_a_learner_that_has_ended_is_not_silent():
    assert silent(status(), node(), node(heard=True, ended=True)) == {}


def test_an_environment_may_keep_a_learner_silent_for_as_long_as_a_call_into_it_may_last():
    learner = node(heard=True)
    assert silent(status(), node(), learner, env_timeout_s=120.0) == {learner: 120.0}


# -- for how long -------------------------------------------------------------------------------------


def test_silence_is_over_when_it_has_lasted_for_the_limit_without_a_break():
    silence, one, other = Silence(), node(), node()
    looks = [silence.over({one: 10.0, other: 60.0}, now=1_000.0 + second) for second in range(0, 10, 2)]
    assert looks == [[]] * 5
    assert silence.over({one: 10.0}, now=1_010.0) == [one]
    assert silence.over({}, now=1_011.0) == []
    assert silence.over({one: 10.0}, now=1_012.0) == []


@pytest.mark.parametrize("jump_s", [LONGEST_LOOK_S, 3_600.0])
def test_time_in_which_nobody_looked_does_not_count(jump_s):
    """As after SIGSTOP and SIGCONT of the launcher, or a night in which the machine slept."""
    silence, one = Silence(), node()
    now, looks = 0.0, 0
    while not silence.over({one: SILENT_S}, now=now):
        now, looks = now + jump_s, looks + 1
    assert looks == SILENT_S / LONGEST_LOOK_S
