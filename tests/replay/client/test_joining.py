"""How a learner comes to its agent id: a replay that is away, overloaded or shutting down is asked again."""

import asyncio
from math import inf
from types import SimpleNamespace

import pytest
from contracts.sentences import assert_one_sentence
from replay.wire.services import SCHEMA, promptly

from dase_grpc.errors import (
    AgentTakenError,
    DrainingError,
    OverloadedError,
    SchemaMismatchError,
    UnreachableError,
)
from dase_grpc.replay.client.admission import join
from dase_grpc.replay.client.patience import Wanted
from dase_grpc.replay.wire.addresses import Address
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.v1 import cluster_pb2

MEMBER = Membership("the-run", 0, 1, ttl_s=10, capacity=10, min_size=1)
SILENT = UnreachableError("no answer")
OVERLOADED = OverloadedError("2048 calls of Join are open")
DRAINING = DrainingError("shutting down")
TAKEN = AgentTakenError("held by a live node")


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self):
        self.now, self.sleep = 0.0, asyncio.sleep

    async def slept(self, seconds):
        self.now += seconds
        await self.sleep(0)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    for module in ("admission", "patience"):
        place = f"dase_grpc.replay.client.{module}"
        monkeypatch.setattr(f"{place}.time", SimpleNamespace(monotonic=lambda: clock.now))
        monkeypatch.setattr(f"{place}.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": clock.slept}))
    return clock


class Scripted:
    """A replay that answers by a script, the last entry again and again."""

    def __init__(self, *joins, statuses=()):
        self.joins, self.statuses, self.asked = list(joins), list(statuses), []

    async def join(self, **named):
        self.asked.append(named)
        return self._next(self.joins)

    async def status(self, **named):
        return self._next(self.statuses)

    @staticmethod
    def _next(answers):
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def joined(self, **changes):
        wanted = {"node_id": "this node", "timeout_s": 60.0, "away_s": 600.0, **changes}
        return await promptly(join(self, Wanted(Address("host", 1), 0, "", **wanted), SCHEMA))


async def test_one_that_is_waited_for_for_ever_is_asked_by_calls_that_grpc_can_time():
    replay = Scripted(SILENT, DRAINING, MEMBER)
    assert await replay.joined(timeout_s=inf, away_s=inf) == MEMBER
    assert {asked["timeout_s"] for asked in replay.asked} == {3_600.0}


@pytest.mark.parametrize(
    "errors", [[OVERLOADED], [DRAINING], [SILENT], [DRAINING, SILENT, SILENT, OVERLOADED]]
)
async def test_a_replay_that_does_not_serve_just_now_is_asked_again_as_the_same_node(errors):
    replay = Scripted(*errors, MEMBER)
    assert await replay.joined() == MEMBER
    assert [each["node_id"] for each in replay.asked] == ["this node"] * (len(errors) + 1)


async def test_a_node_that_has_ended_is_named_each_time_and_another_holder_is_waited_for(clock):
    silent = cluster_pb2.StatusResponse()
    replay = Scripted(TAKEN, TAKEN, MEMBER, statuses=[silent])
    assert await replay.joined(ended_node_id="the node before") == MEMBER
    assert [each["ended_node_id"] for each in replay.asked] == ["the node before"] * 3
    assert clock.now > 0


def held(seconds_since_heartbeat, uptime_seconds=None):
    agent = cluster_pb2.AgentStatus(agent_id=0, lease="live", seconds_since_heartbeat=seconds_since_heartbeat)
    return cluster_pb2.StatusResponse(agents=[agent], uptime_seconds=uptime_seconds)


@pytest.mark.parametrize("uptime_s", [None, 1_000.0, 0.5])
async def test_a_holder_that_beats_is_not_waited_for(uptime_s):
    replay = Scripted(TAKEN, statuses=[held(9.0, 1_000.0), held(0.1, uptime_s)])
    with pytest.raises(AgentTakenError):
        await replay.joined()


async def test_a_silent_holder_whose_lease_begins_anew_with_its_replay_has_not_beaten():
    replay = Scripted(
        TAKEN, MEMBER, statuses=[held(9.0, 1_000.0), held(0.6, 0.5), cluster_pb2.StatusResponse()]
    )
    assert await replay.joined() == MEMBER


@pytest.mark.parametrize("error", [OVERLOADED, DRAINING])
async def test_one_that_answers_is_given_up_when_it_has_not_served_for_as_long_as_it_may_be_away(
    clock, error, caplog
):
    with pytest.raises(type(error), match=r"^gave up after 600 s: ") as refusal:
        await Scripted(error).joined()
    assert_one_sentence(refusal.value, str(error))
    assert clock.now == pytest.approx(600)
    assert caplog.text.count(f"{error}; trying again for up to 600 s") == 1


async def test_one_that_has_never_answered_is_given_up_sooner_and_one_that_shut_down_is_not(clock):
    with pytest.raises(
        UnreachableError, match=r"host:1 does not answer \(waited up to 60 s\); start it with"
    ):
        await Scripted(SILENT).joined()
    assert clock.now == pytest.approx(60)
    with pytest.raises(UnreachableError, match=r"gave up after 600 s: no answer"):
        await Scripted(DRAINING, SILENT).joined()


@pytest.mark.parametrize("error", [OVERLOADED, DRAINING])
async def test_whoever_would_not_wait_is_told_at_once(clock, error):
    with pytest.raises(type(error), match=f"^{error}$"):
        await Scripted(error).joined(away_s=0.0)
    assert clock.now == 0


async def test_what_no_new_attempt_would_put_right_is_raised_at_once(clock):
    with pytest.raises(SchemaMismatchError):
        await Scripted(SchemaMismatchError("another world")).joined()
    assert clock.now == 0


async def test_a_replay_that_is_overloaded_while_it_is_asked_for_the_holder_is_asked_again():
    nobody = cluster_pb2.StatusResponse()
    replay = Scripted(TAKEN, TAKEN, MEMBER, statuses=[OVERLOADED, nobody, SILENT, nobody])
    assert await replay.joined() == MEMBER
